"""Bucket of consecutive parameters of an optimizer, with a table on the servers and pushes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

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
    _asked: PendingRead | None = None

    def reserve(self) -> None:
        """Reserve memory for the next gradients; blocks until there is some."""
        if self._reserved is None:
            self._reserved = self.table.client.reserve()
            self.gradients.device_copies.lock(self._reserved, self._reserved.gradient)
            self.gradients.attach(self._reserved.gradient)

    def fetch(self, index: int) -> None:
        """Start to copy a final gradient from its device. Does not block."""
        if self._reserved is not None:
            self.gradients.fetch(index)

    def push(self, samples: float, hyper: tuple[Hyper, ...], expected: float) -> Future[PushOutcome]:
        """Send the gradients of this step, unless backward has; return a future of the outcome.

        Raises:
            UsageError: gradients, samples or hyperparameters have changed since backward sent them.
        """
        sent = self._sent
        if sent is None:
            sent = self._send(samples, hyper, expected)
        else:
            self._require_unchanged(sent, samples, hyper)
        self._sent = None
        return sent.future

    def send(self, samples: float, hyper: tuple[Hyper, ...], expected: float = 0.0) -> None:
        """Send the gradients during backward, before their step; they may not change until then."""
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

    def request_values(self, *, refresh: bool) -> None:
        """Request the values of the next step; `arrive` waits for them."""
        self.arrive()
        self._asked = self.table.start_read(refresh=refresh)

    def check_views(self) -> None:
        """Check views for writes of the script while values are under way; cheap here, as a wait comes next."""
        if self._asked is not None:
            self.weights.check_views()

    def arrive(self) -> None:
        """Wait for the requested values, if any, and set the parameters to them."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self.table.finish_read(asked, self.weights.set_from)
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
