"""What a run does at a moment, as lines for a terminal of any width, and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from paceline.notices import printable
from paceline.observe.loss_trend import UNKNOWN
from paceline.observe.trace import BoundRecord, Exit, MembershipRecord, Refusal
from paceline.observe.verdict import HEALTHY, busy_share
from paceline.observe.window import latest_life, staleness_of, worker_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.observe.loss_trend import LossVerdict
    from paceline.observe.trace import TraceRecord
    from paceline.observe.verdict import ProcessState, RunVerdict
    from paceline.observe.window import Window, WorkerTime

LEAST_WIDTH: Final = 60
LEAST_HEIGHT: Final = 12
_HEIGHT_FOR_LOSS: Final = 16  # below it, workers and servers are more
_NUM_EVENTS: Final = 5
_NAME_LENGTH: Final = 14
_HEADING: Final = (
    f"{'w':>2} {'clock':>7} {'lead':>5} {'loss':>7} {'samples/s':>9} {'step':>7} {'comp':>4} {'data':>4} {'wait':>4} "
    f"{'for':>3} {'wire':>4} {'stale':>5} {'mem':>5}"
)
_SERVER_HEADING: Final = (
    f"{'s':>2} {'busy':>5} {'apply':>7} {'queue':>5} {'lag':>3} {'in/s':>8} {'out/s':>8} {'mem':>5} {'lives':>5}  "
    "table, hot row"
)


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker as displayed. `clock` is the number of finished clocks, `lead` is counted from the slowest that runs.

    `num_refused` is the number of its pushes and steps that were not applied. `state` is empty while it computes. A
    dead worker has no lead.
    """

    worker: int
    clock: int
    loss: float | None
    samples_per_s: float
    lead: int | None
    comm_share: float  # contains the waiting
    wait_share: float
    num_refused: int = 0
    state: str = ""
    counts_samples: bool = True  # or its script has none that are counted


class ServerRow(msgspec.Struct, frozen=True):
    """One server as displayed; None is not known yet.

    Args:
        server: its rank.
        busy: share of the time in which its thread works.
        apply_s: mean seconds of an update.
        num_waiting: frames that wait for its thread.
        num_behind: clocks by which its replica lags; None without a replica.
        received_per_s: bytes that come.
        sent_per_s: bytes that it sends.
        table: whose updates take most of its time.
        hot_row: id of the row that is in most pushes, and its share of them.
        num_lives: processes that have been this server.
    """

    server: int
    busy: float | None
    apply_s: float | None
    num_waiting: int
    num_behind: int | None
    received_per_s: float
    sent_per_s: float
    table: str
    hot_row: tuple[int, float] | None
    num_lives: int


class RunPicture(msgspec.Struct, frozen=True):
    """A run at a moment.

    Args:
        elapsed_s: for how long it is looked at.
        verdict: what holds it up.
        workers: its workers by rank.
        times: where the time of their steps goes.
        staleness: median and 99th percentile of how many clocks old their latest reads were.
        processes: what the kernel says of processes on this machine, by role and rank.
        servers: its servers by rank.
        events: the latest ones, the newest last.
        loss: how the loss goes, and on how old values.
    """

    elapsed_s: float
    verdict: RunVerdict = HEALTHY
    workers: Sequence[WorkerRow] = ()
    times: Mapping[int, WorkerTime] = msgspec.field(default_factory=dict[int, "WorkerTime"])
    staleness: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict[int, tuple[int, int]])
    processes: Mapping[tuple[str, int], ProcessState] = msgspec.field(
        default_factory=dict[tuple[str, int], "ProcessState"]
    )
    servers: Sequence[ServerRow] = ()
    events: Sequence[str] = ()
    loss: LossVerdict = UNKNOWN


def picture(
    elapsed_s: float,
    verdict: RunVerdict,
    workers: Sequence[WorkerRow],
    window: Window,
    processes: Mapping[tuple[str, int], ProcessState],
    events: Sequence[str],
    times: Mapping[int, WorkerTime] | None = None,
    loss: LossVerdict = UNKNOWN,
) -> RunPicture:
    """Return the picture of a run from its latest records; `times` are those of the window, if known already."""
    staleness = {worker: found for worker, seen in window.staleness.items() if (found := staleness_of(seen))}
    servers = [server_row(server, window) for server in sorted(window.serving)]
    times = worker_times(window) if times is None else times
    return RunPicture(elapsed_s, verdict, workers, times, staleness, processes, servers, events, loss)


