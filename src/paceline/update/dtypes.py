"""Names of the dtypes of torch, as tables, messages and files have them."""

from typing import Final

import torch

# What files of safetensors call the dtypes that we write.
SAFETENSORS_NAMES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype.

    >>> dtype_name(torch.float)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; raises KeyError if torch has none.

    >>> torch_dtype("float32")
    torch.float32
    """
    return _BY_NAME[name]


_BY_NAME: Final = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
