"""The gradients of a model inside the memory of the next push, so that backward writes the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakMethod

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.training.flat import Flat


@dataclass(slots=True, weakref_slot=True)
class Gradients:
    """Collects the gradients of the tensors of a flat vector into the memory in which they travel.

    With `in_place`, what backward leaves in a tensor's `grad` is moved there at once, and `grad` becomes a view of it:
    nothing is left to copy in `collect`. That is for memory that nobody reads while backward runs.
    """

    flat: Flat
    in_place: bool
    # (elements of all,), and the view of it that belongs to each tensor, in its shape.
    _buffer: Tensor | None = None
    _parts: list[Tensor] = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        """Have autograd call after each gradient, for as long as this lives."""
        if not self.in_place:
            return
        move = WeakMethod(self._move)
        for index, tensor in enumerate(self.flat.named.values()):
            if tensor.requires_grad and tensor.device.type == "cpu":
                tensor.register_post_accumulate_grad_hook(_hook(move, index))

    def attach(self, buffer: Tensor) -> None:
        """Collect into this memory from now on; its content is overwritten."""
        if self._buffer is None or buffer.data_ptr() != self._buffer.data_ptr():
            self._parts = self.flat.parts(buffer)
        self._buffer = buffer

    def collect(self) -> tuple[int, ...]:
        """Have all gradients in the memory; return the indices of the tensors that have none (zeros there).

        Raises:
            UsageError: a gradient is sparse.
        """
        absent: list[int] = []
        for index, (name, tensor) in enumerate(self.flat.named.items()):
            gradient = tensor.grad
            if gradient is None:
                self._parts[index].zero_()
                absent.append(index)
            elif gradient.layout != torch.strided:
                raise UsageError(f"parameter '{name}' has a sparse gradient: build its layer with sparse=False.")
            elif gradient.data_ptr() != self._parts[index].data_ptr():
                self._take(index, tensor, gradient)
        return tuple(absent)

    def _move(self, index: int, tensor: Tensor) -> None:
        """Move a gradient that backward has just left; one that belongs to a graph stays where it is."""
        gradient = tensor.grad
        if gradient is None or gradient.requires_grad or gradient.layout != torch.strided or not self._parts:
            return
        if gradient.data_ptr() != self._parts[index].data_ptr():
            self._take(index, tensor, gradient)

    def _take(self, index: int, tensor: Tensor, gradient: Tensor) -> None:
        part = self._parts[index]
        part.copy_(gradient.detach())
        if self.in_place and part.device == tensor.device and not gradient.requires_grad:
            tensor.grad = part


def _hook(move: WeakMethod[Callable[[int, Tensor], None]], index: int) -> Callable[[Tensor], None]:
    """Return what autograd calls: it keeps nothing alive, and does nothing once its owner is gone."""

    def on_gradient(tensor: Tensor) -> None:
        act = move()
        if act is not None:
            act(index, tensor)

    return on_gradient
