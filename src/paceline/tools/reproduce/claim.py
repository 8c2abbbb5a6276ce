"""What a claim is, and what a run of it finds: checks against the paper's number, and plots to draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from paceline.tools.reproduce.programs import ProgramRuns

TimeKind = Literal["real", "virtual", "counted"]
PlotKind = Literal["lines", "bars"]


class Check(msgspec.Struct, frozen=True):
    """One number beside its anchor.

    Args:
        what: what was measured.
        expected: the anchor in words, with its limit.
        ours: what was found.
        holds: whether it is within the limit.
    """

    what: str
    expected: str
    ours: str
    holds: bool


class Curve(msgspec.Struct, frozen=True):
    """One line or group of bars. `x` are positions, or for bars the names of the bars."""

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    is_reference: bool = False  # what the paper or a formula says: drawn in grey, dashed


class Plot(msgspec.Struct, frozen=True):
    """One pair of axes of a picture."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    kind: PlotKind = "lines"
    is_log_x: bool = False
    is_log_y: bool = False
    y_range: tuple[float | None, float | None] = (None, None)


class Finding(msgspec.Struct, frozen=True):
    """What a run of a claim found.

    Args:
        checks: the claim holds if all of them do.
        plots: one or two.
        note: what the numbers rest on, and what they do not show.
        commands: other commands that the run started, as they can be typed.
    """

    checks: tuple[Check, ...]
    plots: tuple[Plot, ...]
    note: str
    commands: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Return whether every check holds."""
        return all(check.holds for check in self.checks)


class ClaimOptions(msgspec.Struct, frozen=True):
    """How to run a claim: quickly or at length, under a seed, with what the other claims have run already."""

    is_quick: bool
    seed: int
    folder: Path
    programs: ProgramRuns


class Claim(msgspec.Struct, frozen=True):
    """A headline of a paper.

    Args:
        name: its number in the list.
        title: what is claimed, in one line.
        paper: where.
        number: the paper's own number; "" where it gives none.
        anchors: names of the limits that it is judged by, A1 to A12.
        time: "real" for processes, "virtual" for the simulator, "counted" where no time matters.
        minutes: of a quick run, and of a full one, on two idle cores.
        run: finds out; None if it cannot be shown here.
        reason: why it cannot.
    """

    name: str
    title: str
    paper: str
    number: str
    time: TimeKind
    minutes: tuple[float, float]
    run: Callable[[ClaimOptions], Finding] | None
    anchors: tuple[str, ...] = ()
    reason: str = ""
