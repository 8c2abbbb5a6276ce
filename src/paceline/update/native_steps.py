"""Steps of update rules by `steps.c`: sums, their check, divisor and rule in one pass over memory.

The library is called without the interpreter's lock. It is used only where it has made, in this very process, the same
bits as torch's operations on numbers of every kind (`steps_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL, c_float, c_int, c_int64, c_uint32, c_void_p
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, final

import msgspec
import torch
from torch import Tensor

from paceline.errors import ProtocolBug
from paceline.notices import tell
from paceline.update.kernels import AdamKernel, Kernel, Numbers, Operands, SGDKernel
from paceline.update.rows.native_ops import load_library
from paceline.update.summing import add_up

LIBRARY: Final = Path(__file__).with_name("steps.c.so")

_SUM: Final = (c_void_p, c_void_p, c_int64, c_float)  # gradients, their weights, how many, divisor
_UNDO: Final = (c_void_p, c_int64, c_int64, c_int64)  # memory, elements changed before, first element, most at once
FUNCTIONS: Final = {
    "paceline_sgd": (c_int, (*(c_void_p,) * 2, c_int64, *_SUM, *_UNDO, *(c_float,) * 4, c_int)),
    "paceline_adam": (c_int, (*(c_void_p,) * 4, c_int64, *_SUM, *_UNDO, *(c_float,) * 8, c_int)),
    "paceline_can_step": (c_int, ()),
    "paceline_source": (c_uint32, ()),
}
_NESTEROV, _MAXIMIZE, _FRESH, _FUSED = 1, 2, 4, 8
_MOST_GRADIENTS: Final = 1 << 16
ITEM_BYTES: Final = 4
_STEP, _DIVISOR = 7.0, 3.0  # of trials
LANES: Final = 64  # a multiple of torch's vector length on every machine: its fused operations treat the rest otherwise
_ENDS: Final = 15  # elements after these in trials: a vector of eight, and seven single ones
_SGD_TRIALS: Final = (  # momentum, dampening, nesterov, weight decay, maximize, and whether the momenta are new
    (0.0, 0.0, False, 0.0, False, False),
    (0.9, 0.1, False, 0.01, True, False),
    (0.9, 0.0, True, 0.01, False, False),
    (0.9, 0.1, False, 0.0, False, True),
)
_ADAM_TRIALS: Final = (  # name, betas, amsgrad, weight decay, maximize
    ("torch.optim.Adam", (0.9, 0.999), False, 0.0, False),
    ("torch.optim.Adam", (0.4, 0.7), True, 0.01, True),
    ("torch.optim.AdamW", (0.9, 0.999), True, 0.01, False),
)


@final
class StepMemory(msgspec.Struct, frozen=True, eq=False):
    """Memory that a native step changes: neighbouring elements of a range.

    Args:
        start: first element, counted from the start of the range.
        length: number of elements.
        values: address of the first one's value.
        state: address of each of the rule's states of it, in their order; None for one that it does not have.
        tensors: to which the memory belongs.
    """

    start: int
    length: int
    values: int
    state: tuple[int | None, ...]
    tensors: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, start: int, values: Tensor, state: Sequence[Tensor | None]) -> StepMemory:
        """Return the place of these values and states."""
        tensors = tuple(tensor for tensor in (values, *state) if tensor is not None)
        for tensor in tensors:
            _require_plain(tensor)
            if tensor.numel() != values.numel():
                raise ProtocolBug(f"{values.numel()} values have {tensor.numel()} elements of a state")
        addresses = tuple(None if tensor is None else tensor.data_ptr() for tensor in state)
        return cls(start, values.numel(), values.data_ptr(), addresses, tensors)

    def after(self, num: int) -> StepMemory:
        """Return the place without its first elements."""
        skipped = num * ITEM_BYTES
        state = tuple(None if address is None else address + skipped for address in self.state)
        tensors = tuple(tensor[num:] for tensor in self.tensors)
        return StepMemory(self.start + num, self.length - num, self.values + skipped, state, tensors)


@final
class Undo(msgspec.Struct, frozen=True):
    """Where steps of a chunk keep what their elements look like before they change, for a successor of this process.

    Args:
        memory: address of that memory, which outlives this process; None to keep nothing.
        num_changed: elements of the chunk that were changed before the next step.
        start: first element of the next step, counted from the start of the chunk.
        block: most elements that are kept at once, a multiple of eight.
    """

    memory: int | None = None
    num_changed: int = 0
    start: int = 0
    block: int = 0


NO_UNDO: Final = Undo()


@final
class Addends(msgspec.Struct, frozen=True, eq=False):
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
    tensors: tuple[Tensor, ...] = ()

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
        offset, num = place.start * ITEM_BYTES, len(having)
        addresses = (c_void_p * num)(*(self.addresses[index] + offset for index in having))
        weights = (c_float * num)(*(self.weights[index] for index in having)) if self.weights else None
        return addresses, weights, num


@final
class NativeSteps:
    """The steps of `torch.optim.SGD`, and the fused ones of Adam and AdamW, on float32.

    Without `fused`, torch takes Adam's steps: its roots are by a library that rounds as no instruction does.

    Args:
        library: the C library.
        kernel: the rule.
        takes_ends: whether fused steps may be of any length, else of a multiple of `LANES` elements.
    """

    def __init__(self, library: CDLL, kernel: Kernel, *, takes_ends: bool = False) -> None:
        self._library, self._kernel, self.takes_ends = library, kernel, takes_ends

    def takes(self, numbers: Sequence[Numbers]) -> bool:
        """Return whether these are the steps to take with these hyperparameters of all groups."""
        return isinstance(self._kernel, SGDKernel) or all(bool(group.get("fused")) for group in numbers)

    def step(
        self,
        place: StepMemory,
        gradients: Addends,
        having: Sequence[int],
        numbers: Numbers,
        *,
        step: float = 1.0,
        fresh: bool = False,
        undo: Undo = NO_UNDO,
    ) -> bool:
        """Take one step; return whether the gradients that it adds, and their sums, are finite.

        Args:
            place: what changes.
            gradients: of the range, only read.
            having: indices of those to add, at least one.
            numbers: hyperparameters.
            step: number of this step, from 1.
            fresh: whether the state has never been written.
            undo: where to keep what changes.
        """
        kept = undo.memory, undo.num_changed, undo.start, undo.block
        operands = *gradients.at(place, having), gradients.divisor, *kept
        if isinstance(self._kernel, SGDKernel):
            return self._step_sgd(place, operands, numbers, fresh=fresh)
        return self._step_adam(place, operands, numbers, step)

    def _step_sgd(self, place: StepMemory, operands: tuple[object, ...], numbers: Numbers, *, fresh: bool) -> bool:
        if numbers["momentum"]:
            self._require_states(place, numbers)
        how = (
            _NESTEROV * bool(numbers["nesterov"])
            + _MAXIMIZE * bool(numbers["maximize"])
            + _FRESH * fresh
            + _FUSED * bool(numbers.get("fused"))
        )
        is_suspect: int = self._library.paceline_sgd(
            *(place.values, *place.state, place.length, *operands),
            *(numbers["lr"], numbers["momentum"], 1 - numbers["dampening"], numbers["weight_decay"], how),
        )
        return not is_suspect

    def _step_adam(self, place: StepMemory, operands: tuple[object, ...], numbers: Numbers, step: float) -> bool:
        self._require_states(place, numbers)
        decay, (beta1, beta2), lr = numbers["weight_decay"], numbers["betas"], numbers["lr"]
        is_decoupled = self._kernel.name.endswith("AdamW") or bool(numbers.get("decoupled_weight_decay"))
        size, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        is_suspect: int = self._library.paceline_adam(
            *(place.values, *place.state, place.length, *operands),
            *((0.0, 1 - lr * decay) if is_decoupled else (decay, 1.0)),
            *(1 - beta1, beta2, 1 - beta2, size, root, numbers["eps"], _MAXIMIZE * bool(numbers["maximize"])),
        )
        return not is_suspect

    def _require_states(self, place: StepMemory, numbers: Numbers) -> None:
        """Raise ProtocolBug unless the memory has all states that a step with these hyperparameters changes."""
        missing = [name for name in self._kernel.names(numbers) if place.state[self._kernel.known.index(name)] is None]
        if missing:
            raise ProtocolBug(f"a step of {self._kernel.name} lacks the states {missing}")


def steps_of(kernel: Kernel, values: Tensor) -> NativeSteps | None:
    """Return the native steps of a rule on these values; None where torch is to take them."""
    library = steps_library() if isinstance(kernel, SGDKernel | AdamKernel) and values.dtype is torch.float32 else None
    return None if library is None else NativeSteps(library, kernel, takes_ends=_takes_ends(library))


@cache
def steps_library(tell: Callable[[str], None] = tell) -> CDLL | None:
    """Return the library; None if it is not there, or would not make torch's bits, which is told once."""
    library = load_library(LIBRARY, FUNCTIONS) if LIBRARY.exists() else ""
    if isinstance(library, str):
        if library:
            tell(f"updates run in torch, which is slower, as their C library cannot be used: {library}")
        return None
    if not library.paceline_can_step():
        return None
    different = next(differences(library), "")
    if different:
        tell(
            f"updates run in torch {torch.__version__}, which is slower, as it rounds otherwise than their C library: "
            f"{different}"
        )
    return None if different else library


