"""Steps of update rules by `steps.c`: sums, their check, divisor and rule in one pass over memory.

The library is called without the interpreter's lock. It is used only where it has made, in this very process, the same
bits as torch's operations on numbers of every kind (`steps_of`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL, c_float, c_int, c_int64, c_uint32, c_void_p
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from paceline.errors import ProtocolBug
from paceline.update.kernels import Kernel, Numbers, Operands, SGDKernel
from paceline.update.rows.native_ops import load_library
from paceline.update.summing import add_up

LIBRARY: Final = Path(__file__).with_name("steps.c.so")

FUNCTIONS: Final = {
    "paceline_sgd": (c_int, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, *(c_float,) * 5, c_int)),
    "paceline_can_step": (c_int, ()),
    "paceline_source": (c_uint32, ()),
}
_NESTEROV, _MAXIMIZE, _FRESH = 1, 2, 4
_MOST_GRADIENTS: Final = 1 << 16
_ITEM_BYTES: Final = 4
_BUFFER: Final = "momentum_buffer"
LANES: Final = 64  # a multiple of torch's vector length on every machine: its fused operations treat the rest otherwise
_TRIALS: Final = (  # momentum, dampening, nesterov, weight decay, maximize, and whether the momenta are new
    (0.0, 0.0, False, 0.0, False, False),
    (0.9, 0.1, False, 0.01, True, False),
    (0.9, 0.0, True, 0.01, False, False),
    (0.9, 0.1, False, 0.0, False, True),
)


@final
@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory that a native step changes: neighbouring elements of a range.

    Args:
        start: first element, counted from the start of the range.
        length: number of elements.
        values: address of the first one's value.
        buffer: address of its momentum, None without.
        tensors: to which the memory belongs.
    """

    start: int
    length: int
    values: int
    buffer: int | None
    tensors: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, start: int, values: Tensor, state: dict[str, Tensor]) -> StepMemory:
        """Return the place of these values and states."""
        _require_plain(values)
        buffer = state.get(_BUFFER)
        if buffer is not None:
            _require_plain(buffer)
            if buffer.numel() != values.numel():
                raise ProtocolBug(f"{values.numel()} values have {buffer.numel()} momenta")
        if buffer is None:
            return cls(start, values.numel(), values.data_ptr(), None, (values,))
        return cls(start, values.numel(), values.data_ptr(), buffer.data_ptr(), (values, buffer))


@final
@dataclass(frozen=True, slots=True)
class Addends:
    """The gradients of one update, each of the whole range.

    Args:
        addresses: of their first elements.
        length: number of elements of each.
        weights: what each counts, none if all count once.
        divisor: what their sum is divided by.
        tensors: to which the memory belongs.
    """

    addresses: tuple[int, ...]
    length: int
    weights: tuple[float, ...]
    divisor: float
    tensors: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], weights: Sequence[float], divisor: float) -> Addends | None:
        """Return these gradients; None if they do not lie in memory as the library needs them."""
        if not 0 < len(tensors) <= _MOST_GRADIENTS or not all(map(_is_plain, tensors)):
            return None
        length = tensors[0].numel()
        if any(each.numel() != length for each in tensors) or len(weights) not in (0, len(tensors)):
            raise ProtocolBug(f"{len(tensors)} gradients differ in length, or from their {len(weights)} weights")
        return cls(tuple(each.data_ptr() for each in tensors), length, tuple(weights), divisor, tuple(tensors))

    def at(self, place: StepMemory, having: Sequence[int]) -> tuple[object, object, int]:
        """Return addresses and weights of some gradients at a place, and how many there are."""
        if not (having and 0 <= place.start <= self.length - place.length):
            raise ProtocolBug(f"a step of elements {place.start} and {place.length} more, of {self.length}")
        offset, num = place.start * _ITEM_BYTES, len(having)
        addresses = (c_void_p * num)(*(self.addresses[index] + offset for index in having))
        weights = (c_float * num)(*(self.weights[index] for index in having)) if self.weights else None
        return addresses, weights, num


@final
class NativeSteps:
    """The steps of `torch.optim.SGD`, momentum and all, on float32."""

    def __init__(self, library: CDLL) -> None:
        self._sgd = library.paceline_sgd

    def step(
        self, place: StepMemory, gradients: Addends, having: Sequence[int], numbers: Numbers, *, fresh: bool
    ) -> bool:
        """Take one step; return whether the gradients that it adds, and their sums, are finite.

        Args:
            place: what changes.
            gradients: of the range, only read.
            having: indices of those to add, at least one.
            numbers: hyperparameters.
            fresh: whether the state has never been written.
        """
        addresses, weights, num = gradients.at(place, having)
        if bool(numbers["momentum"]) != (place.buffer is not None):
            raise ProtocolBug(f"a step with momentum {numbers['momentum']} has the momenta at {place.buffer}")
        how = _NESTEROV * bool(numbers["nesterov"]) + _MAXIMIZE * bool(numbers["maximize"]) + _FRESH * fresh
        is_suspect: int = self._sgd(
            *(place.values, place.buffer, place.length, addresses, weights, num),
            *(numbers["lr"], numbers["momentum"], 1 - numbers["dampening"], numbers["weight_decay"]),
            *(gradients.divisor, how),
        )
        return not is_suspect


