"""Consistency models: four independent axes, and names for common combinations.

| axis    | question                                              | values                                        |
|---------|-------------------------------------------------------|-----------------------------------------------|
| bound   | how many clocks may a reader be ahead of the slowest  | 0, s, l to s, None (never waits)              |
| visible | when may others see an update                         | on_arrival; on_clock (its clock is complete)  |
| deliver | how do values travel                                  | on_pull; on_clock (pushed to subscribers)     |
| backups | how many workers may miss a clock (the quorum axis)   | 0 = all complete it; b = the first n of n + b |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast, get_args

import msgspec

from paceline.core.calls import checked, shown
from paceline.errors import UsageError

Visible = Literal["on_arrival", "on_clock"]
Deliver = Literal["on_pull", "on_clock"]

_AXES = "bound=S|L..S|none,visible=on_arrival|on_clock,deliver=on_pull|on_clock,backups=B"


@dataclass(frozen=True, slots=True)
class Consistency:
    """When a worker may read, what it may see, how values travel and which workers a clock waits for.

    Every valid combination is supported, named or not. `str(c)` and `Consistency.parse` are inverse.

    Raises:
        UsageError: an axis has a value that it cannot take.

    Example:
        >>> Consistency.parse("ssp:3") == ssp(3)
        True
        >>> str(Consistency(bound=2, visible="on_clock"))
        'bound=2,visible=on_clock,deliver=on_pull,backups=0'
    """

    bound: int | None
    visible: Visible = "on_arrival"
    deliver: Deliver = "on_pull"
    backups: int = 0
    lowest: int | None = None  # servers move the bound in force between this and `bound`; None: it stays at `bound`

    def __post_init__(self) -> None:
        """Refuse values outside the axes."""
        for name in ("bound", "backups", "lowest"):
            given = getattr(self, name)
            if given is None and name != "backups":
                continue
            if not isinstance(given, int):
                raise UsageError(f"Consistency: {name} is {shown(given)}, expected a whole number.")
        if self.bound is not None and self.bound < 0:
            raise UsageError(
                f"staleness bound is {self.bound}, expected 0 or more clocks (or none to never wait). "
                f"Known consistencies: {_NAMES}."
            )
        if self.backups < 0:
            raise UsageError(f"number of backup workers is {self.backups}, expected 0 or more.")
        if self.backups and self.visible != "on_clock":
            raise UsageError(
                "backup workers need visible=on_clock: a quorum completes a clock, "
                "and updates that show on arrival belong to no clock that could be completed."
            )
        if self.lowest is not None:
            self._check_adaptive(self.lowest)

    def _check_adaptive(self, lowest: int) -> None:
        """Refuse a bound that cannot move, or that the answers to pulls do not decide."""
        if self.bound is None or not 0 <= lowest < self.bound:
            raise UsageError(
                f"an adaptive bound moves from {lowest} to {'none' if self.bound is None else self.bound}, expected "
                "two numbers of clocks, the lower one first: adaptive:0:8, for example."
            )
        if self.deliver != "on_pull" or self.backups:
            raise UsageError(
                "an adaptive bound needs deliver=on_pull and no backups: it follows what pulls wait for, and neither "
                "delivered values nor the late workers of a quorum are pulled. Leave these out: adaptive:0:8, say."
            )

    def __str__(self) -> str:
        """Return the shortest text that `parse` turns back into this value."""
        for name, point in POINTS.items():
            numbers = [getattr(self, axis) for axis in point.axes]
            if None not in numbers and (self.backups or "backups" not in point.axes) and point.make(*numbers) == self:
                return ":".join([name, *map(str, numbers)])
        bound = "none" if self.bound is None else self.bound
        bound = bound if self.lowest is None else f"{self.lowest}..{bound}"
        return f"bound={bound},visible={self.visible},deliver={self.deliver},backups={self.backups}"

    @staticmethod
    def parse(text: str) -> Consistency:
        """Read `bsp`, `ssp:3`, `essp:3`, `asynchronous`, `backup:1`, `adaptive:0:8` or `bound=2,visible=on_clock,...`.

        `adaptive` alone is `adaptive:0:8`, and its bound among axes is `bound=0..8`.

        Raises:
            UsageError: the text is not a valid consistency; the message lists the valid ones.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(f"a consistency is {shown(text)}, expected a text. Expected one of {_NAMES}, or {_AXES}.")
        stripped = text.strip().lower()
        if "=" in stripped:
            return _parse_axes(stripped)
        name, *arguments = _SHORT.get(stripped, stripped).split(":")
        point = POINTS.get(name)
        if point is not None and len(arguments) == len(point.axes):
            return point.make(*(_integer(argument, text) for argument in arguments))
        if point is not None and point.axes and len(arguments) < len(point.axes):
            raise UsageError(f"consistency '{text}' lacks {point.lacks}: write {name}:{point.usual}, for example.")
        raise UsageError(f"unknown consistency '{text}'. Expected one of {_NAMES}, or {_AXES}.")

    @property
    def lockstep(self) -> bool:
        """Whether values change only while every worker waits for them."""
        return self.visible == "on_clock" and self.bound == 0 and not self.backups

    def needs(self, clock: int) -> int:
        """Return the lowest value clock that a read at `clock` may have: `clock - bound`, never below 0."""
        return 0 if self.bound is None else max(0, clock - self.bound)

    def unasked(self, clock: int) -> int:
        """Return the lowest value clock of a read at `clock` that no server answers.

        Servers alone know the bound in force of an adaptive bound, so such a read keeps the lowest.
        """
        return self.needs(clock) if self.lowest is None else max(0, clock - self.lowest)


