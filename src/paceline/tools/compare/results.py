"""Results of a comparison: read from the traces of its runs, and shown as a table, as JSON and as a figure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec

from paceline.observe.averages import mean
from paceline.observe.plots import (
    DPI,
    FAINT,
    INK,
    Subject,
    colours,
    draw_curves,
    draw_loss_by_time,
    entitle,
    name_ends,
    new_figure,
    plain,
    quiet,
)
from paceline.observe.summary import curve, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.table import Table

    from paceline.observe.runs import Run
    from paceline.observe.summary import CurvePoint, RunSummary
    from paceline.observe.trace import Resources, Step
    from paceline.tools.compare.runs import ComparedEntry, RunEnded

# The final loss is the mean over this share of the clocks: the loss of a single one is noisy.
_END: Final = 0.1


class RunTraffic(msgspec.Struct, frozen=True):
    """Bytes on TCP connections, the mean for a worker and step, with the transfer of the first values."""

    sent_bytes: float
    received_bytes: float


class Result(msgspec.Struct, frozen=True):
    """Results of a run; None where it was not measured.

    Args:
        entry: the strategy that was run.
        summary: summary of its traces.
        num_samples: number of samples trained on; samples that the ranks of a replica share count once.
        final_loss: mean training loss of the last tenth of the clocks that have one, over all workers.
        held_out_loss: last loss on held-out data that the script reported.
        loss_by_samples: training loss by number of samples.
        traffic: bytes between processes.
        peak_bytes: largest peak memory of a worker's process.
    """

    entry: ComparedEntry
    summary: RunSummary
    num_samples: float
    final_loss: float | None
    held_out_loss: float | None
    loss_by_samples: tuple[CurvePoint, ...]
    traffic: RunTraffic | None
    peak_bytes: int | None

    @property
    def label(self) -> str:
        """Name in tables and figures."""
        return str(self.entry)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of training."""
        return self.num_samples / self.summary.seconds if self.summary.seconds else 0.0


def read_result(entry: ComparedEntry, run: Run) -> Result:
    """Return the results of a run."""
    summary = summarize(run)
    return Result(
        entry=entry,
        summary=summary,
        num_samples=sum(step.samples for step in run.steps) / entry.ranks_per_replica,
        final_loss=_final_loss(run.steps),
        held_out_loss=summary.test_loss,
        loss_by_samples=_loss_by_samples(run.steps, entry.ranks_per_replica),
        traffic=_traffic(run.resources, summary.num_clocks),
        peak_bytes=max((used.peak_bytes for used in run.resources), default=None),
    )


def _final_loss(steps: Sequence[Step]) -> float | None:
    of_clocks = [losses for of_clock in _by_clock(steps) if (losses := _losses(of_clock))]
    last = of_clocks[-max(1, round(_END * len(of_clocks))) :]
    return mean(loss for losses in last for loss in losses) if last else None


def _loss_by_samples(steps: Sequence[Step], ranks_per_replica: int) -> tuple[CurvePoint, ...]:
    """Return the mean loss of the workers of each clock by the number of samples of all replicas."""
    num_samples = 0.0
    points: list[tuple[float, float]] = []
    for of_clock in _by_clock(steps):
        num_samples += sum(step.samples for step in of_clock) / ranks_per_replica
        if losses := _losses(of_clock):
            points.append((num_samples, mean(losses)))
    return curve(points)


def _by_clock(steps: Sequence[Step]) -> list[list[Step]]:
    """Return the steps of all workers, clock by clock."""
    by_clock: dict[int, list[Step]] = {}
    for step in steps:
        by_clock.setdefault(step.clock, []).append(step)
    return [of_clock for _, of_clock in sorted(by_clock.items())]


def _losses(of_clock: Sequence[Step]) -> list[float]:
    return [step.loss for step in of_clock if step.loss is not None]


def _traffic(resources: Sequence[Resources], num_steps: int) -> RunTraffic | None:
    if not resources or not num_steps:
        return None
    return RunTraffic(
        fmean(used.sent_bytes for used in resources) / num_steps,
        fmean(used.received_bytes for used in resources) / num_steps,
    )


_MEGA = 1e6
_UNITS = ((1e9, "GB"), (_MEGA, "MB"), (1e3, "KB"))


