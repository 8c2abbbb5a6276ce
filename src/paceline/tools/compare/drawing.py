"""Figure of a comparison: loss against time and against samples, bytes and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.observe.plots import (
    DPI,
    FAINT,
    INK,
    Subject,
    colours,
    draw_curves,
    draw_loss_by_time,
    name_ends,
    new_figure,
    plain,
    quiet,
)
from paceline.tools.compare.results import Result, megabytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN = 13.0, 9.0
_MEGA = 1e6
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
    _entitle(by_time, "Loss against time")
    draw_loss_by_time(by_time, [subject for subject in subjects if subject.summary.loss_by_time])
    _entitle(by_samples, "Loss against samples")
    _draw_loss_by_samples(by_samples, results, subjects)
    _entitle(traffic, "Sent (dark) and received (pale), a worker and step")
    _draw_bars(traffic, results, subjects, _traffic_of)
    _entitle(memory, "Peak memory of a worker")
    _draw_bars(memory, results, subjects, _memory_of)
    figure.suptitle(plain(title, 80), x=0.012, ha="left", fontsize=16, weight="bold", color=INK)
    figure.supxlabel(plain(note, 200), x=0.012, ha="left", fontsize=9, color=FAINT)
    figure.savefig(path, format="png", dpi=DPI, facecolor="white")


def _subjects(results: Sequence[Result]) -> list[Subject]:
    palette = colours([result.entry.num_workers == 1 for result in results])
    return [Subject(result.label, result.summary, colour) for result, colour in zip(results, palette, strict=True)]


def _entitle(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, weight="bold", color=INK)


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
        text = megabytes(sum(parts)) if parts else "not known"
        axes.annotate(
            text, (left_mb, place), xytext=(5, 0), textcoords="offset points", va="center", color=INK, fontsize=9
        )
    axes.set_yticks(range(len(subjects)), [subject.drawn for subject in subjects])
    for text, subject in zip(axes.get_yticklabels(), subjects, strict=True):
        text.set(color=subject.colour, weight="bold")
    axes.set_ylim(len(subjects) - 0.5, -0.5)
    axes.set_xlim(0, _ROOM * max(sum(parts_of(result)) for result in results) / _MEGA or 1.0)
    axes.set_xlabel("MB", color=INK)