def steps_of(kernel: Kernel, values: Tensor) -> NativeSteps | None:
    """Return the native steps of a rule on these values; None where torch is to take them."""
    return native_steps() if isinstance(kernel, SGDKernel) and values.dtype is torch.float32 else None


def _tell(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")


@cache
def native_steps(tell: Callable[[str], None] = _tell) -> NativeSteps | None:
    """Return the library's steps; None if it is not there, or would not make torch's bits, which is told once."""
    library = load_library(LIBRARY, FUNCTIONS) if LIBRARY.exists() else ""
    if isinstance(library, str):
        if library:
            tell(f"updates run in torch, which is slower, as their C library cannot be used: {library}")
        return None
    if not library.paceline_can_step():
        return None
    steps = NativeSteps(library)
    different = next(differences(steps), "")
    if different:
        tell(
            f"updates run in torch {torch.__version__}, which is slower, as it rounds otherwise than their C library: "
            f"{different}"
        )
    return None if different else steps


def differences(steps: NativeSteps) -> Iterator[str]:
    """Yield each setting under which steps of the library are not torch's to the last bit, on awkward numbers."""
    kernel, divisor = SGDKernel("torch.optim.SGD"), 3.0
    for fused, (momentum, dampening, nesterov, decay, maximize, fresh) in product((False, True), _TRIALS):
        numbers: dict[str, float] = {"lr": 0.05, "momentum": momentum, "dampening": dampening, "weight_decay": decay}
        numbers |= {"nesterov": nesterov, "maximize": maximize, "fused": fused}
        ours, theirs = (_awkward(5 * LANES + (0 if fused else 13)) for _ in range(2))
        at = StepMemory.of(0, ours[0], {_BUFFER: ours[1]} if momentum else {})
        gradients = Addends.of(ours[2:], (), divisor)
        if gradients is None:
            raise ProtocolBug("gradients that were made for a trial do not lie as they should")
        steps.step(at, gradients, range(len(ours) - 2), numbers, fresh=fresh)
        _step_in_torch(kernel, theirs, numbers, divisor, fresh=fresh)
        if not all(map(_same_bits, ours, theirs)):
            yield f"SGD with {numbers}"


def _step_in_torch(kernel: Kernel, tensors: list[Tensor], numbers: Numbers, divisor: float, *, fresh: bool) -> None:
    values, buffer, *gradients = tensors
    total = add_up(torch.empty_like(values), gradients)
    if not numbers["fused"]:
        total.div_(divisor)
    spare = values.new_empty(2, values.numel())
    state = {_BUFFER: [buffer]} if numbers["momentum"] else {}
    left = divisor if numbers["fused"] else 1.0
    kernel.step(Operands([values], [total], state, 1.0, fresh, spare, left), numbers)


def _awkward(length: int) -> list[Tensor]:
    """Return values, momenta and gradients: denormal, huge, zeros of both signs, and some whose sums overflow."""
    generator = torch.Generator().manual_seed(length)
    exponents = torch.randint(-148, 128, (5, length), generator=generator)
    near = torch.randint(-4, 4, (5, length), generator=generator)
    exponents[:, length // 3 :] = near[:, length // 3 :]  # most have sizes at which roundings show
    found = torch.ldexp(torch.rand(5, length, generator=generator, dtype=torch.float64) * 2 - 1, exponents).float()
    found[:, ::7], found[:, 1::7] = 0.0, -0.0
    return list(found)


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether all bits are equal, those of one NaN and another aside."""
    is_nan = ours.isnan() & theirs.isnan()
    return torch.equal(ours.view(torch.int32).masked_fill(is_nan, 0), theirs.view(torch.int32).masked_fill(is_nan, 0))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.dim() == 1 and tensor.is_contiguous() and tensor.is_cpu


def _require_plain(tensor: Tensor) -> None:
    if not _is_plain(tensor):
        raise ProtocolBug(
            f"a native step got {tensor.dtype} {tuple(tensor.shape)} by {tensor.stride()} on {tensor.device}, expected "
            "one contiguous dimension of float32 on cpu"
        )
