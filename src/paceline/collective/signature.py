"""The signature of a collective call, exchanged before any data: all workers must make the same call."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.dtypes import dtype_name

Pattern = Literal[
    "broadcast", "reduce", "all_reduce", "all_gather", "backward", "update", "trained", "step", "forward", "send"
]
Op = Literal["", "sum", "mean", "min", "max", "product"]

_PATTERNS: Final[tuple[Pattern, ...]] = (
    *("broadcast", "reduce", "all_reduce", "all_gather", "backward", "update", "trained", "step", "forward", "send"),
)
OPS: Final[tuple[Op, ...]] = ("", "sum", "mean", "min", "max", "product")
# That torch itself cannot add, or not on a CPU.
MOVED_ALONE: Final = (
    *(torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
)
_DTYPES: Final = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, *MOVED_ALONE),
)
_MAX_DIMS: Final = 12
NUM_WORDS: Final = 10 + _MAX_DIMS


class CallSignature(msgspec.Struct, frozen=True):
    """One call of one worker.

    Args:
        number: counts the calls of this worker on this group.
        root: the worker that sends to all or receives from all, -1 if there is none.
        sparse_dim: of a sparse tensor; 0 for a dense one.
        num_values: of a sparse tensor, or of data sent with the call. May differ between workers, as may `weight`.
        digest: of data that workers should have in common; `act` of the call compares it.
    """

    number: int
    pattern: Pattern
    op: Op = ""
    root: int = -1
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    sparse_dim: int = 0
    num_values: int = 0
    weight: float = 0.0
    digest: int = 0

    @staticmethod
    def over(tensor: Tensor, pattern: Pattern, op: Op = "", root: int = -1) -> CallSignature:
        """Describe a call over a tensor; a sparse one is coalesced.

        Raises:
            UsageError: the dtype is not supported, or there are too many dimensions.
        """
        if tensor.dtype not in _DTYPES or tensor.ndim > _MAX_DIMS:
            raise UsageError(
                f"{pattern} got a tensor of {dtype_name(tensor.dtype)} with {tensor.ndim} dimensions, expected one of "
                f"{', '.join(map(dtype_name, _DTYPES))} with at most {_MAX_DIMS}."
            )
        call = CallSignature(0, pattern, op, root, tensor.dtype, tuple(tensor.shape))
        if tensor.layout == torch.strided:
            return call
        return replace(call, sparse_dim=tensor.sparse_dim(), num_values=tensor.values().shape[0])

    def words(self) -> Tensor:
        """Return the call encoded as (NUM_WORDS,) int64."""
        dims = (*self.shape, *(0 for _ in range(_MAX_DIMS - len(self.shape))))
        (weight,) = struct.unpack("q", struct.pack("d", self.weight))
        words = (
            *(self.number, _PATTERNS.index(self.pattern), OPS.index(self.op), self.root, _DTYPES.index(self.dtype)),
            *(self.sparse_dim, self.num_values, weight, self.digest, len(self.shape), *dims),
        )
        return torch.tensor(words, dtype=torch.int64)

    @staticmethod
    def read(words: Tensor) -> CallSignature:
        """Decode a call."""
        number, pattern, op, root, dtype, sparse_dim, num_values, bits, digest, num_dims, *dims = words.tolist()
        (weight,) = struct.unpack("d", struct.pack("q", bits))
        what = (number, _PATTERNS[pattern], OPS[op], root, _DTYPES[dtype], tuple(dims[:num_dims]))
        return CallSignature(*what, sparse_dim, num_values, weight, digest)

    def __str__(self) -> str:
        """Return a description: "all_reduce (sum) of float32 (3, 4)"."""
        op = f" ({self.op})" if self.op else ""
        if self.pattern == "backward":
            return "backward of an all-reduced model"
        if self.pattern == "update":
            return f"step of an all-reduced model with {self.shape[0]} numbers in buffers"
        if self.pattern == "trained":
            return "forward of an all-reduced model after requires_grad has changed"
        if self.pattern == "step":
            return f"step of {self.root} micro-batches of {dtype_name(self.dtype)} {self.shape}"
        sparse = f" with {self.sparse_dim} sparse dimensions" if self.sparse_dim else ""
        root = {"broadcast": f" from worker {self.root}", "reduce": f" to worker {self.root}"}.get(self.pattern, "")
        return f"{self.pattern}{op} of {dtype_name(self.dtype)} {self.shape}{sparse}{root}"

    @property
    def where(self) -> str:
        """Which call this is: "call 7, all_reduce"."""
        return f"call {self.number}, {self.pattern}"


def require_same(own: CallSignature, calls: Sequence[CallSignature], rank: int) -> None:
    """Raise UsageError if another worker makes another call; no data has been sent then."""
    told = _comparable(own)
    for other, call in enumerate(calls):
        if _comparable(call) != told:
            number = f" as its call {call.number}" if call.number != own.number else ""
            raise UsageError(
                f"worker {rank}, call {own.number}: expected {own} of every worker, got {call} from worker "
                f"{other}{number}. All workers must make the same calls in the same order."
            )


def _comparable(call: CallSignature) -> CallSignature:
    """Return a call without the fields that may differ between workers."""
    return replace(call, num_values=0, weight=0.0, digest=0)
