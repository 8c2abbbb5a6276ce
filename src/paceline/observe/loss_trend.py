"""Whether the loss of a run falls, and what the age of the values that it reads has to do with it: one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from paceline.observe.averages import mean
from paceline.observe.trace import Reported, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.observe.trace import TraceRecord

NUM_SPANS: Final = 64  # of time; when they are full, each two become one
_FIRST_WIDTH_S: Final = 0.125
_NUM_PARTS: Final = 8  # into which the spans are divided, to be compared
_LEAST_IN_PART: Final = 2
_SURELY: Final = 6.0  # standard errors of a part, by which the loss has to rise, as the least of many parts is compared
_LIKELY: Final = 3.0  # the same for one that falls
_BEND_OF_NOISE: Final = 0.6745 * math.sqrt(6)  # median bend of noise with a standard deviation of 1
_LOST_SHARE: Final = 0.25  # of what had been won, that a rise has to have taken
_LEAST_RISE: Final = 0.1  # of the lowest loss, as a screen is looked at often and noise has no bound
_FRESH: Final = 1  # clocks

Trend = Literal["", "falls", "stands", "rises", "not finite"]

# What follows where it is not known how old values were, where they were fresh, and where they were not.
_TOO_HIGH: Final = (
    ": a lower learning rate may help",
    ": the learning rate is too high, whatever the staleness",
    ": the learning rate is too high for that; lower it, or the staleness",
)
_ADVICE: Final[Mapping[Trend, tuple[str, str, str]]] = {
    "not finite": _TOO_HIGH,
    "rises": _TOO_HIGH,
    "falls": ("", "", ": the learning rate is not too high for that"),
    "stands": ("", "", ": compare with a run of a lower rate, or of less staleness"),
}


class LossVerdict(msgspec.Struct, frozen=True):
    """How the loss goes.

    Args:
        trend: empty while too little is known.
        text: a sentence, empty likewise.
    """

    trend: Trend = ""
    text: str = ""


UNKNOWN: Final = LossVerdict()


@dataclass(slots=True)
class LossTrend:
    """The mean loss of all workers over the time of a run, in memory of a fixed size.

    trend = LossTrend()
    for record in follower.poll():
        trend.take_in(record)
    trend.verdict(staleness=(3, 5)).text
    """

    _width_s: float = _FIRST_WIDTH_S
    _spans: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])  # sum and number
    _began_t: float | None = None
    _not_finite: str = ""

    def take_in(self, record: TraceRecord) -> None:
        """Take in a record; those that have no loss are left out."""
        match record:
            case Step() if record.loss is not None:
                self._add_loss(record.t, record.loss)
            case Reported() if record.loss is None and not self._not_finite:
                text = record.text or "nan"
                self._not_finite = f"the loss of worker {record.worker} is {text} since clock {record.clock}"
            case _:
                pass

    def verdict(self, staleness: tuple[int, int] | None) -> LossVerdict:
        """Return how the loss goes, where values were so many clocks old: at the median and the 99th percentile."""
        trend, text = ("not finite", self._not_finite) if self._not_finite else self._compare()
        return LossVerdict(trend, text + _conclusion(trend, staleness)) if trend else UNKNOWN

    def _compare(self) -> tuple[Trend, str]:
        """Return how the last part of the run compares with those before it; empty while there are too few."""
        places = sorted(self._spans)
        means = [self._spans[place][0] / self._spans[place][1] for place in places]
        in_part = len(means) // _NUM_PARTS
        if in_part < _LEAST_IN_PART:
            return "", ""
        parts = _parts(means, in_part)
        error = _standard_error(means, in_part)
        *before, last = parts
        low = min(before)
        lowest = len(before) - 1 - before[::-1].index(low)
        ago = _ago((len(before) - lowest) * in_part * self._width_s)
        if last - low > max(_SURELY * error, _LOST_SHARE * (max(before) - low), _LEAST_RISE * abs(low)):
            return "rises", f"the loss rises: {last:.4g}, and {low:.4g} {ago}"
        earlier = mean(before[-3:])
        if earlier - last > _LIKELY * error:
            return "falls", f"the loss falls: {last:.4g}, and {parts[0]:.4g} {_ago(len(places) * self._width_s)}"
        return "stands", f"the loss stands at {last:.4g}"

    def _add_loss(self, t: float, loss: float) -> None:
        """Take in a finite loss; what is earlier than the first falls into the first span."""
        self._began_t = t if self._began_t is None else self._began_t
        while t - self._began_t >= NUM_SPANS * self._width_s:
            self._halve()
        self._add(max(0, int((t - self._began_t) / self._width_s)), loss, 1)

    def _add(self, place: int, total: float, num: int) -> None:
        before, num_before = self._spans.get(place, (0.0, 0))
        self._spans[place] = before + total, num_before + num

    def _halve(self) -> None:
        before, self._spans = self._spans, {}
        self._width_s *= 2
        for place, (total, num) in before.items():
            self._add(place // 2, total, num)


def _parts(means: Sequence[float], in_part: int) -> list[float]:
    """Return the means of equal parts, the last of which ends with the last span."""
    used = means[len(means) - _NUM_PARTS * in_part :]
    return [mean(used[first : first + in_part]) for first in range(0, len(used), in_part)]


def _standard_error(means: Sequence[float], in_part: int) -> float:
    """Return that of the mean of a part, from how much spans differ from what lies between their neighbours.

    So a trend does not count, and the median leaves out where the loss falls steeply, as at the beginning.
    """
    bends = [abs(before - 2 * here + after) for before, here, after in zip(means, means[1:], means[2:], strict=False)]
    return median(bends) / _BEND_OF_NOISE / math.sqrt(in_part)


def _conclusion(trend: Trend, staleness: tuple[int, int] | None) -> str:
    """Return on how old values the loss goes so, and what follows from that."""
    on_any, on_fresh, on_old = _ADVICE[trend]
    if staleness is None:
        return on_any
    p50, p99 = staleness
    return f", on fresh values{on_fresh}" if p99 <= _FRESH else f", on values {p50} clocks old (p99 {p99}){on_old}"


def _ago(seconds: float) -> str:
    """Return a time before now in words.

    >>> _ago(2.5), _ago(300), _ago(7200)
    ('2 s ago', '5 min ago', '2.0 h ago')
    """
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