def comparison_table(outcomes: Sequence[Result | RunEnded]) -> Table:
    """Return a table with one line for each strategy, in the order of the runs."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("strategy@workers", no_wrap=True)
    for heading in ("loss", "held out", "seconds", "samples/s", "sent, received a step", "peak memory"):
        table.add_column(heading, justify="right", header_style="dim", no_wrap=True)
    for outcome in outcomes:
        if isinstance(outcome, Result):
            table.add_row(outcome.label, *_cells(outcome))
        else:
            table.add_row(str(outcome.entry), "failed")
    return table


def _cells(result: Result) -> list[str]:
    traffic = result.traffic
    return [
        _loss(result.final_loss),
        _loss(result.held_out_loss),
        f"{result.summary.seconds:.1f}",
        f"{result.samples_per_s:,.0f}" if result.samples_per_s else "-",
        "-" if traffic is None else f"{in_bytes(traffic.sent_bytes)}, {in_bytes(traffic.received_bytes)}",
        "-" if result.peak_bytes is None else in_bytes(result.peak_bytes),
    ]


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def in_bytes(size_bytes: float) -> str:
    """Return a size in the unit that suits it, with up to three digits.

    >>> in_bytes(3_456_000), in_bytes(345_600_000), in_bytes(1_200), in_bytes(96), in_bytes(1_500_000_000)
    ('3.5 MB', '346 MB', '1.2 KB', '96 B', '1.5 GB')
    """
    unit, name = next((pair for pair in _UNITS if size_bytes >= pair[0]), (1.0, "B"))
    size = size_bytes / unit
    return f"{size:.{0 if size >= 100 or unit == 1.0 else 1}f} {name}"


def comparison_json(outcomes: Sequence[Result | RunEnded]) -> dict[str, dict[str, object]]:
    """Return the results by strategy, with all digits."""
    return {
        str(outcome.entry): _numbers(outcome) if isinstance(outcome, Result) else {"failed": outcome.failure_reason}
        for outcome in outcomes
    }


def _numbers(result: Result) -> dict[str, object]:
    traffic = result.traffic
    return {
        "workers": result.entry.num_workers,
        "final_loss": result.final_loss,
        "held_out_loss": result.held_out_loss,
        "seconds": result.summary.seconds,
        "samples": result.num_samples,
        "samples_per_s": result.samples_per_s,
        "steps": result.summary.num_clocks,
        "sent_bytes_per_worker_and_step": None if traffic is None else traffic.sent_bytes,
        "received_bytes_per_worker_and_step": None if traffic is None else traffic.received_bytes,
        "peak_bytes": result.peak_bytes,
    }


WIDTH_IN, HEIGHT_IN = 13.0, 9.0
_ROOM = 1.22  # for the numbers behind the bars
_PALE = 0.45

# A run with its colour, and what a bar is divided into.
Bars = Callable[[Result], "Sequence[float]"]


def draw_comparison(results: Sequence[Result], path: Path, title: str, note: str) -> None:
    """Draw all results into one picture and write it as PNG; without results nothing is written.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if not results:
        return
    figure = new_figure(WIDTH_IN, HEIGHT_IN)
    subjects = _subjects(results)
    by_time, by_samples, traffic, memory = figure.subplots(2, 2).flat
    entitle(by_time, "Loss against time")
    draw_loss_by_time(by_time, [subject for subject in subjects if subject.summary.loss_by_time])
    entitle(by_samples, "Loss against samples")
    _draw_loss_by_samples(by_samples, results, subjects)
    entitle(traffic, "Sent (dark) and received (pale), a worker and step")
    _draw_bars(traffic, results, subjects, _traffic_of)
    entitle(memory, "Peak memory of a worker")
    _draw_bars(memory, results, subjects, _memory_of)
    figure.suptitle(plain(title, 80), x=0.012, ha="left", fontsize=16, weight="bold", color=INK)
    figure.supxlabel(plain(note, 200), x=0.012, ha="left", fontsize=9, color=FAINT)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def _subjects(results: Sequence[Result]) -> list[Subject]:
    palette = colours([result.entry.num_workers == 1 for result in results])
    return [Subject(result.label, result.summary, colour) for result, colour in zip(results, palette, strict=True)]


def _draw_loss_by_samples(axes: Axes, results: Sequence[Result], subjects: Sequence[Subject]) -> None:
    learned = [(result, subject) for result, subject in zip(results, subjects, strict=True) if result.loss_by_samples]
    draw_curves(axes, [(subject, result.loss_by_samples) for result, subject in learned])
    name_ends(axes, [(subject, f"{result.final_loss:.3f}") for result, subject in learned])
    axes.set_xlabel("samples of all workers", color=INK)


def _traffic_of(result: Result) -> tuple[float, ...]:
    return () if result.traffic is None else (result.traffic.sent_bytes, result.traffic.received_bytes)


def _memory_of(result: Result) -> tuple[float, ...]:
    return () if result.peak_bytes is None else (result.peak_bytes,)


def _draw_bars(axes: Axes, results: Sequence[Result], subjects: Sequence[Subject], parts_of: Bars) -> None:
    """Draw a bar for each run, its parts one behind the other, and write the sum behind it."""
    quiet(axes, grid="x")
    for place, (result, subject) in enumerate(zip(results, subjects, strict=True)):
        left_mb, parts = 0.0, parts_of(result)
        for part, alpha in zip(parts, (1.0, _PALE), strict=False):
            axes.barh([place], [part / _MEGA], left=left_mb, height=0.66, color=subject.colour, alpha=alpha)
            left_mb += part / _MEGA
        text = in_bytes(sum(parts)) if parts else "not known"
        axes.annotate(
            text, (left_mb, place), xytext=(5, 0), textcoords="offset points", va="center", color=INK, fontsize=9
        )
    axes.set_yticks(range(len(subjects)), [subject.drawn for subject in subjects])
    for text, subject in zip(axes.get_yticklabels(), subjects, strict=True):
        text.set(color=subject.colour, weight="bold")
    axes.set_ylim(len(subjects) - 0.5, -0.5)
    axes.set_xlim(0, _ROOM * max(sum(parts_of(result)) for result in results) / _MEGA or 1.0)
    axes.set_xlabel("MB", color=INK)
