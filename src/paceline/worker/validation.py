"""Validation of the user's arguments: a mistake raises UsageError at the line that made it, with what was expected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import torch
from numpy import typing as npt
from torch import Tensor

from paceline.core.calls import MOST_SHOWN, shortened
from paceline.errors import UsageError
from paceline.update.dtypes import dtype_name
from paceline.update.rules import Hyper

Ids = Tensor | npt.NDArray[np.generic] | Sequence[int]

_INTEGERS: Final = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
_LARGEST: Final = 2**63 - 1
MOST_SAMPLES: Final = 1e18  # fits the frames of all messages, whole or not


def brief(value: object) -> str:
    """Return a short description of any value, for messages.

    >>> brief(torch.zeros(3, 2)), brief("x" * 100), brief(torch.nn.Linear)
    ('a tensor (3, 2) of float32', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", 'the class Linear')
    """
    if isinstance(value, Tensor) and value.is_nested:
        return f"a nested tensor of {dtype_name(value.dtype)}"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {dtype_name(value.dtype)}"
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} of {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple | dict | set) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)}"
    return shortened(repr(value[: 2 * MOST_SHOWN] if isinstance(value, str | bytes) else value))


def as_values(given: object, dtype: torch.dtype, where: str, what: str) -> Tensor:
    """Return numbers as a detached CPU tensor of this dtype, which may share their memory.

    Args:
        given: a tensor, an array, or numbers in sequences.
        dtype: of what is returned.
        where: which table, worker and clock, for messages.
        what: the name that messages give it.

    Raises:
        UsageError: complex, sparse, nested or meta tensors, arrays with a mask, or objects that are not numbers.
    """
    expected = f"expected a tensor, an array or a list of real numbers ({dtype_name(dtype)})"
    if isinstance(given, Tensor):
        if given.is_complex():
            raise UsageError(
                f"{where}: {what} is {brief(given)}, {expected}: give the real and the "
                "imaginary parts, torch.view_as_real(tensor)."
            )
        if given.is_nested:
            raise UsageError(
                f"{where}: {what} is {brief(given)}, {expected}: give rows of one length, "
                "torch.nested.to_padded_tensor(tensor, 0.0)."
            )
        if given.layout != torch.strided or given.is_quantized:
            raise UsageError(f"{where}: {what} is {brief(given)} that is {_kind(given)}, {expected}: make it dense.")
        if given.device.type == "meta":
            raise UsageError(f"{where}: {what} is {brief(given)} on device meta, which has no values; {expected}.")
        return given.detach().to(device="cpu", dtype=dtype)
    if isinstance(given, np.ndarray):
        if given.dtype.kind not in "fiub":
            raise UsageError(f"{where}: {what} is {brief(given)}, {expected}.")  # pyright: ignore[reportUnknownArgumentType]
        if np.ma.is_masked(given):  # pyright: ignore[reportUnknownMemberType]
            raise UsageError(f"{where}: {what} is an array with a mask, {expected}: give array.filled(0), for example.")
        given = np.require(given, requirements=["C", "W"])  # what torch takes without a warning
    elif isinstance(given, str | bytes) or not isinstance(given, Sequence | int | float | np.generic):
        raise UsageError(f"{where}: {what} is {brief(given)}, {expected}.")
    try:
        return torch.as_tensor(given, dtype=dtype, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"{where}: {what} is {brief(given)}, {expected} in equally long rows ({error}).") from None


def as_output(out: object, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> Tensor:
    """Return a tensor over the memory of `out`; raises UsageError if it does not fit."""
    expected = f"expected {shape} of {dtype_name(dtype)}, dense, contiguous and on the CPU"
    if isinstance(out, np.ndarray):
        array: npt.NDArray[np.generic] = out
        if array.dtype.kind != "f" or not array.flags.writeable or not array.flags.c_contiguous:
            raise UsageError(f"{where}: out is {brief(array)}, {expected}, that may be written to.")
        out = torch.from_numpy(array)
    if not isinstance(out, Tensor):
        raise UsageError(f"{where}: out is {brief(out)}, {expected}.")
    if (tuple(out.shape), out.dtype) != (shape, dtype):
        raise UsageError(f"{where}: out is {brief(out)}, {expected}.")
    if out.layout != torch.strided or not out.is_contiguous() or out.device.type != "cpu":
        raise UsageError(f"{where}: out is {brief(out)} on {out.device}, {_kind(out)}, {expected}.")
    return out.detach()


def as_count(samples: object, where: str) -> float:
    """Return a number of samples; raises UsageError unless it is a finite number >= 0."""
    if (
        type(samples) in (int, float) and 0 <= cast("float", samples) < MOST_SAMPLES
    ):  # as nearly always: spares the checks below
        return cast("float", samples)
    if isinstance(samples, Tensor | np.generic) and np.ndim(samples) == 0:
        samples = samples.item()
    is_number = isinstance(samples, int | float) and not isinstance(samples, bool)
    if not is_number or not 0 <= cast("float", samples) < MOST_SAMPLES:
        raise UsageError(
            f"{where}: samples is {brief(samples)}, expected a number of 0 or more, below {MOST_SAMPLES:g}."
        )
    return cast("float", samples)


def as_hyper(hyper: object, where: str) -> tuple[Hyper, ...]:
    """Return the hyperparameters of a push; raises UsageError unless they are a list of dicts of plain numbers."""
    if type(hyper) is tuple and not hyper:
        return ()
    groups = cast("Sequence[object]", hyper if isinstance(hyper, list | tuple) else (None,))
    if not all(map(_is_group, groups)):
        raise UsageError(
            f"{where}: hyper is {brief(hyper)}, expected a dict of plain numbers a group, ({{'lr': 0.1}},) for example."
        )
    return cast("tuple[Hyper, ...]", tuple(groups))


def _is_group(group: object) -> bool:
    return isinstance(group, dict) and all(
        isinstance(name, str) and all(map(_is_plain, value if isinstance(value, list | tuple) else (value,)))
        for name, value in cast("dict[object, object]", group).items()
    )


def _is_plain(value: object) -> bool:
    return value is None or (isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST))


def as_indices(given: object, where: str, what: str) -> tuple[int, ...]:
    """Return indices as a tuple; raises UsageError unless they are a list of whole numbers."""
    if type(given) is tuple and not given:
        return ()
    indices = cast("Sequence[object]", given if isinstance(given, list | tuple | range) else (None,))
    if not all(type(index) is int and 0 <= index <= _LARGEST for index in indices):
        raise UsageError(f"{where}: {what} is {brief(given)}, expected a list of whole numbers of 0 or more.")
    return cast("tuple[int, ...]", tuple(indices))


def as_number(value: object, where: str, what: str) -> float:
    """Return a number, or a tensor of one element, as a float; raises UsageError for anything else."""
    if type(value) is float:  # as of every step
        return value
    is_one = isinstance(value, Tensor | np.ndarray | np.generic) and np.prod(np.shape(value)) == 1
    if isinstance(value, Tensor) and (value.device.type == "meta" or value.is_complex()):
        is_one = False
    if is_one:
        value = value.item()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    if not is_number:
        advice = ": take loss.mean().item(), for example" if isinstance(value, Tensor | np.ndarray) else ""
        raise UsageError(f"{where}: {what} is {brief(value)}, expected one real number{advice}.")
    return float(cast("float", value))


def row_ids(ids: Ids, where: str) -> Tensor:
    """Return ids as a contiguous int64 tensor in main memory, which may share the memory of `ids`.

    Args:
        ids: integers of any type, shape and memory layout, read-only or not; unsigned 64-bit ones must be below 2**63.
        where: the table, worker and clock, for messages.

    Raises:
        UsageError: they are not integers, or do not fit into int64.
    """
    if isinstance(ids, np.ndarray):
        return torch.from_numpy(_array(ids, where))
    if isinstance(ids, Tensor) and (ids.layout != torch.strided or ids.is_nested):
        kind = "" if ids.is_nested else " that is sparse"
        raise UsageError(f"{where}: ids are {brief(ids)}{kind}, expected a dense tensor of integers.")
    try:
        given = torch.as_tensor(ids, device="cpu").detach()
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where}: ids are {brief(ids)}, expected 64-bit integers ({error}).") from None
    if not given.numel():
        return given.to(torch.int64)
    if given.dtype not in _INTEGERS:
        raise _wrong_type(where, str(given.dtype))
    keys = given.to(torch.int64).contiguous()
    if given.dtype == torch.uint64 and (keys < 0).any():
        raise _too_large(where, int(keys[keys < 0][0]) + 2**64)
    return keys


def _array(ids: npt.NDArray[np.generic], where: str) -> npt.NDArray[np.int64]:
    """Return ids as an array that torch accepts: contiguous, writable, in native byte order."""
    if ids.size and ids.dtype.kind not in "iu":
        raise _wrong_type(where, str(ids.dtype))
    if np.ma.is_masked(ids):  # pyright: ignore[reportUnknownMemberType]
        raise UsageError(f"{where}: ids are an array with a mask, expected all of them: give array.compressed().")
    is_wide = ids.dtype.kind == "u" and ids.dtype.itemsize == 8
    if ids.size and is_wide and (largest := int(ids.astype(np.uint64, copy=False).max())) > _LARGEST:
        raise _too_large(where, largest)
    return np.require(ids, np.int64, ["C", "W"])


def _wrong_type(where: str, dtype: str) -> UsageError:
    return UsageError(f"{where}: ids are {dtype}, expected integers of at most 64 bits.")


def _too_large(where: str, number: int) -> UsageError:
    return UsageError(
        f"{where}: ids are signed 64-bit integers, but {number} is above {_LARGEST}. (An unsigned 64-bit array becomes "
        "such without loss by .view(np.int64).)"
    )


def _kind(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout != torch.strided:
        return "sparse"
    return f"with strides {tensor.stride()}"
