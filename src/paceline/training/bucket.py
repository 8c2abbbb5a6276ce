"""Buckets of consecutive parameters, each with a table and pushes of its own; with `overlap` sent during backward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakMethod

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.training.flat import FlatParameters
from paceline.training.gradients import Gradients, GradientVersion
from paceline.training.state import StateOf
from paceline.training.weights import Weights
from paceline.update.table import Hyper
from paceline.worker.pushes import PushBuffer, PushOutcome
from paceline.worker.table import PendingRead, Table

BUCKET_BYTES = 4 << 20  # sent while backward runs: large compared to a message, small compared to a model


@dataclass(slots=True)
class Bucket:
    """Consecutive parameters with their table, and the push and the pull of them that are under way.

    Args:
        first: index of the first parameter in the optimizer.
    """

    first: int
    flat: FlatParameters
    table: Table
    weights: Weights
    gradients: Gradients
    _reserved: PushBuffer | None = None  # memory of the next push, until it is sent
    # Push of the current step, once it is sent, with the values that it was made from.
    _sent: _Sent | None = None
    _requested: PendingRead | None = None

    def reserve(self) -> None:
        """Reserve memory for the next gradients; blocks until there is some."""
        if self._reserved is None:
            self._reserved = self.table.client.reserve()
            if self.gradients.are_on_device:
                self.gradients.device_copies.lock(self._reserved, self._reserved.gradient)
            self.gradients.attach(self._reserved.gradient)

    def fetch(self, index: int) -> None:
        """Start to copy a final gradient from its device. Does not block."""
        if self._reserved is not None:
            self.gradients.fetch(index)

    def push(
        self, samples: float, hyper: tuple[Hyper, ...], expected: float, *, ends_clock: bool = False
    ) -> Future[PushOutcome]:
        """Push the gradients of this step, unless backward has; return a future of the outcome.

        `ends_clock`: see `DenseClient.push_reserved`.

        Raises:
            UsageError: gradients, samples or hyperparameters have changed since backward pushed them.
        """
        if self._sent is not None:
            self._require_unchanged(self._sent, samples, hyper)
            sent, self._sent = self._sent, None
            return sent.future
        if self._requested is not None:
            self.wait_for_values()  # of a module that did not run; others have waited in their forward
        lock = self.table.client.context.lock
        if lock.failure:
            lock.check()
        if self._reserved is None:  # the push before this one was not sent, as under nonfinite="halt"
            self.reserve()
        absent = self.gradients.collect()
        buffer, self._reserved = self._reserved, None
        assert buffer is not None, "it was just reserved"
        table = self.table
        pushed = table.client.push_reserved(
            buffer, count=samples, absent=absent, hyper=hyper, expected=expected, ends_clock=ends_clock
        )
        return table.metrics.watch_push(table.spec.name, table.spec.consistency, table.node.clock, pushed)

    def push_in_backward(self, samples: float, hyper: tuple[Hyper, ...]) -> None:
        """Push the gradients before their step; they may not change until then."""
        if self._sent is not None:
            raise UsageError(
                f"backward ran again after the gradients of '{self.table.name}' had been sent: run all but the last "
                "backward of a step inside `with optimizer.accumulate():`, or leave out overlap=True."
            )
        future = self.push(samples, hyper, 0.0)
        self._sent = _Sent(future, samples, hyper, self.gradients.found())

    def _require_unchanged(self, sent: _Sent, samples: float, hyper: tuple[Hyper, ...]) -> None:
        """Raise UsageError if the push would differ from the one that was sent."""
        name = self.gradients.changed(sent.found)
        changed = [
            what
            for what, is_changed in (
                (f"the gradient of '{name}' has", bool(name)),
                ("the number of samples has", sent.samples != samples),
                ("hyperparameters have", sent.hyper != hyper),
            )
            if is_changed
        ]
        if changed:
            raise UsageError(
                f"{' and '.join(changed)} changed since the gradients of '{self.table.name}' were sent, while backward "
                "ran: change them before backward (clip in a hook, say), or leave out overlap=True."
            )

    @property
    def is_sent(self) -> bool:
        """Whether the gradients of the current step were sent before it."""
        return self._sent is not None

    def request_values(self, *, refresh: bool, more: bool = False) -> None:
        """Request the values of the next step, for `wait_for_values`. `more`: see `DenseClient.start_read`."""
        if self._requested is not None:
            self.wait_for_values()
        self._requested = self.table.client.start_read(refresh=refresh, more=more)

    def wait_for_values(self) -> None:
        """Wait for the requested values, if any, and set the parameters to them."""
        if self._requested is None:
            return
        self.weights.check_views()  # while values are under way, so that it costs little
        requested, self._requested = self._requested, None
        table = self.table
        with table.metrics.communication:
            outcome = table.client.wait_read(requested, self.weights.set_from)
        table.metrics.note_read(table.spec.name, outcome)
        if self._reserved is None:
            self.reserve()

    def own(self, state: StateOf) -> StateOf:
        """Return the optimizer state of these parameters, with indices counted from the first of them."""
        indices = range(self.first, self.first + len(self.flat.named))
        return {index - self.first: state[index] for index in indices if index in state}


@dataclass(frozen=True, slots=True)
class _Sent:
    """Push that was sent, and the values that it was made from."""

    future: Future[PushOutcome]
    samples: float
    hyper: tuple[Hyper, ...]
    found: tuple[GradientVersion, ...]


def bucket_ranges(tensors: Sequence[Tensor], least_bytes: int) -> list[range]:
    """Split tensors into consecutive runs of at least `least_bytes`, in order; a smaller rest joins the last run.

    >>> import torch
    >>> bucket_ranges([torch.zeros(n) for n in (3, 1, 5, 2)], least_bytes=16)
    [range(0, 2), range(2, 4)]
    """
    runs: list[range] = []
    start, size_bytes = 0, 0
    for index, tensor in enumerate(tensors):
        size_bytes += tensor.nbytes
        if size_bytes >= least_bytes:
            runs.append(range(start, index + 1))
            start, size_bytes = index + 1, 0
    if start < len(tensors):
        first = runs.pop().start if runs else 0
        runs.append(range(first, len(tensors)))
    return runs


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
        wait = WeakMethod(self._wait_for_values)
        inside = set(map(id, model.parameters()))
        lazy = [b for b in self.buckets if inside.issuperset(map(id, b.flat.named.values()))]
        self._awaited = {bucket.first for bucket in lazy}
        for module in _wholes(model):
            own = set(map(id, module.parameters()))
            held = [b.first for b in lazy if not own.isdisjoint(map(id, b.flat.named.values()))]
            if held:
                self._handles.append(module.register_forward_pre_hook(_waiting_hook(wait, held)))
        self._handles.append(model.register_state_dict_pre_hook(_waiting_hook(wait, list(self._awaited))))

    def _wait_for_values(self, firsts: Sequence[int]) -> None:
        for bucket in self.buckets:
            if bucket.first in firsts:
                bucket.wait_for_values()


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


def _waiting_hook(act: WeakMethod[Callable[[Sequence[int]], None]], firsts: Sequence[int]) -> Callable[..., None]:
    """Return a hook that modules call before their forward; it keeps no object alive."""

    def wait(*_: object) -> None:
        call = act()
        if call is not None:
            call(firsts)

    return wait
