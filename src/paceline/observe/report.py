"""Report that compares several runs: one self-contained HTML page without scripts, and one figure."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import UsageError
from paceline.observe.plots import Subject, charts_of, colours, draw_alone, draw_sheet
from paceline.observe.summary import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from paceline.observe.runs import Run
    from paceline.observe.summary import RunSummary

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #222; font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 32px 64px; }
h1 { font-size: 32px; line-height: 1.2; margin: 0 0 12px; }
h2 { font-size: 21px; margin: 48px 0 2px; }
p { margin: 0 0 12px; max-width: 48em; }
.lead { font-size: 18px; }
.caption { color: #555; max-width: none; }
.facts { display: flex; flex-wrap: wrap; gap: 8px 36px; margin: 20px 0 24px; padding: 14px 0;
         border-top: 1px solid #ddd; border-bottom: 1px solid #ddd; }
.facts dt { color: #666; font-size: 13px; }
.facts dd { margin: 0; font-weight: 600; }
img { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 9px; border-bottom: 1px solid #e6e6e6; text-align: right; vertical-align: top; }
thead th { vertical-align: bottom; border-bottom: 2px solid #222; font-weight: 600; line-height: 1.25; }
th:first-child { text-align: left; overflow-wrap: anywhere; min-width: 8em; }
td { white-space: nowrap; }
.note { display: block; max-width: 17em; padding-left: 19px; color: #555;
        font-size: 13px; font-weight: 400; line-height: 1.35; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 8px; }
.terms { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; font-size: 14px; margin-top: 20px; }
.terms dt { font-weight: 600; }
.terms dd { margin: 0; color: #555; }
@media print {
  main { max-width: none; padding: 0; }
  section { break-inside: avoid; }
  table { font-size: 10px; }
  th, td { padding: 4px 5px; }
  .swatch { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


class Panel(msgspec.Struct, frozen=True):
    """A picture with its name and a sentence on how to read it."""

    title: str
    caption: str
    png: bytes


class PageColumn(msgspec.Struct, frozen=True):
    """A column of the table of numbers: its heading, its meaning, and its text for a run."""

    heading: str
    meaning: str
    text: Callable[[RunSummary], str]


COLUMNS = (
    PageColumn(
        "seconds",
        "from the first step's beginning to the last step's end",
        lambda run: f"{run.seconds:.1f}",
    ),
    PageColumn("clocks", "steps of one worker; the furthest worker counts", lambda run: f"{run.num_clocks:,}"),
    PageColumn("samples/s", "training examples of all workers per second", lambda run: f"{run.samples_per_s:,.0f}"),
    PageColumn(
        "communication, mean",
        "share of its time that a worker's training loop spent pushing, finishing clocks and pulling, waiting included",
        lambda run: _percent(run.comm_share_mean),
    ),
    PageColumn(
        "waiting, mean",
        "share of its time that a worker waited for others, averaged over the workers",
        lambda run: _percent(run.wait_share_mean),
    ),
    PageColumn("waiting, max", "the same for the worker that waited most", lambda run: _percent(run.wait_share_max)),
    PageColumn(
        "freshest reads",
        "reads that got the newest complete values the servers had at that moment",
        lambda run: _percent(run.freshest_share),
    ),
    PageColumn(
        "reads at\N{NO-BREAK SPACE}-1",
        "reads that had every update of all earlier clocks",
        lambda run: _percent(run.current_share),
    ),
    PageColumn(
        "oldest read",
        "by how many clocks the stalest read lagged behind its reader; ssp(s) promises at most s",
        lambda run: _count(run.max_staleness),
    ),
    PageColumn(
        "largest lead",
        "largest distance, in clocks, between two workers computing at the same time",
        lambda run: _count(run.max_lead),
    ),
    PageColumn(
        "refused",
        "pushes and steps that were not applied, as they had NaN or infinity for example",
        lambda run: f"{run.num_refused:,}",
    ),
    PageColumn(
        "read again",
        "samples that were handed out again, because the worker that had them died",
        lambda run: _count(run.num_again),
    ),
    PageColumn(
        "skipped",
        "samples that were left out, because they could not be decoded",
        lambda run: _count(run.num_skipped),
    ),
    PageColumn(
        "test loss",
        "on examples never trained on, after the last step",
        lambda run: "–" if run.test_loss is None else f"{run.test_loss:.4f}",
    ),
    PageColumn(
        "test accuracy",
        "share of examples never trained on that the model gets right",
        lambda run: "–" if run.test_accuracy is None else f"{run.test_accuracy:.2%}",
    ),
)


def render_page(
    title: str,
    facts: Mapping[str, str],
    panels: Sequence[Panel],
    subjects: Sequence[Subject],
    notes: Mapping[str, str],
) -> str:
    """Return the page as text; `notes` maps labels to remarks on runs."""
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(in_short(subjects))}</p>',
            _facts(facts),
            *map(_section, panels),
            _numbers(subjects, notes),
            _deaths(subjects),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def in_short(subjects: Sequence[Subject]) -> str:
    """Return a few sentences on speed, waiting, age of values and quality of the models."""
    parallel = [subject for subject in subjects if not subject.is_baseline]
    aged = [(s.summary.max_staleness, s.label) for s in parallel if s.summary.max_staleness is not None]
    known = [(s.summary.test_accuracy, s.label) for s in subjects if s.summary.test_accuracy is not None]
    sentences: list[str] = []
    if len(subjects) > 1:
        (low_s, first), (high_s, last) = _extremes([(s.summary.seconds, s.label) for s in subjects])
        sentences.append(f"First to finish: {first}, after {low_s:.1f} s; last: {last}, after {high_s:.1f} s.")
    if len(parallel) > 1:
        (least, eager), (most, patient) = _extremes([(s.summary.wait_share_mean, s.label) for s in parallel])
        sentences.append(f"Workers waited {most:.0%} of the time under {patient} and {least:.0%} under {eager}.")
    if len(aged) > 1:
        (newest, fresh), (oldest, stale) = _extremes(aged)
        sentences.append(f"They read values up to {oldest} clocks old under {stale}, up to {newest} under {fresh}.")
    if known:
        (low, worst), (high, best) = _extremes(known)
        sentences.append(f"Test accuracy lies between {low:.2%} ({worst}) and {high:.2%} ({best}).")
    return " ".join(sentences)


def _extremes(values: Sequence[tuple[float, str]]) -> tuple[tuple[float, str], tuple[float, str]]:
    return min(values), max(values)


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{items}</dl>' if items else ""


def _section(panel: Panel) -> str:
    return (
        f"<section>\n<h2>{escape(panel.title)}</h2>\n"
        f'<p class="caption">{escape(panel.caption)}</p>\n'
        f'<img alt="{escape(panel.title)}" src="data:image/png;base64,{b64encode(panel.png).decode()}">\n</section>'
    )


def _numbers(subjects: Sequence[Subject], notes: Mapping[str, str]) -> str:
    headings = "".join(f"<th>{escape(heading)}</th>" for heading in ["run", *(c.heading for c in COLUMNS)])
    rows = "\n".join(_row(subject, notes[subject.label]) for subject in subjects)
    terms = "".join(f"<dt>{escape(c.heading)}</dt><dd>{escape(c.meaning)}</dd>" for c in COLUMNS)
    return (
        '<section>\n<h2>All numbers</h2>\n<p class="caption">One row for each run; the words are explained below.</p>'
        f'\n<div class="wide"><table>\n<thead><tr>{headings}</tr></thead>\n'
        f'<tbody>\n{rows}\n</tbody>\n</table></div>\n<dl class="terms">{terms}</dl>\n</section>'
    )


def _deaths(subjects: Sequence[Subject]) -> str:
    """Return a list of the processes that failed or were killed; empty for none."""
    terms = "".join(
        f"<dt>{escape(subject.label)}</dt><dd>{escape(death)}</dd>"
        for subject in subjects
        for death in subject.summary.deaths
    )
    return f'<section>\n<h2>Processes that were lost</h2>\n<dl class="terms">{terms}</dl>\n</section>' if terms else ""


def _row(subject: Subject, note: str) -> str:
    swatch = f'<span class="swatch" style="background:{subject.colour}"></span>'
    remark = f'<span class="note">{escape(note)}</span>' if note else ""
    cells = "".join(f"<td>{escape(column.text(subject.summary))}</td>" for column in COLUMNS)
    return f"<tr><th>{swatch}{escape(subject.label)}{remark}</th>{cells}</tr>"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


class LabelledRun(msgspec.Struct, frozen=True):
    """A run with its label in the report, such as `ssp(3)`, and a remark."""

    label: str
    run: Run
    note: str = ""


def write_report(runs: Sequence[LabelledRun], folder: Path, *, title: str, facts: Mapping[str, str]) -> Path:
    """Write `report.html` and `report.png` into the folder and return the path of the page.

    The page contains its style and pictures and loads nothing. A run of one worker is drawn as the baseline. `facts`
    (what was trained, on what, how) are below the title. Raises UsageError without runs, for a repeated label, and
    without matplotlib.

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
