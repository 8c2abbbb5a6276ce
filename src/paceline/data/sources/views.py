"""Tensors over the memory of arrays, including read-only ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Claimed:
    """An array that says of itself that it may be written to, and is kept alive by what is made of it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def tensor_over(array: np.ndarray[Any, Any]) -> Tensor:
    """Return the tensor that lies where an array does; what may only be read must not be written to.

    Of such memory torch warns, or before its version 2.7 refuses it, although nobody is about to write there.

    >>> array = np.arange(3)
    >>> array.flags.writeable = False
    >>> tensor_over(array)
    tensor([0, 1, 2])
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Claimed(array)))
