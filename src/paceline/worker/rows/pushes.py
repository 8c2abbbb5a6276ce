"""Pushes of rows in flight, and the parts to repeat until every server has answered."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from paceline.core.effects import Release
from paceline.core.messages import Push, PushId
from paceline.errors import PacelineError
from paceline.update.filters.error_feedback import KeptChange
from paceline.update.filters.traffic import RowTraffic, WireBytes
from paceline.update.table import Hyper
from paceline.wire.messages import Keys, RowPushFrame
from paceline.wire.row_codec import ID_BYTES
from paceline.worker.pushes import Answers, ClockCounts, PushOutcome, pending_future
from paceline.worker.rows.state import RowTableState
from paceline.worker.table_client import SendFrame


@dataclass(frozen=True, slots=True)
class RowPushPart:
    """One server's part of a push: ids (n,), encoded rows uint8 (n, bytes a row), echoes (n, echo width)."""

    ids: Tensor
    encoded: Tensor
    echo: Tensor | None
    hyper: tuple[Hyper, ...]


@dataclass(slots=True)
class RowPush:
    """One push from the user's call to the last server's answer."""

    state: RowTableState
    parts: dict[int, RowPushPart]  # by server. Invariant: exactly those that have not answered
    count: float
    expected: float
    ids: Tensor  # of all parts
    change: KeptChange | None = None  # how it changed what filters keep back
    push: Push | None = None  # its identity, once the core has assigned it
    future: Future[PushOutcome] = field(default_factory=lambda: pending_future(PushOutcome))
    answers: Answers = field(default_factory=Answers)

    def send_part(self, server: int, send: SendFrame, *, bare: bool, with_ids: bool = False) -> None:
        """Send a server its part; `bare` without its rows, `with_ids` with ids even if it should know them."""
        assert self.push is not None
        part = self.parts[server]
        if bare:
            keys = Keys(len(part.ids), b"", sent=False)
            send(server, RowPushFrame(self.push, self.count, part.hyper, keys, self.expected))
            return
        keys = self.state.keys(server, part.ids, sent=with_ids)
        body = self.state.up.pack(part.ids if keys.sent else None, part.encoded, part.echo)
        key_bytes = ID_BYTES * len(part.ids) if keys.sent else 0
        self.state.traffic += RowTraffic(pushed=WireBytes(1, key_bytes, len(keys.digest), len(body) - key_bytes))
        send(server, RowPushFrame(self.push, self.count, part.hyper, keys, self.expected), body)


@dataclass(slots=True)
class RowPushes:
    """The pushes of a row table in flight. Used under the lock of the worker node.

    `held`: servers hold pushes until their clock is complete.
    """

    held: bool
    _under_way: dict[PushId, RowPush] = field(default_factory=dict[PushId, RowPush])
    _counts: ClockCounts = field(default_factory=ClockCounts)
    _next: RowPush | None = None

    def __len__(self) -> int:
        """Count the pushes in flight."""
        return len(self._under_way)

    def num_held(self, clock: int) -> int:
        """Count the pushes that servers hold until this clock is complete."""
        return self._counts.of_clock(clock) if self.held else 0

    def prepare(self, push: RowPush) -> None:
        """Prepare a push; it gets its identity when the core first sends it."""
        self._next = push

    def send_part(self, server: int, push: Push, send: SendFrame, *, bare: bool) -> None:
        """Send a server its part of a push, unless it has answered already."""
        if self._next is not None:
            made = self._under_way[push.id] = self._next
            made.push, self._next = push, None
            self._counts.add(push)
        found = self._under_way.get(push.id)
        if found is not None and server in found.parts:
            found.send_part(server, send, bare=bare)

    def resend_with_ids(self, server: int, seq: int, send: SendFrame) -> None:
        """Send a server its part again with its ids, which it does not keep any more."""
        for push_id, push in self._under_way.items():
            if push_id.seq == seq and server in push.parts:
                push.send_part(server, send, bare=False, with_ids=True)

    def release(self, effect: Release) -> RowPush | None:
        """Note the answer of a server; return the push once all have answered."""
        push = self._under_way.get(effect.id)
        if push is None:
            return None
        push.parts.pop(effect.server, None)
        push.answers.note(effect)
        if push.parts:
            return None
        assert push.push is not None
        self._counts.remove(push.push)
        return self._under_way.pop(effect.id)

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error: whether they were applied is unknown."""
        while self._under_way:
            _, push = self._under_way.popitem()
            push.future.set_exception(error)
        self._counts = ClockCounts()
