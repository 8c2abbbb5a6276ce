"""The gradients of a model inside the memory of the next push, so that backward writes the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from paceline.errors import UsageError
from paceline.training.device_copies import DeviceCopies
from paceline.training.flat import FlatParameters

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element: as bits, NaN equals itself
_STRETCH = 4096  # elements


@dataclass(frozen=True, slots=True, eq=False)
class FoundGradients:
    """A gradient, and how often torch has seen it change."""

    gradient: Tensor | None
    version: int

    @staticmethod
    def of(gradient: Tensor | None) -> FoundGradients:
        """Return a gradient as it is now."""
        return FoundGradients(gradient, -1 if gradient is None else gradient._version)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A gradient as it was when it began to be copied: held, so that nothing else can be in its place, and `done`."""

    gradient: Tensor
    place: int
    version: int
    done: torch.cuda.Event

    def is_of(self, gradient: Tensor) -> bool:
        """Say whether this is of a gradient as it is now, as far as torch has noticed."""
        return gradient is self.gradient and (gradient.data_ptr(), gradient._version) == (self.place, self.version)


@dataclass(slots=True, weakref_slot=True)
class Gradients:
    """Collects the gradients of the tensors of a flat vector into the memory in which they travel.

    With `in_place`, a gradient that backward has just made is moved there at once, and `grad` becomes a view of it:
    nothing is left to copy in `collect`. That is for memory that nobody reads while backward runs. A gradient that a
    script has put into `grad` stays where it is, and one that a script keeps does not change with the next.

    The courier brings gradients from devices; `fetch` lets it begin while backward runs.
    """

    flat: FlatParameters
    in_place: bool
    device_copies: DeviceCopies = field(default_factory=DeviceCopies)
    # Whether some are on devices, so that `collect` waits until these have computed them.
    are_away: bool = field(init=False)
    # (elements of all,), and the view of it that belongs to each tensor, in its shape.
    _buffer: Tensor | None = None
    _parts: list[Tensor] = field(default_factory=list[Tensor])
    # Those that had no gradient when backward last came to them: what it leaves there belongs to nobody else.
    _without: set[int] = field(default_factory=set[int])
    # The views that became `grad`, by the index of their tensor, for as long as somebody has them.
    _given: dict[int, ref[Tensor]] = field(default_factory=dict[int, ref[Tensor]])
    # Copies from devices that have been begun, by the index of their tensor.
    _coming: dict[int, _Copy] = field(default_factory=dict[int, _Copy])
    _handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    _turn: int = 0  # which stretch of each gradient is looked at next

    def __post_init__(self) -> None:
        """Have autograd call around each gradient, for as long as this lives."""
        self.are_away = any(map(self.device_copies.serves, self.flat.named.values()))
        if not self.in_place:
            return
        look, move = WeakMethod(self._look), WeakMethod(self._move)
        for index, tensor in enumerate(self.flat.named.values()):
            if tensor.requires_grad and tensor.device.type == "cpu" and not self.device_copies.serves(tensor):
                self._handles.append(tensor.register_hook(_before(look, index, ref(tensor))))
                self._handles.append(tensor.register_post_accumulate_grad_hook(_after(move, index)))

    def detach(self) -> None:
        """Leave gradients where backward makes them, from the next backward on."""
        while self._handles:
            self._handles.pop().remove()

    def attach(self, buffer: Tensor) -> None:
        """Collect into this memory from now on; its content is overwritten."""
        if self._buffer is None or buffer.data_ptr() != self._buffer.data_ptr():
            self._parts = self.flat.parts(buffer)
        self._buffer = buffer

    def collect(self) -> tuple[int, ...]:
        """Have all gradients in the memory; return the indices of the tensors that have none (zeros there).

        Blocks until devices have computed theirs, which all are on their way by then.

        Raises:
            UsageError: a gradient is sparse.
        """
        absent: list[int] = []
        for index, (name, tensor) in enumerate(self.flat.named.items()):
            gradient = tensor.grad
            if gradient is None:
                self._vacate(index)
                self._parts[index].zero_()
                absent.append(index)
            elif gradient.layout != torch.strided:
                raise UsageError(f"parameter '{name}' has a sparse gradient: build its layer with sparse=False.")
            elif self.device_copies.serves(gradient):
                self._begin(index, gradient)
            elif gradient.data_ptr() != self._parts[index].data_ptr() or not gradient.is_contiguous():
                self._write(index, gradient)
        while self._coming:
            self._coming.popitem()[1].done.synchronize()
        return tuple(absent)

    def found(self) -> tuple[FoundGradients, ...]:
        """Return the gradients as they are now, for `changed`."""
        return tuple(FoundGradients.of(tensor.grad) for tensor in self.flat.named.values())

    def changed(self, found: tuple[FoundGradients, ...]) -> str:
        """Name a tensor whose gradient is not what `collect` has found and copied; empty where all are.

        What torch does not count as a change (through `.data`, say) is looked for in a stretch of each gradient,
        another one every time.
        """
        self._turn += 1
        for (name, tensor), before, part in zip(self.flat.named.items(), found, self._parts, strict=True):
            now = FoundGradients.of(tensor.grad)
            if now.gradient is not before.gradient or now.version != before.version:
                return name
            if now.gradient is not None and not _is_copied(now.gradient, part, self._turn):
                return name
        return ""

    def fetch(self, index: int) -> None:
        """Begin to copy a gradient from its device, if that does not block.

        `collect` copies it again if torch has noticed a change since: not one through `.data`, and not what
        `GradScaler.unscale_` does. So this is for gradients that are to stay as backward leaves them.
        """
        gradient = list(self.flat.named.values())[index].grad
        if gradient is None or gradient.layout != torch.strided or not self.device_copies.serves(gradient):
            return
        if self.device_copies.can_hide(self._parts[index]):
            self._begin(index, gradient)

    def _begin(self, index: int, gradient: Tensor) -> None:
        """Begin to copy a gradient from its device, unless that copy is coming already."""
        coming = self._coming.get(index)
        if coming is None or not coming.is_of(gradient):
            place, version = gradient.data_ptr(), gradient._version
            done = self.device_copies.fetch(gradient.detach(), self._parts[index])
            self._coming[index] = _Copy(gradient, place, version, done)

    def _look(self, index: int, tensor: Tensor) -> None:
        """Note whether a tensor has a gradient that backward is about to add to."""
        if tensor.grad is None:
            self._without.add(index)
        else:
            self._without.discard(index)

    def _move(self, index: int, tensor: Tensor) -> None:
        """Move a gradient that backward has just made, unless it belongs to a graph or has an order of its own."""
        gradient = tensor.grad
        if gradient is None or index not in self._without or not self._parts or not self._fits(index, gradient):
            return
        self._write(index, gradient)
        given = self._parts[index].data  # to autograd not a view, and without a past
        tensor.grad = given
        self._given[index] = ref(given)

    def _fits(self, index: int, gradient: Tensor) -> bool:
        part = self._parts[index]
        plain = gradient.layout == torch.strided and not gradient.requires_grad and gradient.is_contiguous()
        return plain and gradient.dtype == part.dtype and gradient.device == part.device

    def _write(self, index: int, gradient: Tensor) -> None:
        """Copy a gradient to its place."""
        self._vacate(index)
        part, source = self._parts[index], gradient.detach()
        if source.device == part.device and source.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():
            source = source.clone()  # it may lie across its own place
        part.copy_(source)

    def _vacate(self, index: int) -> None:
        """Prepare a place to be overwritten: what comes there has come, what a script keeps gets memory of its own."""
        coming = self._coming.pop(index, None)
        if coming is not None:
            coming.done.synchronize()
        given = self._given.pop(index, _nobody)()
        if given is not None:
            given.data = given.data.clone()


