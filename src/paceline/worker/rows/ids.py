"""Conversion of the user's ids to contiguous int64 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.worker.given import brief

Ids = Tensor | npt.NDArray[np.generic] | Sequence[int]

_INTEGERS: Final = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
_LARGEST: Final = 2**63 - 1


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
    if isinstance(ids, Tensor) and ids.layout != torch.strided:
        raise UsageError(f"{where}: ids are {brief(ids)} that is sparse, expected a dense tensor of integers.")
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
    if ids.size and ids.dtype.kind == "u" and int(ids.max()) > _LARGEST:
        raise _too_large(where, int(ids.max()))
    return np.require(ids, np.int64, ["C", "W"])


def _wrong_type(where: str, dtype: str) -> UsageError:
    return UsageError(f"{where}: ids are {dtype}, expected integers of at most 64 bits.")


def _too_large(where: str, number: int) -> UsageError:
    return UsageError(
        f"{where}: ids are signed 64-bit integers, but {number} is above {_LARGEST}. (An unsigned 64-bit array becomes "
        "such without loss by .view(np.int64).)"
    )
