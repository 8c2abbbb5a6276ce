"""Whether two runs did the same: the losses of their workers, clock by clock, without keeping them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from paceline.observe.runs import TraceFollower
from paceline.observe.trace import Step

if TYPE_CHECKING:
    from pathlib import Path

_PIECE_BYTES: Final = 1 << 18
_MOST_PIECES: Final = 64  # that are read in one call of `advance`


@dataclass(slots=True)
class _Steps:
    """The steps of one worker of a run, read as they are asked for."""

    follower: TraceFollower
    waiting: deque[Step] = field(default_factory=deque[Step])

    @classmethod
    def of(cls, folder: Path, name: str) -> _Steps:
        return cls(TraceFollower(folder / "trace", (name,), piece_bytes=_PIECE_BYTES))

    def read(self) -> bool:
        """Read a piece if no step is waiting; return whether one is now, or may be in the next piece."""
        if not self.waiting:
            self.waiting.extend(record for record in self.follower.poll() if isinstance(record, Step))
        return bool(self.waiting) or self.follower.is_behind


@dataclass(slots=True)
class _Pair:
    """One worker in both runs."""

    name: str
    ours: _Steps
    theirs: _Steps
    num_equal: int = 0
    difference: str = ""

    def advance(self) -> bool:
        """Compare some pieces; return whether there is more to compare already."""
        for _ in range(_MOST_PIECES):
            both = self.ours.read(), self.theirs.read()
            while self.ours.waiting and self.theirs.waiting and not self.difference:
                self._compare(self.ours.waiting.popleft(), self.theirs.waiting.popleft())
            if self.difference or not all(both):
                return False
        return True

    def _compare(self, ours: Step, theirs: Step) -> None:
        worker = f"worker {ours.worker}"
        if ours.clock != theirs.clock:
            self.difference = f"{worker} finished clock {ours.clock}, and the other's clock {theirs.clock}"
        elif ours.loss != theirs.loss or ours.samples != theirs.samples:
            self.difference = f"{worker} has {_told(ours)} in clock {ours.clock}, and the other's {_told(theirs)}"
        else:
            self.num_equal += ours.loss is not None


def _told(step: Step) -> str:
    return f"a loss of {step.loss!r} over {step.samples} samples"


class LossComparison:
    """Compares two runs worker by worker, step by step, bit by bit, as far as both have come.

    Equal losses at every step are what equal values, samples and order of updates make: any bit of a parameter that
    differs shows in the losses soon after. What was computed after the last loss is not seen.

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
            ours, theirs = (_Steps.of(folder, name) for folder in self._folders)
            self._pairs[name] = _Pair(name, ours, theirs)
        left = [pair for pair in self._pairs.values() if pair.advance()]
        return bool(left)

    def text(self) -> str:
        """Return the answer so far, in a sentence."""
        different = next((pair.difference for pair in self._pairs.values() if pair.difference), "")
        num_equal = sum(pair.num_equal for pair in self._pairs.values())
        losses = f"{num_equal:,} loss{'' if num_equal == 1 else 'es'}"
        num_workers = sum(pair.num_equal > 0 for pair in self._pairs.values())
        workers = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
        if different:
            return f"not equal: {different}; {losses} before"
        one_sided = [pair for pair in self._pairs.values() if bool(pair.ours.waiting) != bool(pair.theirs.waiting)]
        if one_sided:
            return f"equal so far: {losses} of {workers}, bit by bit; one run has more steps"
        if not num_equal:
            return "not comparable: no step of both has a loss"
        return f"equal: {losses} of {workers}, bit by bit"
