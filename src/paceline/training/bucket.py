"""Neighbouring parameters of an optimizer that travel together: a table of their own on the servers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import UsageError
from paceline.training.flat import FlatParameters
from paceline.training.gradients import FoundGradients, Gradients
from paceline.training.state import StateOf
from paceline.training.weights import Weights
from paceline.update.table import Hyper
from paceline.worker.pushes import PushBuffer, PushOutcome
from paceline.worker.table import PendingRead, Table

BUCKET_BYTES = 4 << 20  # what is sent while backward runs on: large beside a message, small beside a model


@dataclass(slots=True)
class Bucket:
    """Some parameters, what of them is under way, and the table behind them.

    Args:
        first: index of its first parameter in the optimizer.
    """

    first: int
    flat: FlatParameters
    table: Table
    weights: Weights
    gradients: Gradients
    _reserved: PushBuffer | None = None  # the memory of the next push, until it is made
    # The push of the step under way, once it is made, with what it was made from.
    _sent: _Sent | None = None
    _asked: PendingRead | None = None

    def reserve(self) -> None:
        """Have memory for the next gradients; blocks as long as there is none."""
        if self._reserved is None:
            self._reserved = self.table.node.reserve(self.table.name)
            self.gradients.device_copies.lock(self._reserved, self._reserved.gradient)
            self.gradients.attach(self._reserved.gradient)

    def fetch(self, index: int) -> None:
        """Begin to copy a gradient from its device; it is not to change any more. Does not block."""
        if self._reserved is not None:
            self.gradients.fetch(index)

    def push(self, samples: float, hyper: tuple[Hyper, ...], expected: float) -> Future[PushOutcome]:
        """Send the gradients of this step, unless that was done while backward ran; return how the push will end.

        Raises:
            UsageError: gradients, samples or hyperparameters are not those that were sent.
        """
        sent = self._sent
        if sent is None:
            sent = self._send(samples, hyper, expected)
        else:
            self._require_unchanged(sent, samples, hyper)
        self._sent = None
        return sent.future

    def send(self, samples: float, hyper: tuple[Hyper, ...], expected: float = 0.0) -> None:
        """Send the gradients as they are now, before their step; they may not change until then."""
        if self._sent is not None:
            raise UsageError(
                f"backward ran again after the gradients of '{self.table.name}' had been sent: run all but the last "
                "backward of a step inside `with optimizer.accumulate():`, or leave out overlap=True."
            )
        self._sent = self._send(samples, hyper, expected)

    def _send(self, samples: float, hyper: tuple[Hyper, ...], expected: float) -> _Sent:
        self.arrive()  # for a module that did not run; others have waited in their forward
        absent = self.gradients.collect()
        buffer, self._reserved = self._reserved, None
        assert buffer is not None, "reserved when the table was opened, and whenever values arrive"
        future = self.table.push_reserved(buffer, samples=samples, absent=absent, hyper=hyper, expected=expected)
        return _Sent(future, samples, hyper, self.gradients.found())

    def _require_unchanged(self, sent: _Sent, samples: float, hyper: tuple[Hyper, ...]) -> None:
        """Raise UsageError if the push would be another one now."""
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
        """Whether the gradients of the step under way have left, before it."""
        return self._sent is not None

    def ask(self, *, refresh: bool) -> None:
        """Ask for the values of the next step; `arrive` waits for them."""
        self.arrive()
        self._asked = self.table.start_read(refresh=refresh)

    def look(self) -> None:
        """Do what can be done while values are under way, if nothing but waiting for them comes next."""
        if self._asked is not None:
            self.weights.look()

    def arrive(self) -> None:
        """Wait for the values that were asked for, if any, and set the parameters to them."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self.table.finish_read(asked, self.weights.take)
            self.reserve()

    def own(self, state: StateOf) -> StateOf:
        """Return what of an optimizer's state is of these parameters, counted from the first of them."""
        indices = range(self.first, self.first + len(self.flat.named))
        return {index - self.first: state[index] for index in indices if index in state}


@dataclass(frozen=True, slots=True)
class _Sent:
    """A push, and what it was made from."""

    future: Future[PushOutcome]
    samples: float
    hyper: tuple[Hyper, ...]
    found: tuple[FoundGradients, ...]


def runs_of(tensors: Sequence[Tensor], least_bytes: int) -> list[range]:
    """Return runs of neighbours of at least this size together, in order; what is left over joins the last.

    >>> import torch
    >>> runs_of([torch.zeros(n) for n in (3, 1, 5, 2)], least_bytes=16)
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
