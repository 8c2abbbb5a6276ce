"""Gradients of a model in the send buffer of the next push, so that backward writes straight into the message."""

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

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element; compared as bits, NaN equals itself
_STRETCH = 4096  # elements


@dataclass(frozen=True, slots=True, eq=False)
class GradientVersion:
    """Gradient and its torch version, which counts changes in place."""

    gradient: Tensor | None
    version: int

    @staticmethod
    def of(gradient: Tensor | None) -> GradientVersion:
        """Record a gradient and its current version."""
        return GradientVersion(gradient, -1 if gradient is None else gradient._version)


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Copy of a gradient from its device, complete at `done`; holds the gradient so that its address is not reused."""

    gradient: Tensor
    place: int
    version: int
    done: torch.cuda.Event

    def is_of(self, gradient: Tensor) -> bool:
        """Return whether this copies a gradient in its current version."""
        return gradient is self.gradient and (gradient.data_ptr(), gradient._version) == (self.place, self.version)


@dataclass(slots=True, weakref_slot=True)
class Gradients:
    """Collects the gradients of the tensors of a flat vector in a send buffer.

    With `in_place`, a gradient that backward has just computed is moved there at once, and `grad` becomes a view of it,
    so that `collect` has nothing to copy. Use it only for memory that no other process reads during backward. A
    gradient that a script has assigned to `grad` is copied by `collect` instead, and one that a script keeps does not
    change with the next backward.

    Gradients on devices are copied by `device_copies`; `fetch` starts a copy during backward.
    """

    flat: FlatParameters
    in_place: bool
    device_copies: DeviceCopies = field(default_factory=DeviceCopies)
    # Whether some gradients are on devices, so that `collect` waits for their computation.
    are_on_device: bool = field(init=False)
    # (num elements,), and the view of it for each tensor, in the tensor's shape.
    _buffer: Tensor | None = None
    _place: int = 0  # the address of its storage
    _parts: list[Tensor] = field(default_factory=list[Tensor])
    # Tensors without a gradient when backward last reached them: the one it leaves there has no other owner.
    _without: set[int] = field(default_factory=set[int])
    # Views that became `grad`, by the index of their tensor, while they are referenced.
    _given: dict[int, ref[Tensor]] = field(default_factory=dict[int, ref[Tensor]])
    # Copies from devices that are under way, by the index of their tensor.
    _coming: dict[int, _Copy] = field(default_factory=dict[int, _Copy])
    _handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    _turn: int = 0  # number of calls of `changed`, which selects the stretch of each gradient to compare

    def __post_init__(self) -> None:
        """Register autograd hooks around each gradient, for the lifetime of this object."""
        self.are_on_device = any(map(self.device_copies.serves, self.flat.named.values()))
        if not self.in_place:
            return
        note, move = WeakMethod(self._note_absence), WeakMethod(self._move)
        for index, tensor in enumerate(self.flat.named.values()):
            if tensor.requires_grad and tensor.device.type == "cpu" and not self.device_copies.serves(tensor):
                self._handles.append(tensor.register_hook(_before(note, index, ref(tensor))))
                self._handles.append(tensor.register_post_accumulate_grad_hook(_after(move, index)))

    def detach(self) -> None:
        """Leave gradients where backward makes them, from the next backward on."""
        while self._handles:
            self._handles.pop().remove()

    def attach(self, buffer: Tensor) -> None:
        """Collect into `buffer` from now on; its content is overwritten."""
        if self._buffer is None or buffer.data_ptr() != self._buffer.data_ptr():
            self._parts = self.flat.parts(buffer)
            self._place = buffer.untyped_storage().data_ptr()
        self._buffer = buffer

    def collect(self) -> tuple[int, ...]:
        """Complete the buffer; return the indices of the tensors without a gradient, which are zeros there.

        Blocks until devices have computed and copied theirs.

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
            elif self.are_on_device and self.device_copies.serves(gradient):
                self._begin(index, gradient)
            elif gradient.data_ptr() != self._parts[index].data_ptr() or not gradient.is_contiguous():
                self._write(index, gradient)
        while self._coming:
            self._coming.popitem()[1].done.synchronize()
        return tuple(absent)

    def found(self) -> tuple[GradientVersion, ...]:
        """Return the gradients in their current versions, for `changed`."""
        return tuple(GradientVersion.of(tensor.grad) for tensor in self.flat.named.values())

    def changed(self, found: tuple[GradientVersion, ...]) -> str:
        """Return the name of a tensor whose gradient has changed since `found`; empty if none has.

        Changes that torch does not count (through `.data`, for example) are looked for in one stretch of each gradient,
        another one in every call.
        """
        self._turn += 1
        for (name, tensor), before, part in zip(self.flat.named.items(), found, self._parts, strict=True):
            now = GradientVersion.of(tensor.grad)
            if now.gradient is not before.gradient or now.version != before.version:
                return name
            if now.gradient is not None and not _is_copied(now.gradient, part, self._turn):
                return name
        return ""

    def fetch(self, index: int) -> None:
        """Start to copy a gradient from its device, if that does not block.

        `collect` copies it again if torch counts a change since, which it does not for changes through `.data` and by
        `GradScaler.unscale_`. So call this only for gradients that stay as backward leaves them.
        """
        gradient = list(self.flat.named.values())[index].grad
        if gradient is None or gradient.layout != torch.strided or not self.device_copies.serves(gradient):
            return
        if self.device_copies.can_hide(self._parts[index]):
            self._begin(index, gradient)

    def _begin(self, index: int, gradient: Tensor) -> None:
        """Start to copy a gradient from its device, unless that copy is under way."""
        coming = self._coming.get(index)
        if coming is None or not coming.is_of(gradient):
            place, version = gradient.data_ptr(), gradient._version
            done = self.device_copies.fetch(gradient.detach(), self._parts[index])
            self._coming[index] = _Copy(gradient, place, version, done)

    def _note_absence(self, index: int, tensor: Tensor) -> None:
        """Record whether a tensor has a gradient that backward is about to add to."""
        if tensor.grad is None:
            self._without.add(index)
        else:
            self._without.discard(index)

    def _move(self, index: int, tensor: Tensor) -> None:
        """Move a gradient that backward has just made, unless it belongs to a graph or is not contiguous."""
        gradient = tensor.grad
        if gradient is None or index not in self._without or not self._parts or not self._fits(index, gradient):
            return
        self._write(index, gradient)
        given = self._parts[index].data  # for autograd not a view, and without history
        tensor.grad = given
        self._given[index] = ref(given)

    def _fits(self, index: int, gradient: Tensor) -> bool:
        part = self._parts[index]
        plain = gradient.layout == torch.strided and not gradient.requires_grad and gradient.is_contiguous()
        return plain and gradient.dtype == part.dtype and gradient.device == part.device

    def _write(self, index: int, gradient: Tensor) -> None:
        """Copy a gradient into its part of the buffer."""
        if index in self._coming or index in self._given:
            self._vacate(index)
        part, source = self._parts[index], gradient.detach()
        if source.device == part.device and source.untyped_storage().data_ptr() == self._place:
            source = source.clone()  # it may overlap its own part
        part.copy_(source)

    def _vacate(self, index: int) -> None:
        """Prepare a part to be overwritten: wait for a copy into it, and move out a gradient that the script keeps."""
        coming = self._coming.pop(index, None)
        if coming is not None:
            coming.done.synchronize()
        given = self._given.pop(index, _no_tensor)()
        if given is not None:
            given.data = given.data.clone()


