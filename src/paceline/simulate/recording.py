"""Trace of a rehearsal, in the files of a real run, so that reports and Perfetto read it."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from paceline.core.server import LEAD
from paceline.errors import UsageError
from paceline.observe.trace import (
    AppliedRecord,
    BoundRecord,
    Load,
    MembershipRecord,
    MinClock,
    ReadRecord,
    Refusal,
    Step,
    Trace,
    TraceRecord,
    trace_path,
)
from paceline.simulate.happenings import (
    ChangedMember,
    FinishedClock,
    Happening,
    MovedBound,
    ReachedClock,
    ReadValues,
    RefusedPush,
    Updated,
)
from paceline.simulate.rehearsal import TABLE

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.simulate.outcome import Outcome


def write_trace(outcome: Outcome, folder: Path) -> Path:
    """Write the trace of an outcome to a folder named after its policy, in place of an older one; return that folder.

    Args:
        outcome: of a rehearsal that kept its happenings.
        folder: holds the folders of all policies; it is made if it is missing.

    Raises:
        UsageError: the folder cannot be written.
    """
    run = folder / re.sub(r"[^a-z0-9]+", "-", str(outcome.consistency))
    by_process: dict[tuple[Literal["worker", "server"], int], list[TraceRecord]] = defaultdict(list)
    for happening in outcome.happenings:
        by_process[_process(happening)].append(_record(happening))
    for server in outcome.servers:
        received, sent = int(server.received_bytes), int(server.sent_bytes)
        load = Load(outcome.seconds, server.rank, outcome.seconds, server.busy_s, 0.0, received, sent)
        by_process["server", server.rank].append(load)
    try:
        shutil.rmtree(run / "trace", ignore_errors=True)
        (run / "trace").mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--trace {folder}: {error.strerror}. Name a folder that can be written.") from error
    for (role, rank), records in by_process.items():
        with Trace(trace_path(run, role, rank)) as trace:
            for record in records:
                trace.record(record)
    return run


def _process(happening: Happening) -> tuple[Literal["worker", "server"], int]:
    match happening:
        case ReadValues() | FinishedClock():
            return "worker", happening.worker
        case RefusedPush():
            return "server", LEAD
        case _:
            return "server", happening.server


def _record(happening: Happening) -> TraceRecord:
    match happening:
        case ReadValues(t, worker, clock, value_clock, waited_s, source):
            known = "fetch" if source == "fetch" else "delivery" if source == "delivery" else "cache"
            return ReadRecord(t, worker, TABLE, clock, value_clock, waited_s, known)
        case FinishedClock(t, worker, clock, loss, wait_s, step_s, load_s):
            return Step(t, worker, clock, 1, loss, wait_s, step_s, comm_s=wait_s, load_s=load_s)
        case ReachedClock(t, server, clock):
            return MinClock(t, server, TABLE, clock)
        case Updated(t, server, workers, clock, took_s):
            return AppliedRecord(t, server, TABLE, workers, clock, took_s)
        case RefusedPush(t, worker, reason):
            return Refusal(t, LEAD, worker, TABLE, reason)
        case MovedBound(t, server, before, bound, waiting, staleness):
            return BoundRecord(t, server, TABLE, before, bound, waiting, staleness)
        case ChangedMember(t, server, worker, incarnation, change):
            event = "joined" if change == "joined" else "left" if change == "left" else "died"
            return MembershipRecord(t, server, worker, incarnation, event)