@checked
def bsp() -> Consistency:
    """Bulk synchronous: a read at clock c sees exactly the clocks below c. The only bit-reproducible model.

    Example:
        >>> bsp().needs(7)  # a read at clock 7 waits for all clocks below 7
        7
    """
    return Consistency(bound=0, visible="on_clock")


@checked
def ssp(staleness: int) -> Consistency:
    """Stale synchronous (Ho et al., NIPS 2013): a read at clock c sees at least all clocks below c - staleness.

    Example:
        >>> ssp(3).needs(7)  # a read at clock 7 waits for all clocks below 4
        4
    """
    return Consistency(bound=staleness)


@checked
def essp(staleness: int) -> Consistency:
    """Eager SSP (Dai et al., AAAI 2015): the same bound, and servers push new values when the clock advances.

    Example:
        >>> essp(3).needs(7) == ssp(3).needs(7), essp(3).deliver
        (True, 'on_clock')
    """
    return Consistency(bound=staleness, deliver="on_clock")


@checked
def asynchronous() -> Consistency:
    """No bound: reads and writes never wait for another worker.

    Example:
        >>> asynchronous().needs(7)  # a read waits for nothing
        0
    """
    return Consistency(bound=None)


@checked
def backup(backups: int) -> Consistency:
    """Bulk synchronous with backup workers: a clock closes without the slowest `backups` (Chen et al., 2016).

    Pushes that arrive after their clock has closed are refused.

    Raises:
        UsageError: `backups` is below 1.

    Example:
        >>> str(backup(1))  # the slowest worker of each clock is left out
        'backup:1'
    """
    if backups < 1:
        raise UsageError(f"backup:{backups} asks for {backups} backup workers, expected 1 or more (or bsp).")
    return Consistency(bound=0, visible="on_clock", backups=backups)


@checked
def adaptive(lowest: int = 0, highest: int = 8) -> Consistency:
    """Bound that servers move while a run goes on, to where waiting and staleness together cost least.

    A read keeps the bound in force when it is asked for, and never lacks more than `highest` clocks.

    Raises:
        UsageError: `lowest` is negative, or not below `highest`.

    Example:
        >>> str(adaptive(0, 4)), adaptive(0, 4).needs(7)  # in no case is a read at clock 7 older than clock 3
        ('adaptive:0:4', 3)
    """
    return Consistency(bound=highest, lowest=lowest)


class NamedPoint(msgspec.Struct, frozen=True):
    """A point of the axes that has a name.

    Args:
        make: returns it, given its numbers.
        axes: what its numbers are.
        form: how they are written, in messages.
        usual: numbers as an example.
    """

    make: Callable[..., Consistency]
    axes: tuple[Literal["bound", "backups", "lowest"], ...] = ()
    form: str = ""
    usual: str = "3"

    @property
    def lacks(self) -> str:
        """What a text lacks that has the name alone."""
        return "its number" if len(self.axes) == 1 else "one of its numbers"