def server_row(server: int, window: Window) -> ServerRow:
    """Return what a server does, by its latest records."""
    serving, applied = latest_life(window.serving[server]), window.applied[server]
    first, last = serving[0], serving[-1]
    passed_s = last.t - first.t or 1.0
    by_table: dict[str, float] = {}
    for record in applied:
        by_table[record.table] = by_table.get(record.table, 0.0) + record.took_s
    hot = next(((row, share) for _, row, share in last.hot_rows), None)
    return ServerRow(
        server,
        busy_share(serving),
        sum(record.took_s for record in applied) / len(applied) if applied else None,
        last.num_waiting,
        last.num_behind,
        (last.received_bytes - first.received_bytes) / passed_s,
        (last.sent_bytes - first.sent_bytes) / passed_s,
        max(by_table, key=lambda table: by_table[table]) if by_table else "",
        hot,
        max(1, len({sample.pid for sample in window.sampled["server", server]})),
    )


def event_line(record: TraceRecord, began_t: float) -> str:
    """Return a line on an event that a user wants to know of; an empty one for other records."""
    text = event_text(record)
    return f"{max(0.0, record.t - began_t):7.1f} s  {text}" if text else ""


def event_text(record: TraceRecord) -> str:
    """Return what an event says that a user wants to know of; an empty text for other records."""
    match record:
        case MembershipRecord(server=0):
            return f"worker {record.worker} {record.event}"
        case BoundRecord(server=0):
            return (
                f"table '{record.table}': the bound moves from {record.before} to {record.bound}; workers waited "
                f"{record.waiting:.0%} of the time, on values {record.staleness:.1f} clocks behind"
            )
        case Exit():
            return f"{record.name} {record.happened}; {record.then}"
        case Refusal(server=-1):
            return f"worker {record.worker}: refused: {record.reason}"
        case _:
            return ""


# -- as lines ----------------------------------------------------------------------------------------------------------


