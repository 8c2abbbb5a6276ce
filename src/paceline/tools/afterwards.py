"""`paceline report` and `paceline trace`: what a run did, afterwards. Light, as `run` is."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.observe.runs import Run

LAST_S: Final = 10.0  # of a story


def report(
    *runs: Path,
    to: Path = Path("report"),
    last: Annotated[bool, Parameter(negative="")] = False,
    seconds: float = LAST_S,
) -> None:
    """Draw what runs did: losses, staleness, waiting; several runs are compared, to the bit. Or tell how one ended.

    Parameters
    ----------
    runs
        Folders of runs (--run-dir of paceline run); without one, the last run on this machine that was kept.
    to
        Folder for report.html and report.png.
    last
        Draw nothing; print what each process did last and the messages about it, line by line.
    seconds
        How many seconds of the end --last covers.
    """
    from paceline.launch.running import last_run

    if not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}, expected more than 0")
    folders = list(runs) or [last_run()]
    if last:
        for folder in folders:
            _tell_end(folder, seconds)
        return
    from paceline.observe.report import LabelledRun, write_report
    from paceline.observe.runs import read_run

    labels = labels_of(folders)
    read = [LabelledRun(label, read_run(folder)) for label, folder in zip(labels, folders, strict=True)]
    try:
        page = write_report(read, to, title=_title(labels), facts=_facts([each.run for each in read]))
    except OSError as error:
        raise UsageError(f"cannot write the report to {to}: {error.strerror}; name another --to") from error
    sys.stdout.write(f"paceline: {page} and {page.with_suffix('.png')}\n")
    for label, folder in zip(labels[1:], folders[1:], strict=True):
        sys.stdout.write(f"paceline: {labels[0]} and {label}: {_compared(folders[0], folder)}\n")


def trace(run: Path | None = None, /, *, to: Path = Path("trace.json")) -> None:
    """Write the timeline of a run for ui.perfetto.dev: a track for each process, and the path of each push.

    Parameters
    ----------
    run
        Folder of the run; by default the last one on this machine that was kept.
    to
        The file.
    """
    import msgspec

    from paceline.launch.running import last_run
    from paceline.observe.perfetto import trace_events
    from paceline.observe.runs import read_run

    events = trace_events(read_run(last_run() if run is None else run))
    try:
        to.write_bytes(msgspec.json.encode(events))
    except OSError as error:
        raise UsageError(f"cannot write {to}: {error.strerror}; name another --to") from error
    sys.stdout.write(f"paceline: {to}: open it at https://ui.perfetto.dev, which keeps it in your browser\n")


def _compared(ours: Path, theirs: Path) -> str:
    """Return whether two runs are equal."""
    from paceline.observe.equality import LossComparison

    comparison = LossComparison(ours, theirs)
    while comparison.advance():
        pass
    return comparison.text()


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return different names of runs: those of their folders, or their paths."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _title(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{len(labels)} runs"


def _facts(runs: "list[Run]") -> dict[str, str]:
    workers = [len({step.worker for step in run.steps}) for run in runs]
    servers = [len({record.server for record in run.min_clocks}) for run in runs]
    return {"workers": ", ".join(map(str, workers)), "servers": ", ".join(map(str, servers))}


def _tell_end(folder: Path, seconds: float) -> None:
    from paceline.observe.story import story_lines

    sys.stdout.write("\n".join(story_lines(folder, seconds)) + "\n")