def _is_copied(gradient: Tensor, part: Tensor, turn: int) -> bool:
    """Return whether a stretch of a gradient equals its copy to the bit; True for layouts that are not compared."""
    if not gradient.is_contiguous() or gradient.dtype != part.dtype or gradient.device != part.device:
        return True
    start = turn * _STRETCH % max(part.numel(), 1)
    ours, theirs = (
        tensor.detach().view(-1)[start : start + _STRETCH].view(_BITS[part.itemsize]) for tensor in (gradient, part)
    )
    return torch.equal(ours, theirs)


def _no_tensor() -> None:
    """Stand for a dead weak reference."""


def _before(
    note: WeakMethod[Callable[[int, Tensor], None]], index: int, tensor: ref[Tensor]
) -> Callable[[Tensor], None]:
    """Return a hook that autograd calls before it adds to a gradient; it keeps no object alive."""

    @unserializable_hook
    def on_gradient(_: Tensor) -> None:
        act, about = note(), tensor()
        if act is not None and about is not None:
            act(index, about)

    return on_gradient


def _after(move: WeakMethod[Callable[[int, Tensor], None]], index: int) -> Callable[[Tensor], None]:
    """Return a hook that autograd calls after it has added to a gradient; it keeps no object alive."""

    def on_gradient(tensor: Tensor) -> None:
        act = move()
        if act is not None:
            act(index, tensor)

    return on_gradient
