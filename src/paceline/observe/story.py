"""How a run ended: the verdict on its last steps, what happened in its last seconds, and what each process did last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from paceline.notices import printable
from paceline.observe.disk import look_at_disk
from paceline.observe.loss_trend import LossTrend
from paceline.observe.runs import read_records, trace_paths
from paceline.observe.screen import event_line
from paceline.observe.trace import (
    ENDED,
    OLDER,
    AppliedRecord,
    Exit,
    MinClock,
    ReadRecord,
    RowRead,
    Serving,
    State,
    Step,
)
from paceline.observe.verdict import judge
from paceline.observe.window import Window, staleness_of

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.observe.trace import TraceRecord

_MOST_EVENTS: Final = 40


def story_lines(folder: Path, seconds: float = 10.0) -> list[str]:
    """Return the end of the run in a folder, in lines; raises UsageError for no traces, or such as cannot be read."""
    by_process = {path.stem: _records(path) for path in trace_paths(folder)}
    records = sorted((record for own in by_process.values() for record in own), key=lambda record: record.t)
    if not records:
        return [f"{folder} has no records"]
    began_t, end_t = records[0].t, records[-1].t
    window, trend = Window(), LossTrend()
    for record in records:
        window.add(record)
        trend.take_in(record)
    left = window.steps.keys() <= window.gone
    window.gone.clear()  # the last steps are those of workers that have left by now, too
    exits = [record for record in records if isinstance(record, Exit)]
    ending = "all workers have left" if left else "its records end here"
    ending = f"{exits[0].name} {exits[0].happened}" if exits else ending
    num_clocks = max((steps[-1].clock + 1 for steps in window.steps.values() if steps), default=0)
    first = f"{folder.resolve().name}: {end_t - began_t:.1f} s, {num_clocks} clocks; {ending}"
    lines = [first, f"its last steps: {judge(window).text}"]
    lines += [loss.text] if (loss := trend.verdict(staleness_of(*window.staleness.values()))).text else []
    lines += _on_disk(folder)
    events = [event_line(record, began_t) for record in records if record.t >= end_t - seconds]
    events = [line for line in events if line]
    lines += [f"of its last {seconds:g} s:", *events[-_MOST_EVENTS:]] if events else []
    lines.append("what each process did at last:")
    for name, own in by_process.items():
        if own and not isinstance(own[-1], Exit):
            lines.append(_last(name, own, began_t, end_t))
    return [printable(line) for line in lines]


def _records(path: Path) -> list[TraceRecord]:
    """Return the records of a process, with those of the file before, where its trace is bounded."""
    older = path.with_name(path.name + OLDER)
    return [*(read_records(older) if older.exists() else []), *read_records(path)]


def _on_disk(folder: Path) -> list[str]:
    """Return what took the room on the disk, if records ended early for lack of it."""
    if not (folder / "trace" / ENDED).exists():
        return []
    told, disk = "records ended early, as the disk was full or a limit of files was reached", look_at_disk(folder)
    return [told if disk is None else f"{told}. Now {disk.text}"]


def _last(name: str, records: list[TraceRecord], began_t: float, end_t: float) -> str:
    last = records[-1]
    quiet_s = end_t - last.t
    told = f"{name:>10}  {last.t - began_t:8.3f} s  {_doing(records)}"
    return f"{told}; then nothing for {quiet_s:.1f} s" if quiet_s >= 1 else told


def _doing(records: list[TraceRecord]) -> str:
    """Return what the last record that says so tells of a process."""
    for record in reversed(records):
        match record:
            case Step():
                return f"finished clock {record.clock} ({1000 * record.step_s:.1f} ms, loss {record.loss})"
            case ReadRecord():
                return f"read '{record.table}' at clock {record.clock} after {1000 * record.waited_s:.1f} ms"
            case RowRead():
                return f"read rows of '{record.table}' at clock {record.clock}"
            case State():
                where = f" in {record.call}" if record.call else ""
                return f"was {record.doing}{where} in clock {record.clock} for {record.for_s:.1f} s"
            case AppliedRecord():
                return f"applied pushes of workers {', '.join(map(str, record.workers))} to '{record.table}'"
            case MinClock():
                return f"had every clock below {record.clock} of '{record.table}'"
            case Serving():
                return f"served, with {record.num_waiting} frames waiting"
            case _:
                continue
    return "has told nothing"
