"""The rows of a table as a reader sees them: a copy in its own process, which follows the servers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self, final

import torch
from torch import Tensor

from paceline.core.calls import checked_late
from paceline.core.consistency import Consistency
from paceline.errors import DeadlineExceeded, PacelineError, UsageError
from paceline.transport.deadline import Deadline, patience_s
from paceline.update.dtypes import torch_dtype
from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.initializers import first_rows
from paceline.update.rows.ops import row_ops
from paceline.update.rows.spec import RowTableSpec
from paceline.versions.feed import RowChanges, RowFeed
from paceline.versions.links import ServerLinks
from paceline.wire.malformed import describe_error
from paceline.wire.row_codec import ids_body
from paceline.wire.versions import MAX_CHOSEN_IDS, MAX_ROW_PARTS, RowChoice
from paceline.worker.validation import Ids, row_ids

MAX_AGE_S: Final = 1.0
LEAST_AGE_S: Final = 0.01  # that a network and two threads take
TIMEOUT_S: Final = 60.0
_WAIT_S: Final = 0.1  # for a change, in one request; so rows are confirmed ten times a second
_LEAST_POLL_S: Final = 0.01  # between two requests, so that a busy table costs its server a hundred answers a second
_POLL_TIMEOUT_S: Final = 10.0
_ERROR_PAUSE_S: Final = 1.0  # after what is not mended by connecting anew
_CLOSING_TIMEOUT_S: Final = 30.0


@final
class RowCopy:
    """Rows by id, and the first values of those that are not there. For one thread at a time."""

    def __init__(self, spec: RowTableSpec) -> None:
        self._spec = spec
        self._dtype = torch_dtype(spec.dtype)
        self._ops = row_ops()
        self._index = RowIndex(self._ops, RowColumn(1, torch.int64))
        self._values = RowColumn(spec.width, self._dtype)

    def __len__(self) -> int:
        return len(self._index)

    def apply(self, changes: RowChanges) -> None:
        """Take over what has changed."""
        if len(changes.ids):
            self._values.grow(self._index.num_slots + len(changes.ids))  # first: an id in the index has a row
            slots, _ = self._index.add(changes.ids)
            self._ops.scatter(self._values.tensor, slots, changes.values)
        if len(changes.removed):
            slots = self._index.find(changes.removed).unique()
            self._index.remove(slots[slots >= 0])

    def read(self, ids: Tensor) -> Tensor:
        """Return the values of ids (n,), int64, which may repeat: (n, width)."""
        slots = self._index.find(ids)
        out = torch.empty((len(ids), self._spec.width), dtype=self._dtype)
        self._ops.gather(self._values.tensor, slots, out)
        if len(slots) and int(slots.min()) < 0:
            absent = (slots < 0).nonzero().view(-1)
            out[absent] = first_rows(self._spec.first, ids[absent], self._spec.width, self._dtype)
        return out

    def items(self) -> tuple[Tensor, Tensor]:
        """Return copies of all ids, (n,), and values, (n, width)."""
        slots = self._index.live_slots()
        return self._index.ids_of(slots), self._values.tensor[slots]

    def close(self) -> None:
        """Release the memory."""
        self._index.close()
        self._values.close()


@final
class SubscribedRows:
    """A row table as a reader sees it; see `VersionSubscription.table`. A context manager; threads may share it.

    `pull` reads from a copy of all rows in this process, which a thread keeps up to date: a read costs the servers
    nothing. It has all updates that servers had made `max_age_s` before, and each of them whole.

    Args:
        name: of the table.
        make_links: returns connections of its own.
        follow: keep the copy up to date; else only `advance` does.
        deadline: until when the table has to be there.

    Raises:
        UsageError: the table has no rows.
        Refused: there is no such table in time.
        DeadlineExceeded: there is no server in time.
    """

    def __init__(
        self, name: str, make_links: Callable[[], ServerLinks], deadline: Deadline, *, follow: bool = True
    ) -> None:
        self.name: Final = name
        self._make_links = make_links
        self._follows = follow
        self._links = make_links()
        self._feed = RowFeed(self._links, name)
        try:
            self.spec: Final = self._feed.describe(deadline)
        except BaseException:
            self._links.close()
            raise
        self._advancing = threading.Lock()  # guards the feed in `advance`
        self._changed = threading.Condition()  # guards the copy
        self._copy = RowCopy(self.spec)
        self._coming: RowCopy | None = None  # of a feed that began anew, until it is whole
        self._confirmed_s: float | None = None  # all changes until then are in the copy
        self._clock = -1  # that the copy has reached by `advance`
        self._pending = deque[RowChanges]()  # of later clocks
        self._problem = ""
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"SubscribedRows('{self.name}', {len(self)} rows of {self.spec.width} {self.spec.dtype})"

    def __len__(self) -> int:
        """Count the rows in the copy."""
        with self._changed:
            return len(self._copy)

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End it."""
        self.close()

    @property
    def age_s(self) -> float:
        """How old the copy is at most, in seconds; infinite before it is there."""
        return float("inf") if self._confirmed_s is None else time.monotonic() - self._confirmed_s

    @checked_late
    def pull(self, ids: Ids, *, max_age_s: float | None = MAX_AGE_S, timeout_s: float = TIMEOUT_S) -> Tensor:
        """Return the rows of ids: `(*shape of ids, width)`, in new memory; rows that are not there have first values.

        Blocks until the copy has every update that servers made `max_age_s` ago or earlier, at most `timeout_s`. Where
        servers cannot be reached it grows older: `max_age_s=None` reads whatever is here, but for the first time.
        Values of one call are of one moment on each server.

        Raises:
            UsageError: ids are not integers, this is closed, or `max_age_s` is below 10 ms.
            DeadlineExceeded: the copy was too old; the message says why.
        """
        if max_age_s is not None and not max_age_s >= LEAST_AGE_S:
            raise UsageError(f"max_age_s is {max_age_s}, expected at least {LEAST_AGE_S} s, or None")
        timeout_s = patience_s(timeout_s)
        keys = row_ids(ids, f"rows of '{self.name}'")
        if self._thread is None and self._follows:
            self._start()
        with self._changed:
            if not self._is_fresh(max_age_s) and not self._changed.wait_for(
                lambda: self._is_fresh(max_age_s) or self._links.is_closed, timeout_s
            ):
                raise DeadlineExceeded(
                    f"rows of '{self.name}' are {self.age_s:.1f} s old after {timeout_s:g} s, expected at most "
                    f"{max_age_s} s. {self._problem or 'They are on their way.'}"
                )
            self._require_open()
            return self._copy.read(keys.view(-1)).view(*keys.shape, self.spec.width)

    @checked_late
    def advance(self, clock: int | None = None, *, timeout_s: float = TIMEOUT_S) -> int:
        """Bring rows that do not follow to a clock, and no further: those of the dense version of that number.

        Without a clock: to the first one that is available. Returns the clock; blocks until servers have finished it.

        Raises:
            UsageError: the rows are beyond that clock already, the table follows, its updates do not show clock by
                clock, or this is closed.
            DeadlineExceeded: the servers did not finish the clock in time.
        """
        if self._follows or Consistency.parse(self.spec.consistency).visible != "on_clock":
            raise UsageError(
                f"rows of '{self.name}' cannot be brought to a clock: ask for them with follow=False, of a table whose "
                f"updates show clock by clock (it is {self.spec.consistency})"
            )
        timeout_s = patience_s(timeout_s)
        deadline = Deadline.after(timeout_s)
        if not self._advancing.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for another thread to bring rows of '{self.name}' to a clock: give one thread "
                "the calls of `advance`, or a longer timeout_s"
            )
        try:
            return self._advance(clock, deadline, timeout_s)
        finally:
            self._advancing.release()

    def _advance(self, clock: int | None, deadline: Deadline, timeout_s: float) -> int:
        while True:
            with self._changed:
                self._require_open()
                wanted = self._clock if clock is None else clock
                if self._confirmed_s is not None and wanted < self._clock:
                    raise UsageError(
                        f"rows of '{self.name}' are at clock {self._clock} already: take version {self._clock} or a "
                        "newer one"
                    )
                if self._confirmed_s is not None and self._feed.clock >= wanted:
                    self._apply_below(wanted)
                    return wanted
            if not deadline.remaining_s():
                raise DeadlineExceeded(f"rows of '{self.name}' did not come to clock {wanted} within {timeout_s:g} s")
            self._poll(deadline, self._note)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return copies of the ids, (n,), and values, (n, width), of all rows in the copy."""
        with self._changed:
            self._require_open()
            return self._copy.items()

    def changes(
        self,
        since: str = "",
        *,
        ids: Ids | None = None,
        part: tuple[int, int] = (0, 1),
        wait_s: float = 1.0,
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[RowChanges | None]:
        """Return every change from a cursor on, as it comes; each has the cursor to go on behind it. Never ends.

        Without a cursor, or where the servers do not have all changes behind it any more (they keep the last 64 MB, and
        none when they were replaced), all rows come first: the first of these says so (`resets`).

        With `ids` or `part` servers send those rows alone. A cursor says how far a reader has come, and not with which
        rows. While other rows change, changes without rows come every `wait_s`, for their cursor.

        Args:
            since: the `cursor` of the last changes that were handled, perhaps by another process.
            ids: the rows that are wanted, at most 4096.
            part: number and how many: one of several equal parts of all rows, by the hashes of their ids. Several
                consumers that take one part each have all rows together, each row once.
            wait_s: seconds, after which None is returned while nothing changes.
            timeout_s: for servers that cannot be reached.

        Raises:
            UsageError: that is no cursor, the rows that are wanted make no sense, or this is closed.
            DeadlineExceeded: servers could not be reached in time.
        """
        return self._changes(since, _chosen(self.name, ids, part), wait_s, timeout_s)

    def _changes(
        self, since: str, only: RowChoice | None, wait_s: float, timeout_s: float
    ) -> Iterator[RowChanges | None]:
        links = self._make_links()
        try:
            feed, nothing_since_s = RowFeed(links, self.name, since, only), time.monotonic()
            while True:
                self._require_open()
                began_s = time.monotonic()
                found = feed.poll(min(wait_s, _WAIT_S), Deadline.after(patience_s(timeout_s)))
                yield from found
                now_s = time.monotonic()
                if found:
                    nothing_since_s = now_s
                    links.wait_closed(max(0.0, _LEAST_POLL_S - (now_s - began_s)))
                elif now_s - nothing_since_s >= wait_s:
                    nothing_since_s = now_s
                    yield feed.skipped()
        finally:
            links.close()

    def close(self) -> None:
        """End it, and release the copy. Idempotent."""
        self._links.close()
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(_CLOSING_TIMEOUT_S)
        with self._changed:
            for each in (self._copy, self._coming):
                if each is not None:
                    each.close()

    def _require_open(self) -> None:
        if self._links.is_closed:
            raise UsageError(f"the subscription to rows of '{self.name}' is closed")

    def _start(self) -> None:
        with self._changed:
            if self._thread is None and not self._links.is_closed:
                thread = threading.Thread(target=self._keep_up, name="paceline-rows", daemon=True)
                thread.start()  # if it cannot, the next `pull` tries again
                self._thread = thread

    def _is_fresh(self, max_age_s: float | None) -> bool:
        return self._confirmed_s is not None and (max_age_s is None or self.age_s <= max_age_s)

    def _keep_up(self) -> None:
        """Follow the servers until `close`."""
        while not self._links.is_closed:
            began_s = time.monotonic()
            try:
                has_found = self._poll(Deadline.after(_POLL_TIMEOUT_S), self._take)
                self._confirm()
            except (PacelineError, MemoryError, RuntimeError) as error:
                self._problem = describe_error(error)
                self._links.wait_closed(_ERROR_PAUSE_S)
                continue
            if has_found:
                self._links.wait_closed(max(0.0, _LEAST_POLL_S - (time.monotonic() - began_s)))

    def _poll(self, deadline: Deadline, take: Callable[[RowChanges], None]) -> bool:
        """Have what comes next taken change by change; return whether anything came.

        Where it comes and is not taken, the feed begins anew, as nothing else has what is lost: also where Ctrl-C is
        between the two.
        """
        has_come = False
        try:
            found = self._feed.poll(_WAIT_S, deadline)
            has_come = True
            for changes in found:
                with self._changed:
                    take(changes)
        except BaseException as error:
            if has_come or not isinstance(error, PacelineError):
                self._feed = RowFeed(self._links, self.name)
            raise
        return bool(found)

    def _confirm(self) -> None:
        """Note until when the copy has all changes."""
        with self._changed:
            if self._coming is None and self._feed.confirmed_s:
                self._confirmed_s, self._problem = self._feed.confirmed_s, ""
                self._changed.notify_all()

    def _take(self, changes: RowChanges) -> None:
        """Have changes in the copy; a feed that begins anew replaces it once all rows are here."""
        if changes.resets:
            if self._coming is not None:
                self._coming.close()
            self._coming = RowCopy(self.spec)
        (self._copy if self._coming is None else self._coming).apply(changes)
        if self._coming is not None and not changes.is_snapshot:
            self._copy.close()
            self._copy, self._coming = self._coming, None
            self._clock, self._pending = changes.clock, deque()

    def _note(self, changes: RowChanges) -> None:
        """Have changes wait until `advance` comes to their clock."""
        if changes.resets or self._coming is not None:
            self._take(changes)
            if self._coming is None:
                self._confirmed_s = time.monotonic()
        else:
            self._pending.append(changes)

    def _apply_below(self, clock: int) -> None:
        later = deque[RowChanges]()
        for changes in self._pending:
            if changes.clock < clock:
                self._take(changes)
            else:
                later.append(changes)
        self._pending, self._clock = later, clock


def _chosen(table: str, ids: Ids | None, part: tuple[int, int]) -> RowChoice | None:
    """Return which rows a reader wants, None for all; raises UsageError for what makes no sense."""
    number, num_parts = part
    if not 0 <= number < num_parts <= MAX_ROW_PARTS:
        raise UsageError(
            f"part is {part}, expected a number and how many parts there are: (0, 4) is the first of four, and there "
            f"may be {MAX_ROW_PARTS}"
        )
    if ids is None:
        return None if num_parts == 1 else RowChoice(b"", number, num_parts)
    keys = row_ids(ids, f"rows of '{table}'").view(-1).unique()
    if num_parts > 1 or not 0 < len(keys) <= MAX_CHOSEN_IDS:
        raise UsageError(
            f"changes of '{table}' are wanted for {len(keys)} ids of part {part}, expected 1 to {MAX_CHOSEN_IDS} ids, "
            "or a part: leave the others out where they come"
        )
    return RowChoice(bytes(ids_body(keys)))
