"""Report that compares several runs, as one self-contained HTML page and as one figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.observe.charts import charts_of, draw_alone, draw_sheet
from paceline.observe.page import Panel, render_page
from paceline.observe.plots import Subject, colours
from paceline.observe.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.observe.runs import Run


@dataclass(frozen=True, slots=True)
class LabelledRun:
    """A run under the name it has in the report, such as `ssp(3)`; the note says what else to know about it."""

    label: str
    run: Run
    note: str = ""


def write_report(runs: Sequence[LabelledRun], folder: Path, *, title: str, facts: Mapping[str, str]) -> Path:
    """Write `report.html` and `report.png` into the folder and return the path of the page.

    The page holds its style and pictures and asks the network for nothing. A run of one worker is drawn as the
    baseline. `facts` (what was trained, on what, how) stand under the title. Raises UsageError for no runs, for a
    label used twice, and when matplotlib is not installed.

        write_report([LabelledRun("ssp(3)", read_run(folder))], Path("out"), title="Digits", facts={"workers": "4"})
    """
    labels = [labelled.label for labelled in runs]
    if not labels or len(set(labels)) < len(labels):
        raise UsageError(f"A report needs one or more runs with different labels; got {labels or 'none'}.")
    subjects = _subjects(runs)
    panels = [Panel(chart.title, chart.caption, draw_alone(chart, subjects)) for chart in charts_of(subjects)]
    subtitle = "   ·   ".join(f"{name}: {value}" for name, value in facts.items())
    sheet = draw_sheet(subjects, title=title, subtitle=subtitle)
    notes = {labelled.label: labelled.note for labelled in runs}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.png").write_bytes(sheet)
    page = folder / "report.html"
    page.write_text(render_page(title, facts, panels, subjects, notes), encoding="utf-8")
    return page


def _subjects(runs: Sequence[LabelledRun]) -> list[Subject]:
    summaries = [summarize(labelled.run) for labelled in runs]
    palette = colours([len(summary.workers) == 1 for summary in summaries])
    return [
        Subject(labelled.label, summary, colour)
        for labelled, summary, colour in zip(runs, summaries, palette, strict=True)
    ]