# By name, in the order in which messages list them.
POINTS: Final[Mapping[str, NamedPoint]] = {
    "bsp": NamedPoint(bsp),
    "ssp": NamedPoint(ssp, ("bound",), ":S"),
    "essp": NamedPoint(essp, ("bound",), ":S"),
    "asynchronous": NamedPoint(asynchronous),
    "backup": NamedPoint(backup, ("backups",), ":B"),
    "adaptive": NamedPoint(adaptive, ("lowest", "bound"), ":L:S", usual="0:8"),
}
_SHORT: Final = {"async": "asynchronous", "adaptive": "adaptive:0:8"}
FORMS: Final = tuple(name + point.form for name, point in POINTS.items())
_NAMES: Final = ", ".join(FORMS)


def is_named(name: str) -> bool:
    """Return whether this is the name of a point, without its number."""
    return name in POINTS or name in _SHORT


def _parse_axes(text: str) -> Consistency:
    """Parse `bound=2,visible=on_clock,deliver=on_pull,backups=0`; only `bound` is required."""
    given: dict[str, str] = {}
    for part in text.split(","):
        axis, _, value = part.partition("=")
        given[axis.strip()] = value.strip()
    unknown = sorted(set(given) - {"bound", "visible", "deliver", "backups"})
    if unknown or "bound" not in given:
        problem = f"has no axis '{unknown[0]}'" if unknown else "does not say its bound"
        raise UsageError(f"consistency '{text}' {problem}. Expected {_AXES}.")
    visible, deliver = given.get("visible", "on_arrival"), given.get("deliver", "on_pull")
    for name, choice, allowed in (("visible", visible, Visible), ("deliver", deliver, Deliver)):
        if choice not in get_args(allowed):
            raise UsageError(f"consistency '{text}': {name} is '{choice}', expected {' or '.join(get_args(allowed))}.")
    lowest, dots, bound = given["bound"].rpartition("..")
    return Consistency(
        lowest=_integer(lowest, text) if dots else None,
        bound=None if bound == "none" else _integer(bound, text),
        visible=cast("Visible", visible),
        deliver=cast("Deliver", deliver),
        backups=_integer(given.get("backups", "0"), text),
    )


def _integer(text: str, whole: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"consistency '{whole}': '{text}' is not a whole number.") from None


@dataclass(frozen=True, slots=True)
class Deferral:
    """How long a worker may defer sending its updates of a table.

    Args:
        consistency: of the table. With `hold` above 0, its bound is at least 1 and updates are visible on arrival.
        hold: how many clocks an update may wait; 0 to bound.

    Example:
        >>> from paceline.core.consistency import ssp
        >>> deferral = Deferral(ssp(3), hold=1)
        >>> deferral.needs(7)  # values of clock 5 contain what was made below 4 = 7 - 3
        5
        >>> deferral.contained(5)
        4
        >>> deferral.due(7)  # before clock 7 is finished, what was made at 6 or before has to go
        6
    """

    consistency: Consistency
    hold: int = 0
    _of_values: Consistency = field(init=False, repr=False)  # what values keep, so that reads keep `consistency`

    def __post_init__(self) -> None:
        """Tighten the bound by what is held."""
        consistency, bound = self.consistency, self.consistency.bound
        of_values = replace(consistency, bound=bound - self.hold) if self.hold and bound is not None else consistency
        object.__setattr__(self, "_of_values", of_values)

    def needs(self, clock: int) -> int:
        """Return the lowest value clock that a read at `clock` may have."""
        return self._of_values.needs(clock)

    def unasked(self, clock: int) -> int:
        """Return the lowest value clock of a read at `clock` that no server answers."""
        return self._of_values.unasked(clock)

    def contained(self, value_clock: int) -> int:
        """Return the clock below which values of `value_clock` contain every update."""
        return max(0, value_clock - self.hold)

    def due(self, clock: int) -> int:
        """Return the latest clock whose updates must be sent before `clock` is finished."""
        return clock - self.hold
