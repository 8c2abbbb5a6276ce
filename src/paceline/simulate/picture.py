"""Picture of rehearsed policies side by side: the loss, the age of values, where time went, and the use of lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

import msgspec

from paceline.observe.plots import (
    GRID,
    INK,
    LOSS_BY_CLOCK,
    LOSS_BY_TIME,
    STALENESS,
    Chart,
    Subject,
    colours,
    draw_sheet,
    quiet,
)
from paceline.observe.summary import RunSummary, WorkerSummary, curve
from paceline.simulate.outcome import Outcome
from paceline.simulate.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALE = "#d9d9d9"


def draw_outcomes(scenario: Scenario, outcomes: Sequence[Outcome]) -> bytes:
    """Return one sheet as PNG; raise UsageError when matplotlib is not installed."""
    by_label = {str(outcome.consistency): outcome for outcome in outcomes}
    subjects = [
        Subject(label, _summary(outcome), colour)
        for (label, outcome), colour in zip(by_label.items(), colours([False] * len(by_label)), strict=True)
    ]
    charts = _Charts(scenario, by_label)
    sheet = ((LOSS_BY_TIME, LOSS_BY_CLOCK), (STALENESS,), (charts.time, charts.use))
    title = f"{scenario.num_workers} workers on virtual time"
    return draw_sheet(subjects, title=title, subtitle=_subtitle(scenario), sheet=sheet)


def _subtitle(scenario: Scenario) -> str:
    stragglers, lines = scenario.stragglers, scenario.lines
    facts = [f"{scenario.num_servers} servers", f"{scenario.num_clocks} clocks", f"seed {scenario.seed}"]
    if stragglers.kind == "transient":
        facts.append(f"{stragglers.share:.0%} of the clocks take {stragglers.factor:g} times as long")
    if stragglers.kind == "persistent":
        facts.append(f"worker 0 takes {stragglers.factor:g} times as long")
    if lines.bytes_per_s < inf:
        facts.append(f"lines of {lines.bytes_per_s * 8 / 1e6:g} Mbit/s, {lines.value_bytes / 1e6:g} MB of values")
    return "   ·   ".join(facts)


def _summary(outcome: Outcome) -> RunSummary:
    """Return the numbers of a run as a report has them."""
    losses = outcome.losses
    return RunSummary(
        seconds=outcome.seconds,
        workers=tuple(
            WorkerSummary(
                own.rank, own.num_clocks, own.num_clocks, own.wait_s, own.wait_s, own.busy_s + own.load_s, 0.0
            )
            for own in outcome.workers
        ),
        differentials=outcome.differentials,
        freshest=outcome.freshest,
        num_refused=outcome.num_refused,
        num_again=None,
        num_skipped=None,
        max_lead=None,
        test_loss=None,
        test_accuracy=None,
        loss_by_time=curve([(t, loss) for t, _, loss in losses]),
        loss_by_clock=curve(sorted((clock + 1.0, loss) for _, clock, loss in losses)),
    )


class _Charts(msgspec.Struct, frozen=True):
    """The charts that only a rehearsal has."""

    scenario: Scenario
    outcomes: Mapping[str, Outcome]

    @property
    def time(self) -> Chart:
        """Where the workers' time went."""
        return Chart(
            "Where the workers' time went",
            "Coloured: computing. Grey: waiting for values. Hatched: for a batch. Right: clocks a second.",
            lambda _: True,
            lambda row, subjects: self._draw_time(row[0], subjects),
        )

    @property
    def use(self) -> Chart:
        """How busy lines and servers were."""
        return Chart(
            "How busy lines and servers were",
            "Share of the run; the busiest of its kind. A line at 100 % sets the pace.",
            lambda _: self.scenario.lines.bytes_per_s < inf or self.scenario.apply_s + self.scenario.handle_s > 0,
            lambda row, subjects: self._draw_use(row[0], subjects),
        )

    def _draw_time(self, axes: Axes, subjects: Sequence[Subject]) -> None:
        for place, subject in enumerate(subjects):
            outcome = self.outcomes[subject.label]
            computing = 1 - outcome.wait_share - outcome.load_share
            axes.barh(place, computing, color=subject.colour, height=0.66)
            axes.barh(place, outcome.wait_share, left=computing, color=_PALE, height=0.66)
            axes.barh(
                place, outcome.load_share, left=1 - outcome.load_share, color="white", edgecolor=GRID, hatch="////",
                height=0.66,
            )  # fmt: skip
            axes.text(1.01, place, f"{outcome.clocks_per_s:,.1f} /s", va="center", color=INK, fontsize=9)
        _share_axis(axes, "share of the workers' time", room=0.16)
        _name_rows(axes, subjects)

    def _draw_use(self, axes: Axes, subjects: Sequence[Subject]) -> None:
        columns = [_busy(self.outcomes[subject.label]) for subject in subjects]
        used = [name for name in columns[0] if any(column[name] for column in columns)]
        height = 0.8 / len(subjects)
        for index, (subject, column) in enumerate(zip(subjects, columns, strict=True)):
            for place, share in enumerate(column[name] for name in used):
                at = place - 0.4 + height * (index + 0.5)
                axes.barh(at, share, height=height * 0.9, color=subject.colour)
                axes.text(share + 0.01, at, f"{share:.0%}", va="center", color=INK, fontsize=7)
        _share_axis(axes, "share of the run", room=0.08)
        axes.set_yticks(range(len(used)), used)
        axes.invert_yaxis()


def _busy(outcome: Outcome) -> dict[str, float]:
    """Return the share of the time in which lines and servers were busy, by what is drawn."""
    found = {"server's thread": outcome.server_busy}
    for kind, use in outcome.uses.items():
        found[f"{kind}, sending"] = use.sending
        if kind != "data servers":
            found[f"{kind}, receiving"] = use.receiving
    return found


def _share_axis(axes: Axes, label: str, room: float) -> None:
    quiet(axes, grid="x")
    axes.set_xlim(0, 1 + room)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel(label, color=INK)


def _name_rows(axes: Axes, subjects: Sequence[Subject]) -> None:
    axes.set_yticks(range(len(subjects)), [subject.drawn for subject in subjects])
    for text, subject in zip(axes.get_yticklabels(), subjects, strict=True):
        text.set(color=subject.colour, weight="bold")
    axes.invert_yaxis()
