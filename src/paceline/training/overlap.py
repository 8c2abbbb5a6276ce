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
    """Sends each bucket once backward has come to all of its parameters, and lets modules wait for their own values.

    Zhang et al., "Poseidon" (2017), call the first wait-free backpropagation. The second needs the model: what runs as
    a whole waits, when its forward begins, for the buckets of all parameters inside. A `Sequential` runs its children
    one after the other, so each of them is a whole; what another module does with its children only its code knows.

    Args:
        send: sends a bucket that is complete.
    """

    buckets: Sequence[Bucket]
    model: nn.Module | None
    send: Callable[[Bucket], None]
    accumulating: bool = False
    # By bucket: the parameters that this backward has come to.
    _come: list[set[int]] = field(init=False)
    # The first parameters of the buckets that modules wait for.
    _awaited: set[int] = field(default_factory=set[int])
    _handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def __post_init__(self) -> None:
        """Have autograd and the modules call, for as long as this lives."""
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
        """Have autograd and the modules call no more."""
        while self._handles:
            self._handles.pop().remove()

    def begin_step(self) -> None:
        """Expect every gradient anew: a backward pass need not have come to all."""
        for come in self._come:
            come.clear()

    @property
    def can_wait(self) -> bool:
        """Say whether all values may arrive while the next forward runs.

        Until then the parameters are to be those of one clock. Views of the servers' memory already change, and who
        reads a parameter that no module waits for is not noticed.
        """
        return len(self._awaited) == len(self.buckets) and not any(bucket.weights.are_views for bucket in self.buckets)

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Send nothing from the backward passes inside: more will be added to their gradients."""
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False

    def _on_gradient(self, number: int, index: int) -> None:
        if self.accumulating:
            return
        come, bucket = self._come[number], self.buckets[number]
        if bucket.gradients.are_away:
            # A device has yet to compute what backward has queued. Whoever waited for it here would have it run dry;
            # so this copy is queued as well, and `step` sends the bucket, once backward has queued everything.
            bucket.fetch(index)
            return
        come.add(index)
        if len(come) == sum(tensor.requires_grad for tensor in bucket.flat.named.values()):
            come.clear()
            self.send(bucket)

    def _wait_in_forward(self, model: nn.Module) -> None:
        """Let each whole wait for the buckets of its parameters, and whoever saves the model for all."""
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
    """Return the modules that a model runs one after the other, as far as their types tell."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _wholes(child)
    else:
        yield module


def _calling(act: WeakMethod[Callable[[int, int], None]], number: int, index: int) -> Callable[[Tensor], None]:
    """Return what autograd calls after a gradient: it keeps nothing alive."""

    def on_gradient(_: Tensor) -> None:
        call = act()
        if call is not None:
            call(number, index)

    return on_gradient


def _arriving(act: WeakMethod[Callable[[Sequence[int]], None]], firsts: Sequence[int]) -> Callable[..., None]:
    """Return what modules call before their forward: it keeps nothing alive."""

    def arrive(*_: object) -> None:
        call = act()
        if call is not None:
            call(firsts)

    return arrive
