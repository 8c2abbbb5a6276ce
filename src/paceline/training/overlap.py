"""Overlap of communication and computation: gradients are sent during backward, values arrive during forward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakMethod

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.training.bucket import Bucket


@dataclass(slots=True, weakref_slot=True, eq=False)
class Overlap:
    """Sends each bucket once backward has reached all of its parameters, and makes modules wait for their own values.

    Zhang et al., "Poseidon" (2017), call the first wait-free backpropagation. The second needs the model: a unit, which
    is a module that runs as a whole, waits at the start of its forward for the buckets of all parameters inside. A
    `Sequential` runs its children one after the other, so each child is a unit; other modules are units themselves, as
    only their code knows how they use their children.

    Args:
        send: sends a complete bucket.
    """

    buckets: Sequence[Bucket]
    model: nn.Module | None
    send: Callable[[Bucket], None]
    accumulating: bool = False
    # By bucket: the parameters that the current backward has reached.
    _come: list[set[int]] = field(init=False)
    # Index of the first parameter of each bucket that modules wait for.
    _awaited: set[int] = field(default_factory=set[int])
    _handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def __post_init__(self) -> None:
        """Register hooks on gradients and modules, for the lifetime of this object."""
        self._come = [set() for _ in self.buckets]
        arrived = WeakMethod(self._on_gradient)
        for number, bucket in enumerate(self.buckets):
            for index, tensor in enumerate(bucket.flat.named.values()):
                if tensor.requires_grad:
                    handle = tensor.register_post_accumulate_grad_hook(_calling(arrived, number, index))
                    self._handles.append(handle)
        if self.model is not None:
            self._wait_in_forward(self.model)

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def begin_step(self) -> None:
        """Reset the record of gradients: a backward may not have reached all parameters."""
        for come in self._come:
            come.clear()

    @property
    def can_wait(self) -> bool:
        """Return whether values may arrive during the next forward.

        Until then all parameters must be of one clock. Views of the servers' memory change too early for that, and
        reads of a parameter that no module waits for go unnoticed.
        """
        return len(self._awaited) == len(self.buckets) and not any(bucket.weights.are_views for bucket in self.buckets)

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Send nothing from the backward passes in the block, because more is added to their gradients."""
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False

    def _on_gradient(self, number: int, index: int) -> None:
        if self.accumulating:
            return
        come, bucket = self._come[number], self.buckets[number]
        if bucket.gradients.are_on_device:
            # The device has yet to compute what backward has queued. To wait for it here would leave it without work,
            # so this copy is queued as well, and `step` sends the bucket, once backward has queued everything.
            bucket.fetch(index)
            return
        come.add(index)
        if len(come) == sum(tensor.requires_grad for tensor in bucket.flat.named.values()):
            come.clear()
            self.send(bucket)

    def _wait_in_forward(self, model: nn.Module) -> None:
        """Make each unit wait for the buckets of its parameters, and `state_dict` of the model for all."""
        arrive = WeakMethod(self._arrive)
        inside = set(map(id, model.parameters()))
        lazy = [b for b in self.buckets if inside.issuperset(map(id, b.flat.named.values()))]
        self._awaited = {bucket.first for bucket in lazy}
        for module in _wholes(model):
            own = set(map(id, module.parameters()))
            held = [b.first for b in lazy if not own.isdisjoint(map(id, b.flat.named.values()))]
            if held:
                self._handles.append(module.register_forward_pre_hook(_arriving(arrive, held)))
        self._handles.append(model.register_state_dict_pre_hook(_arriving(arrive, list(self._awaited))))

    def _arrive(self, firsts: Sequence[int]) -> None:
        for bucket in self.buckets:
            if bucket.first in firsts:
                bucket.arrive()


def _wholes(module: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that a model runs one after the other, as far as their types show."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _wholes(child)
    else:
        yield module


def _calling(act: WeakMethod[Callable[[int, int], None]], number: int, index: int) -> Callable[[Tensor], None]:
    """Return a hook that autograd calls after a gradient; it keeps no object alive."""

    def on_gradient(_: Tensor) -> None:
        call = act()
        if call is not None:
            call(number, index)

    return on_gradient


def _arriving(act: WeakMethod[Callable[[Sequence[int]], None]], firsts: Sequence[int]) -> Callable[..., None]:
    """Return a hook that modules call before their forward; it keeps no object alive."""

    def arrive(*_: object) -> None:
        call = act()
        if call is not None:
            call(firsts)

    return arrive