def _is_copied(gradient: Tensor, part: Tensor, turn: int) -> bool:
    """Say whether a stretch of a gradient has the bits of its copy; one that has another layout is not looked at."""
    if not gradient.is_contiguous() or gradient.dtype != part.dtype or gradient.device != part.device:
        return True
    start = turn * _STRETCH % max(part.numel(), 1)
    ours, theirs = (
        tensor.detach().view(-1)[start : start + _STRETCH].view(_BITS[part.itemsize]) for tensor in (gradient, part)
    )
    return torch.equal(ours, theirs)


def _nobody() -> None:
    """Stand for a reference to what is gone."""


def _before(
    look: WeakMethod[Callable[[int, Tensor], None]], index: int, tensor: ref[Tensor]
) -> Callable[[Tensor], None]:
    """Return what autograd calls before it adds to a gradient: it keeps nothing alive."""

    @unserializable_hook
    def on_gradient(_: Tensor) -> None:
        act, about = look(), tensor()
        if act is not None and about is not None:
            act(index, about)

    return on_gradient


def _after(move: WeakMethod[Callable[[int, Tensor], None]], index: int) -> Callable[[Tensor], None]:
    """Return what autograd calls once it has: it keeps nothing alive, and does nothing once its owner is gone."""

    def on_gradient(tensor: Tensor) -> None:
        act = move()
        if act is not None:
            act(index, tensor)

    return on_gradient
