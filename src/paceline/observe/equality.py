"""Whether two runs did the same: what their workers reported, clock by clock, without keeping it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from paceline.observe.runs import TraceFollower
from paceline.observe.trace import Evaluated, Reported, ReportedValues, Step

if TYPE_CHECKING:
    from pathlib import Path

_PIECE_BYTES: Final = 1 << 18
_MOST_PIECES: Final = 64  # that are read in one call of `advance`
_LOSSES: Final = "losses that one run lacks"
_EVALUATIONS: Final = "evaluations that one run lacks"
_NOT_FINITE: Final = "evaluations that are not finite"
_OTHERS: Final = "values of other names"


@dataclass(slots=True)
class _ReportedInClock:
    """What a worker reported in one clock, and the step that finished it; None while it is open."""

    step: Step | None = None
    losses: list[Reported] = field(default_factory=list[Reported])
    evaluations: list[Evaluated] = field(default_factory=list[Evaluated])
    has_others: bool = False


@dataclass(slots=True)
class _Clocks:
    """The clocks of one worker of a run, read as they are asked for."""

    follower: TraceFollower
    waiting: deque[_ReportedInClock] = field(default_factory=deque[_ReportedInClock])  # that are finished
    _open: _ReportedInClock = field(default_factory=_ReportedInClock)

    @classmethod
    def of(cls, folder: Path, name: str) -> _Clocks:
        return cls(TraceFollower(folder / "trace", (name,), piece_bytes=_PIECE_BYTES))

    @property
    def next(self) -> _ReportedInClock:
        """The clock that follows those that were compared."""
        return self.waiting[0] if self.waiting else self._open

    def read(self) -> bool:
        """Read a piece if no clock is waiting; return whether one is now, or may be in the next piece."""
        if not self.waiting:
            for record in self.follower.poll():
                self._add(record)
        return bool(self.waiting) or self.follower.is_behind

    def _add(self, record: object) -> None:
        match record:
            case Step():
                self._open.step = record
                self.waiting.append(self._open)
                self._open = _ReportedInClock()
            case Reported():
                self._open.losses.append(record)
            case Evaluated():
                self._open.evaluations.append(record)
            case ReportedValues():
                self._open.has_others = True
            case _:
                pass


@dataclass(slots=True)
class _Equality:
    """What was compared of one worker: how much was equal, what was different, and what only one run has."""

    num_losses: int = 0
    num_evaluations: int = 0
    difference: str = ""
    left_out: set[str] = field(default_factory=set[str])

    def copy(self) -> _Equality:
        return _Equality(self.num_losses, self.num_evaluations, self.difference, set(self.left_out))

    def add_clock(self, ours: _ReportedInClock, theirs: _ReportedInClock) -> None:
        """Compare a clock of both runs, as far as both have come in it."""
        self._add_losses(ours.losses, theirs.losses)
        self._add_evaluations(ours.evaluations, theirs.evaluations)
        if ours.step is not None and theirs.step is not None:
            self._add_steps(ours.step, theirs.step)
        if ours.has_others or theirs.has_others:
            self.left_out.add(_OTHERS)

    def _add_losses(self, ours: list[Reported], theirs: list[Reported]) -> None:
        for one, other in zip(ours, theirs, strict=False):
            if (one.loss, one.text) != (other.loss, other.text):
                self._note_difference(one, f"a loss of {_number(one)}", f"a loss of {_number(other)}")
            self.num_losses += not self.difference
        if len(ours) != len(theirs):
            self.left_out.add(_LOSSES)

    def _add_evaluations(self, ours: list[Evaluated], theirs: list[Evaluated]) -> None:
        for one, other in zip(ours, theirs, strict=False):
            if (one.loss, one.accuracy) != (other.loss, other.accuracy):
                self._note_difference(one, _measured(one), _measured(other))
            if None in (one.loss, one.accuracy):
                self.left_out.add(_NOT_FINITE)
            else:
                self.num_evaluations += not self.difference
        if len(ours) != len(theirs):
            self.left_out.add(_EVALUATIONS)

    def _add_steps(self, ours: Step, theirs: Step) -> None:
        if ours.clock != theirs.clock:
            self.difference = self.difference or (
                f"worker {ours.worker} finished clock {ours.clock}, and the other's clock {theirs.clock}"
            )
        elif ours.loss != theirs.loss or ours.samples != theirs.samples:
            self._note_difference(ours, _trained(ours), _trained(theirs))
        elif ours.loss is not None:
            self.num_losses += not self.difference

    def _note_difference(self, record: Step | Reported | Evaluated, ours: str, theirs: str) -> None:
        """Note the difference if it is the first."""
        self.difference = self.difference or (
            f"worker {record.worker} has {ours} in clock {record.clock}, and the other's {theirs}"
        )


def _number(reported: Reported) -> str:
    return reported.text or repr(reported.loss)


def _trained(step: Step) -> str:
    return f"a loss of {step.loss!r} over {step.samples} samples"


def _measured(evaluated: Evaluated) -> str:
    return f"an evaluation with loss {evaluated.loss!r} and accuracy {evaluated.accuracy!r}"


@dataclass(slots=True)
class _Pair:
    """One worker in both runs."""

    name: str
    ours: _Clocks
    theirs: _Clocks
    finished: _Equality = field(default_factory=_Equality)  # of the clocks that both have finished

    def advance(self) -> bool:
        """Compare some pieces; return whether there is more to compare already."""
        for _ in range(_MOST_PIECES):
            both = self.ours.read(), self.theirs.read()
            while self.ours.waiting and self.theirs.waiting and not self.finished.difference:
                self.finished.add_clock(self.ours.waiting.popleft(), self.theirs.waiting.popleft())
            if self.finished.difference or not all(both):
                return False
        return True

    @property
    def is_one_sided(self) -> bool:
        """Whether one run has finished more clocks than the other."""
        return bool(self.ours.waiting) != bool(self.theirs.waiting)

    def so_far(self) -> _Equality:
        """Return what was compared, with the clock that not both have finished, as the last one of a run is."""
        found = self.finished.copy()
        if not found.difference:
            found.add_clock(self.ours.next, self.theirs.next)
        return found


def _count(number: int, one: str) -> str:
    return f"{number:,} {one}{'' if number == 1 else 'es' if one.endswith('s') else 's'}"


class LossComparison:
    """Compares losses and evaluations of two runs worker by worker, step by step, bit by bit, as far as both have come.

    Equal losses at every step are what equal values, samples and order of updates make: any bit of a parameter that
    differs shows in the losses soon after. What was computed after the last loss or evaluation is not seen.

        comparison = LossComparison(Path("runs/a"), Path("runs/b"))
        comparison.advance()
        comparison.text()  # 'equal: 600 losses of 3 workers, bit by bit'
    """

    def __init__(self, ours: Path, theirs: Path) -> None:
        """Have compared nothing yet."""
        self._folders = ours, theirs
        self._pairs: dict[str, _Pair] = {}

    def advance(self) -> bool:
        """Compare what both have told by now, or a part of it if that is much; return whether there is more.

        Raises:
            UsageError: a file is not a trace.
        """
        names = {path.name for folder in self._folders for path in (folder / "trace").glob("worker-*.jsonl")}
        for name in sorted(names - self._pairs.keys()):
            ours, theirs = (_Clocks.of(folder, name) for folder in self._folders)
            self._pairs[name] = _Pair(name, ours, theirs)
        left = [pair for pair in self._pairs.values() if pair.advance()]
        return bool(left)

    def text(self) -> str:
        """Return the answer so far, in a sentence."""
        found = {pair.name: pair.so_far() for pair in self._pairs.values()}
        num_losses = sum(each.num_losses for each in found.values())
        num_evaluations = sum(each.num_evaluations for each in found.values())
        equal = _count(num_losses, "loss")
        if num_evaluations:
            equal = f"{equal} and {_count(num_evaluations, 'evaluation')}"
        different = next((each.difference for each in found.values() if each.difference), "")
        if different:
            return f"not equal: {different}; {equal} before"
        if not num_losses and not num_evaluations:
            return "not comparable: no step of both has a loss"
        workers = _count(sum(each.num_losses + each.num_evaluations > 0 for each in found.values()), "worker")
        is_one_sided = any(pair.is_one_sided for pair in self._pairs.values())
        more = "; one run has more steps" if is_one_sided else ""
        left_out = sorted({what for each in found.values() for what in each.left_out})
        if left_out:
            more = f"{more}; not compared: {', '.join(left_out)}"
        return f"equal{' so far' if is_one_sided else ''}: {equal} of {workers}, bit by bit{more}"
