"""Pushes of rows in flight, and the parts to repeat until every server has answered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from paceline.core.effects import Release
from paceline.core.messages import Push, PushId
from paceline.errors import PacelineError
from paceline.transport.base import EMPTY
from paceline.update.filters.error_feedback import KeptChange
from paceline.update.filters.traffic import RowTraffic, WireBytes
from paceline.update.table import Hyper
from paceline.wire.messages import Keys, RowPushFrame
from paceline.wire.row_codec import ID_BYTES
from paceline.worker.pushes import Answers, PushOutcome, UnderWay, pending_future
from paceline.worker.rows.opened import OpenedRows

SendTo = Callable[[int, object, memoryview], None]  # sends a server a message with its body


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

    opened: OpenedRows
    parts: dict[int, RowPushPart]  # by server. Invariant: exactly those that have not answered
    count: float
    expected: float
    ids: Tensor  # of all parts
    change: KeptChange | None = None  # how it changed what filters keep back
    push: Push | None = None  # its identity, once the core has assigned it
    future: Future[PushOutcome] = field(default_factory=lambda: pending_future(PushOutcome))
    answers: Answers = field(default_factory=Answers)

    def send_part(self, server: int, send_to: SendTo, *, bare: bool, with_ids: bool = False) -> None:
        """Send a server its part; `bare` without its rows, `with_ids` with ids even if it should know them."""
        assert self.push is not None
        part = self.parts[server]
        if bare:
            keys = Keys(len(part.ids), b"", sent=False)
            send_to(server, RowPushFrame(self.push, self.count, part.hyper, keys, self.expected), EMPTY)
            return
        keys = self.opened.keys(server, part.ids, sent=with_ids)
        body = self.opened.up.pack(part.ids if keys.sent else None, part.encoded, part.echo)
        key_bytes = ID_BYTES * len(part.ids) if keys.sent else 0
        self.opened.traffic += RowTraffic(pushed=WireBytes(1, key_bytes, len(keys.digest), len(body) - key_bytes))
        send_to(server, RowPushFrame(self.push, self.count, part.hyper, keys, self.expected), body)


@dataclass(slots=True)
class RowPushes:
    """All pushes of rows in flight. Used under the lock of the worker node."""

    _under_way: dict[PushId, RowPush] = field(default_factory=dict[PushId, RowPush])
    _counts: UnderWay = field(default_factory=UnderWay)
    _held: UnderWay = field(default_factory=UnderWay)  # those that servers hold until their clock is complete
    _next: RowPush | None = None

    def __contains__(self, push_id: PushId) -> bool:
        """Return whether this push is in flight."""
        return push_id in self._under_way

    def count(self, table: str = "") -> int:
        """Count the pushes in flight, of one table or of all."""
        return self._counts.num(table) if table else len(self._under_way)

    def num_held(self, table: str, clock: int) -> int:
        """Count the pushes of a table that servers hold until this clock is complete."""
        return self._held.num(table, clock)

    def prepare(self, push: RowPush) -> None:
        """Prepare a push; it gets its identity when the core first sends it."""
        self._next = push

    def send_part(self, server: int, push: Push, send_to: SendTo, *, bare: bool) -> None:
        """Send a server its part of a push, unless it has answered already."""
        if self._next is not None:
            made = self._under_way[push.id] = self._next
            made.push, self._next = push, None
            self._counts.add(push)
            if made.opened.is_held:
                self._held.add(push)
        found = self._under_way.get(push.id)
        if found is not None and server in found.parts:
            found.send_part(server, send_to, bare=bare)

    def resend_with_ids(self, server: int, seq: int, send_to: SendTo) -> None:
        """Send a server its part again with its ids, which it does not keep any more."""
        for push_id, push in self._under_way.items():
            if push_id.seq == seq and server in push.parts:
                push.send_part(server, send_to, bare=False, with_ids=True)

    def release(self, effect: Release) -> RowPush | None:
        """Note the answer of a server; return the push once all have answered."""
        push = self._under_way[effect.id]
        push.parts.pop(effect.server, None)
        push.answers.note(effect)
        if push.parts:
            return None
        assert push.push is not None
        self._counts.remove(push.push)
        if push.opened.is_held:
            self._held.remove(push.push)
        return self._under_way.pop(effect.id)

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error: whether they were applied is unknown."""
        while self._under_way:
            _, push = self._under_way.popitem()
            push.future.set_exception(error)
        self._counts.clear()
        self._held.clear()