@cache
def _takes_ends(library: CDLL) -> bool:
    """Return whether fused steps of the library are torch's to their last elements, which torch rounds otherwise."""
    return not any(differences(library, ends=True))


def differences(library: CDLL, *, ends: bool = False) -> Iterator[str]:
    """Yield each setting under which steps of the library are not torch's to the last bit, on awkward numbers.

    With `ends`, fused steps are tried on lengths that torch's vectors do not divide, as all others are.
    """
    for kernel, numbers, fresh in _trials():
        ours, theirs = (_awkward(5 * LANES + (_ENDS if ends or not numbers["fused"] else 0)) for _ in range(2))
        names, num_states = kernel.names(numbers), len(kernel.known)
        state = [tensor if name in names else None for name, tensor in zip(kernel.known, ours[1:], strict=False)]
        gradients = Addends.of(ours[1 + num_states :], (), _DIVISOR)
        if gradients is None:
            raise ProtocolBug("gradients that were made for a trial do not lie as they should")
        having, steps = range(len(gradients.tensors)), NativeSteps(library, kernel)
        steps.step(StepMemory.of(0, ours[0], state), gradients, having, numbers, step=_STEP, fresh=fresh)
        _step_in_torch(kernel, theirs, numbers, fresh=fresh)
        if not all(map(_same_bits, ours, theirs)):
            yield f"{kernel.name} with {numbers}"


