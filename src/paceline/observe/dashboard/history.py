"""What a run did over all of its time, in memory of a fixed size: sums over spans that grow with the run."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Final

from paceline.observe.screen import event_text
from paceline.observe.trace import Carried, ReadRecord, Reported, RowRead, Serving, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.observe.trace import TraceRecord

NUM_BINS: Final = 480  # of a series; when they are full, each two become one
_FIRST_WIDTH_S: Final = 0.25
MAX_SHOWN_WORKERS: Final = 256  # that have series of their own; those of higher ranks count in sums only
MAX_TABLES: Final = 17  # by name, and the rest
MAX_SERVERS: Final = 64
MAX_EVENTS: Final = 200
# The least staleness of each bar of a histogram, in clocks.
STALENESS_BARS: Final = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)

Key = tuple[str, str]  # of a series: what is counted, and of which worker, server or table


@dataclass(slots=True)
class Bins:
    """One number for each span; `join` makes one of two."""

    join: Callable[[float, float], float]
    values: dict[int, float] = field(default_factory=dict[int, float])  # by place; a span without a record has none

    def add(self, place: int, value: float) -> None:
        """Join a value to that of a span."""
        before = self.values.get(place)
        self.values[place] = value if before is None else self.join(before, value)

    def halve(self) -> None:
        """Make one span of each two."""
        before, self.values = self.values, {}
        for place, value in before.items():
            self.add(place // 2, value)

    def since(self, place: int, num: int) -> list[float | None]:
        """Return the values of the spans from a place on, with four digits."""
        return [_short(self.values.get(each)) for each in range(place, num)]


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


@dataclass(slots=True)
class Axis:
    """Spans of equal width from 0 on, NUM_BINS at most: the width is doubled when that is not enough."""

    width: float
    series: dict[Key, Bins] = field(default_factory=dict[Key, Bins])
    num: int = 0
    changed_from: int = 0  # the first span that has changed since `news`

    def place(self, at: float) -> int:
        """Return the span that a place on the axis is in."""
        while at >= self.width * NUM_BINS:
            self._halve()
        place = max(0, int(at / self.width))
        self.num = max(self.num, place + 1)
        self.changed_from = min(self.changed_from, place)
        return place

    def add(self, key: Key, at: float, value: float, join: Callable[[float, float], float] = add) -> None:
        """Join a value to the span at a place."""
        place = self.place(at)
        self._bins(key, join).add(place, value)

    def spread(self, key: Key, since: float, until: float, value: float) -> None:
        """Add a value to the spans between two places, to each its share."""
        last, first = self.place(until), self.place(max(0.0, since))
        bins = self._bins(key, add)
        if last == first:
            bins.add(last, value)
            return
        per_unit, begin = value / (until - max(0.0, since)), max(0.0, since)
        for place in range(first, last + 1):
            end = min(until, (place + 1) * self.width)
            bins.add(place, per_unit * (end - begin))
            begin = end

    def news(self, *, whole: bool) -> dict[str, object]:
        """Return the spans that have changed since the last call, or all; see `RunHistory.news`."""
        since = 0 if whole else min(self.changed_from, self.num)
        series = {
            name: {of: bins.since(since, self.num) for (kind, of), bins in self.series.items() if kind == name}
            for name in {kind: None for kind, _ in self.series}
        }
        return {"width": self.width, "from": since, "num": self.num, "series": series}

    def note_told(self) -> None:
        """Count what changes from here on as news."""
        self.changed_from = self.num

    def _bins(self, key: Key, join: Callable[[float, float], float]) -> Bins:
        bins = self.series.get(key)
        if bins is None:
            bins = self.series[key] = Bins(join)
            self.changed_from = 0
        return bins

    def _halve(self) -> None:
        self.width *= 2
        self.num = -(-self.num // 2)
        self.changed_from = 0
        for bins in self.series.values():
            bins.halve()


@dataclass(slots=True)
class Totals:
    """The last totals of a process, by what they count, and when they were read; they begin anew with another life."""

    t: float
    counts: dict[Key, float]

    def increases(self, later: Totals) -> Iterable[tuple[Key, float]]:
        """Return by how much each has grown until later."""
        for key, count in later.counts.items():
            before = self.counts.get(key, 0.0)
            yield key, count - before if count >= before else count


@dataclass(slots=True)
class RunHistory:
    """The records of a run, summed up, in any order.

    history = RunHistory()
    history.add_all(follower.poll())
    history.news(whole=True)
    """

    times: Axis = field(default_factory=lambda: Axis(_FIRST_WIDTH_S))
    unit: str = ""  # of what is counted: "samples", or "steps" of a script that counts none
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque[tuple[float, str]](maxlen=MAX_EVENTS))
    rates: dict[tuple[int, int], tuple[float, float]] = field(
        default_factory=dict[tuple[int, int], tuple[float, float]]
    )  # bytes per second that a server received and sent, by worker and server
    _began_t: float | None = None
    _totals: dict[tuple[str, int], Totals] = field(default_factory=dict[tuple[str, int], Totals])
    _not_finite: set[int] = field(default_factory=set[int])

    def add_all(self, records: Sequence[TraceRecord]) -> None:
        """Take in records; time counts from the earliest of the first ones."""
        if self._began_t is None and records:
            self._began_t = min(record.t for record in records)
        for record in records:
            self.add(record)

    def add(self, record: TraceRecord) -> None:
        """Take in a record; what is earlier than the beginning falls into the first span."""
        if text := event_text(record):
            self.events.append((round(self._at(record.t), 3), text))
        match record:
            case Step():
                self._add_step(record)
            case ReadRecord():
                self._add_reads(record.t, record.staleness, 1)
            case RowRead():
                for value_clock, num_rows in record.num_rows.items():
                    self._add_reads(record.t, record.clock - value_clock, num_rows)
            case Serving() if record.server < MAX_SERVERS:
                self._add_serving(record)
            case Carried() if record.server < MAX_SERVERS:
                self._add_carried(record)
            case Reported() if record.loss is None and record.worker not in self._not_finite:
                self._not_finite.add(record.worker % MAX_SHOWN_WORKERS)
                text = f"worker {record.worker}: its loss is {record.text or 'nan'} in clock {record.clock}"
                self.events.append((round(self._at(record.t), 3), text))
            case _:
                pass

    def news(self, *, whole: bool) -> dict[str, object]:
        """Return what has changed since `note_told`, or all, as the page takes it.

        The axis of time has `width`, `num` and `from`: the series of the page are replaced from that span on.
        """
        return {
            "times": self.times.news(whole=whole),
            "unit": self.unit,
            "events": list(self.events),
            "rates": [[*pair, *map(_short, rates)] for pair, rates in sorted(self.rates.items())],
        }

    def note_told(self) -> None:
        """Count what changes from here on as news."""
        self.times.note_told()

    def _at(self, t: float) -> float:
        return max(0.0, t - (self._began_t or 0.0))

    def _add_step(self, step: Step) -> None:
        at = self._at(step.t)
        begin = at - step.step_s
        if step.worker < MAX_SHOWN_WORKERS:
            own = f"{step.worker}"
            parts = (step.own_s, step.load_s, step.wait_s, step.comm_s - step.wait_s)
            for name, seconds in zip(("compute", "data", "wait", "wire"), parts, strict=True):
                self.times.spread((name, own), begin, at, max(0.0, seconds))
        if not self.unit:
            self.unit = "samples" if step.samples else "steps"
        self.times.spread(("num", ""), begin, at, step.samples if self.unit == "samples" else 1)
        if step.loss is not None and math.isfinite(step.loss):
            self.times.add(("loss", ""), at, step.loss)
            self.times.add(("losses", ""), at, 1)
            self.times.add(("low", ""), at, step.loss, min)
            self.times.add(("high", ""), at, step.loss, max)

    def _add_reads(self, t: float, staleness: int, num: int) -> None:
        bar = max(least for least in STALENESS_BARS if least <= max(0, staleness))
        self.times.add(("stale", f"{bar}"), self._at(t), num)

    def _add_serving(self, record: Serving) -> None:
        server = f"{record.server}"
        self.times.add(("queue", server), self._at(record.t), record.num_waiting, max)
        if record.num_behind is not None:
            self.times.add(("lag", server), self._at(record.t), record.num_behind, max)
        totals: dict[Key, float] = {
            ("busy", server): record.busy_s,
            ("received", server): record.received_bytes,
            ("sent", server): record.sent_bytes,
        }
        self._grow(("serving", record.server), Totals(record.t, totals))

    def _add_carried(self, record: Carried) -> None:
        totals: dict[Key, float] = {}
        for worker, received, sent in record.links:
            if worker < MAX_SHOWN_WORKERS:
                totals["up", f"{worker}"], totals["down", f"{worker}"] = received, sent
        for table, received, sent in record.tables[:MAX_TABLES]:
            totals["pushed", table], totals["pulled", table] = received, sent
        grown = self._grow(("carried", record.server), Totals(record.t, totals))
        for worker, _, _ in record.links:
            key = f"{worker}"
            if ("up", key) in grown:
                self.rates[worker, record.server] = grown["up", key], grown["down", key]

    def _grow(self, of: tuple[str, int], now: Totals) -> dict[Key, float]:
        """Add what totals have grown by, over the time that it took; return it per second."""
        before, self._totals[of] = self._totals.get(of), now
        if before is None or now.t <= before.t:
            return {}
        rates: dict[Key, float] = {}
        for key, grown in before.increases(now):
            self.times.spread(key, self._at(before.t), self._at(now.t), grown)
            rates[key] = grown / (now.t - before.t)
        return rates