def screen_lines(shown: RunPicture, width: int = 80, height: int = 24) -> list[str]:
    """Return at most `height` lines of `width` characters: the verdicts, workers, servers and the last events."""
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    first = _wrapped(f"{shown.elapsed_s:.0f} s  {shown.verdict.text}", width)
    if shown.loss.text and height >= _HEIGHT_FOR_LOSS:
        first += _wrapped(f"   {shown.loss.text}", width)
    servers = [_SERVER_HEADING, *(_server_line(shown, row) for row in shown.servers)] if shown.servers else []
    events = [f"   {line}" for line in shown.events[-_NUM_EVENTS:]]
    servers = servers[: max(2, height // 3)]
    room = height - len(first) - 1 - len(servers) - min(len(events), 2)
    workers = _worker_lines(shown, max(2, room))
    lines = [*first, _HEADING, *workers, *servers]
    lines += events[len(events) - min(len(events), max(0, height - len(lines))) :]
    return [printable(line[:width].rstrip()) for line in lines[:height]]


def _wrapped(text: str, width: int) -> list[str]:
    """Return a sentence on one line or two."""
    if len(text) <= width:
        return [text]
    at = text.rfind(" ", 0, width)
    at = at if at > width // 2 else width
    return [text[:at], f"   {text[at:].strip()}"]


def _worker_lines(shown: RunPicture, room: int) -> list[str]:
    """Return a line for each worker, or for those that say most if there is not enough room."""
    rows = list(shown.workers)
    left_out = len(rows) - room + 1 if len(rows) > room else 0
    if left_out:
        rows.sort(
            key=lambda row: (not row.state, f"worker {row.worker}" != shown.verdict.subject, -_work_s(shown, row))
        )
        rows = sorted(rows[: len(rows) - left_out], key=lambda row: row.worker)
    lines = [_worker_line(shown, row) for row in rows]
    return [*lines, f"   and {left_out} workers more, which are faster"] if left_out else lines


def _work_s(shown: RunPicture, row: WorkerRow) -> float:
    return shown.times[row.worker].working_s if row.worker in shown.times else 0.0


def _worker_line(shown: RunPicture, row: WorkerRow) -> str:
    lead = "-" if row.lead is None else f"+{row.lead}"
    loss = "-" if row.loss is None else f"{row.loss:.4f}"[:7]
    rate = f"{row.samples_per_s:,.0f}" if row.counts_samples else "-"
    line = f"{row.worker:>2} {row.clock:>7} {lead:>5} {loss:>7} {rate:>9}"
    if row.num_refused:
        line += f" {row.num_refused} refused"
    time = shown.times.get(row.worker)
    if row.state or time is None:
        return f"{line} {row.state}"
    step_s = time.step_s or 1.0
    stale = "/".join(f"{clocks}" for clocks in shown.staleness.get(row.worker, ())) or "-"
    awaited = "-" if time.awaited is None or time.for_workers_s < step_s / 100 else f"{time.awaited}"
    process = shown.processes.get(("worker", row.worker))
    shares = (
        f"{_seconds(time.step_s):>7} {time.own_s / step_s:>4.0%} {time.load_s / step_s:>4.0%} "
        f"{time.for_workers_s / step_s:>4.0%} {awaited:>3} {time.wire_s / step_s:>4.0%}"
    )
    return f"{line} {shares} {stale:>5} {_memory(process):>5}"


def _server_line(shown: RunPicture, row: ServerRow) -> str:
    process = shown.processes.get(("server", row.server))
    hot = "" if row.hot_row is None else f", {row.hot_row[0]} in {row.hot_row[1]:.0%}"
    return (
        f"{row.server:>2} {'-' if row.busy is None else f'{row.busy:.0%}':>5} "
        f"{'-' if row.apply_s is None else _seconds(row.apply_s):>7} {row.num_waiting:>5} "
        f"{'-' if row.num_behind is None else row.num_behind:>3} "
        f"{_bytes(row.received_per_s):>8} {_bytes(row.sent_per_s):>8} "
        f"{_memory(process):>5} {row.num_lives:>5}  {row.table[:_NAME_LENGTH]}{hot}"
    )


def _memory(process: ProcessState | None) -> str:
    """Return what a process has, if it is there and on this machine."""
    return _bytes(process.rss_bytes) if process and process.rss_bytes else "-"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s"


def _bytes(number: float) -> str:
    """Return a number of bytes in four characters or less.

    >>> _bytes(12), _bytes(282_345_472), _bytes(1_500_000), _bytes(3.2e9)
    ('12', '282M', '1.5M', '3.2G')
    """
    for unit in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if number >= 9.95 or not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.0f}T"


# -- as data -----------------------------------------------------------------------------------------------------------


def as_data(shown: RunPicture) -> dict[str, object]:
    """Return the picture as JSON has it."""
    verdict = shown.verdict
    return {
        "elapsed_s": round(shown.elapsed_s, 3),
        "verdict": {
            "kind": verdict.kind,
            "text": verdict.text,
            "subject": verdict.subject,
            "cause": verdict.cause,
            "share": round(verdict.share, 4),
        },
        "loss": {"trend": shown.loss.trend, "text": shown.loss.text},
        "workers": [_worker_data(shown, row) for row in shown.workers],
        "servers": [_server_data(shown, row) for row in shown.servers],
        "events": [event.strip() for event in shown.events],
    }


def _worker_data(shown: RunPicture, row: WorkerRow) -> dict[str, object]:
    time, process = shown.times.get(row.worker), shown.processes.get(("worker", row.worker))
    split = {} if time is None else {
        "step_s": time.step_s,
        "compute_s": time.own_s,
        "data_s": time.load_s,
        "wait_s": {f"{kind} {rank}": seconds for (kind, rank), seconds in time.waited_s.items()},
        "push_s": time.push_s,
    }  # fmt: skip
    p50, p99 = shown.staleness.get(row.worker, (None, None))
    return {
        "worker": row.worker,
        "state": row.state or "computing",
        "clock": row.clock,
        "lead": row.lead,
        "loss": row.loss,
        "samples_per_s": row.samples_per_s if row.counts_samples else None,
        "refused": row.num_refused,
        **split,
        "staleness_p50": p50,
        "staleness_p99": p99,
        "rss_bytes": process.rss_bytes if process else None,
    }


def _server_data(shown: RunPicture, row: ServerRow) -> dict[str, object]:
    process = shown.processes.get(("server", row.server))
    return {
        "server": row.server,
        "busy": row.busy,
        "apply_s": row.apply_s,
        "queue": row.num_waiting,
        "replica_lag": row.num_behind,
        "received_per_s": row.received_per_s,
        "sent_per_s": row.sent_per_s,
        "table": row.table,
        "hot_row": None if row.hot_row is None else {"id": row.hot_row[0], "share": row.hot_row[1]},
        "lives": row.num_lives,
        "rss_bytes": process.rss_bytes if process else None,
    }