def _trials() -> Iterator[tuple[Kernel, dict[str, Any], bool]]:
    """Yield rules, hyperparameters, and whether the state is new."""
    sgd = SGDKernel("torch.optim.SGD")
    for fused, (momentum, dampening, nesterov, decay, maximize, fresh) in product((False, True), _SGD_TRIALS):
        numbers: dict[str, Any] = {"lr": 0.05, "momentum": momentum, "dampening": dampening, "weight_decay": decay}
        yield sgd, numbers | {"nesterov": nesterov, "maximize": maximize, "fused": fused}, fresh
    for name, betas, amsgrad, decay, maximize in _ADAM_TRIALS:
        numbers = {"lr": 0.05, "betas": betas, "eps": 1e-8, "weight_decay": decay, "fused": True}
        yield AdamKernel(name), numbers | {"amsgrad": amsgrad, "maximize": maximize}, False


def _step_in_torch(kernel: Kernel, tensors: list[Tensor], numbers: Numbers, *, fresh: bool) -> None:
    values, *rest = tensors
    names, spare = kernel.names(numbers), values.new_empty(2, values.numel())
    state = {name: [tensor] for name, tensor in zip(kernel.known, rest, strict=False) if name in names}
    total = add_up(torch.empty_like(values), rest[len(kernel.known) :])
    if not numbers["fused"]:
        total.div_(_DIVISOR)
    left = _DIVISOR if numbers["fused"] else 1.0
    kernel.step(Operands([values], [total], state, _STEP, fresh, spare, left), numbers)


def _awkward(length: int) -> list[Tensor]:
    """Return values, states and gradients: denormal, huge, zeros of both signs, and some whose sums overflow."""
    generator = torch.Generator().manual_seed(length)
    exponents = torch.randint(-148, 128, (6, length), generator=generator)
    near = torch.randint(-4, 4, (6, length), generator=generator)
    exponents[:, length // 3 :] = near[:, length // 3 :]  # most have sizes at which roundings show
    found = torch.ldexp(torch.rand(6, length, generator=generator, dtype=torch.float64) * 2 - 1, exponents).float()
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
