"""A run as a trace for Perfetto and chrome://tracing: a track for each process, and flows from push to apply to pull.

The format is the JSON object format of "Trace Event Format" (Google, 2016): times and lengths are microseconds, `X` is
a slice, `i` an instant, `C` a counter, `M` a name; `s`, `t` and `f` are the begin, a step and the end of a flow, each
bound to the slice around its time on its track.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from paceline.observe.trace import ReadRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.observe.runs import Run
    from paceline.observe.trace import AppliedRecord, RowRead, Step

_SERVER_PIDS: Final = 1000  # workers have their ranks as numbers of processes, and servers theirs beyond this
_LAUNCHER_PID: Final = 2000
_LEAST_US: Final = 1.0  # of a slice, as others cannot be seen
_STEPS_TID: Final = 0
_READS_TID: Final = 1  # and further ones, one a table

Event = dict[str, object]


def trace_events(run: Run) -> dict[str, object]:
    """Return the JSON object that Perfetto opens; times count from the first record.

    Path("run.json").write_bytes(msgspec.json.encode(trace_events(read_run(folder))))
    """
    return {"traceEvents": list(_Tracks(run).events()), "displayTimeUnit": "ms"}


class _Tracks:
    """Makes the events of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        begins = [step.t - step.step_s for step in run.steps]
        begins += [
            record.t
            for records in (run.memberships, run.applied, run.exits, run.serving, run.bounds)
            for record in records
        ]
        self._began_t = min(begins, default=0.0)
        self._steps = {(step.worker, step.clock): step for step in run.steps}
        self._ends: dict[int, list[tuple[float, int]]] = defaultdict(list)  # of steps, by worker, in order
        for step in run.steps:
            self._ends[step.worker].append((step.t, step.clock))
        tables = sorted({read.table for read in (*run.reads, *run.row_reads)} | {each.table for each in run.applied})
        self._tids = {table: _READS_TID + number for number, table in enumerate(tables)}
        self._used: dict[tuple[int, int], float] = defaultdict(float)  # up to where a track is, in microseconds
        self._pulled: dict[tuple[str, int, int], tuple[float, float]] = {}  # by table, worker and value clock

    def events(self) -> Iterator[Event]:
        yield from self._names()
        for step in self._run.steps:
            yield from self._of_step(step)
        for read in sorted((*self._run.reads, *self._run.row_reads), key=lambda read: read.t):
            yield self._of_read(read)
        for applied in self._run.applied:
            args: Event = {"clock": applied.clock, "workers": list(applied.workers)}
            at, until = self._place(_SERVER_PIDS + applied.server, 0, applied.t, applied.took_s)
            yield _slice(_SERVER_PIDS + applied.server, 0, f"apply {applied.table}", at, until, args)
        yield from self._flows()
        yield from self._counters()
        yield from self._instants()

    def _names(self) -> Iterator[Event]:
        workers = sorted({step.worker for step in self._run.steps} | {read.worker for read in self._run.reads})
        servers = sorted({record.server for records in (self._run.applied, self._run.serving) for record in records})
        names = [(_SERVER_PIDS + server, f"server {server}") for server in servers]
        names += [(worker, f"worker {worker}") for worker in workers]
        for order, (pid, name) in enumerate([*names, (_LAUNCHER_PID, "launcher")]):
            yield _named("process_name", pid, 0, {"name": name})
            yield _named("process_sort_index", pid, 0, {"sort_index": order})
        for worker in workers:
            yield _named("thread_name", worker, _STEPS_TID, {"name": "steps"})
            for table, tid in self._tids.items():
                yield _named("thread_name", worker, tid, {"name": f"pulls of {table}"})

    def _of_step(self, step: Step) -> Iterator[Event]:
        """Yield a step, and in it the sums of its communication, waiting for data and computing, in this order."""
        at, until = self._place(step.worker, _STEPS_TID, step.t, step.step_s)
        args: Event = {"samples": step.samples, "loss": step.loss}
        yield _slice(step.worker, _STEPS_TID, f"clock {step.clock}", at, until, args)
        for name, seconds in (("communicate", step.comm_s), ("wait for data", step.load_s), ("compute", step.own_s)):
            end = min(until, at + 1e6 * seconds)
            if end > at:
                yield _slice(step.worker, _STEPS_TID, name, at, end, {})
                at = end

    def _of_read(self, read: ReadRecord | RowRead) -> Event:
        clock = read.value_clock if isinstance(read, ReadRecord) else max(read.num_rows, default=read.clock)
        args: Event = {"clock": read.clock, "value clock": clock, "staleness": read.clock - clock}
        tid = self._tids[read.table]
        at, until = self._place(read.worker, tid, read.t, read.waited_s)
        self._pulled[read.table, read.worker, clock] = at, until
        return _slice(read.worker, tid, f"pull {read.table}", at, until, args)

    def _flows(self) -> Iterator[Event]:
        """Yield a flow for each push: from the step that made it to the update, and to the pull that first has it."""
        pushes = [(applied, worker) for applied in self._run.applied for worker in applied.workers]
        for number, (applied, worker) in enumerate(pushes):
            step = self._step_of(worker, applied)
            if step is None:
                continue
            made = self._us(applied.t) - _LEAST_US / 2
            yield _flow("s", number, worker, _STEPS_TID, min(self._us(step.t), made) - _LEAST_US / 2)
            yield _flow("t", number, _SERVER_PIDS + applied.server, 0, made)
            _, until = self._pulled.get((applied.table, worker, step.clock + 1), (0.0, 0.0))
            if until > made:
                yield _flow("f", number, worker, self._tids[applied.table], until - _LEAST_US / 4)

    def _step_of(self, worker: int, applied: AppliedRecord) -> Step | None:
        """Return the step that made a push: that of the clock that it completes, or the one in which it was applied."""
        step = self._steps.get((worker, applied.clock - 1))
        if step is not None and step.t <= applied.t:
            return step
        own = self._ends[worker]
        place = bisect_left(own, (applied.t, -1))
        if place == len(own):
            return None
        step = self._steps[worker, own[place][1]]
        return step if step.t - step.step_s < applied.t else None

    def _counters(self) -> Iterator[Event]:
        for serving in self._run.serving:
            yield _counter("queue", _SERVER_PIDS + serving.server, self._us(serving.t), serving.num_waiting)
            if serving.num_behind is not None:
                yield _counter("replica lag", _SERVER_PIDS + serving.server, self._us(serving.t), serving.num_behind)
        for moved in self._run.bounds:
            name = f"bound of {moved.table}"
            yield _counter(name, _SERVER_PIDS + moved.server, self._us(moved.t), moved.bound)
        for step in self._run.steps:
            if step.loss is not None:
                yield _counter("loss", step.worker, self._us(step.t), step.loss)

    def _instants(self) -> Iterator[Event]:
        for membership in self._run.memberships:
            name = f"worker {membership.worker} {membership.event}"
            yield _instant(_SERVER_PIDS + membership.server, name, self._us(membership.t))
        for refusal in self._run.refusals:
            pid = max(0, refusal.worker) if refusal.server < 0 else _SERVER_PIDS + refusal.server
            yield _instant(pid, f"refused: {refusal.reason}", self._us(refusal.t))
        for end in self._run.exits:
            yield _instant(_LAUNCHER_PID, f"{end.name} {end.happened}; {end.then}", self._us(end.t))

    def _place(self, pid: int, tid: int, end_t: float, seconds: float) -> tuple[float, float]:
        """Return where a slice begins and ends: slices of a track may lie in each other, but not overlap."""
        until = max(self._us(end_t), self._used[pid, tid] + _LEAST_US)
        at = min(max(self._us(end_t - seconds), self._used[pid, tid]), until - _LEAST_US)
        self._used[pid, tid] = until
        return at, until

    def _us(self, t: float) -> float:
        return max(0.0, 1e6 * (t - self._began_t))


def _slice(pid: int, tid: int, name: str, at: float, until: float, args: Event) -> Event:
    event = _event("X", name, pid, tid, at)
    return {**event, "dur": round(round(until, 3) - round(at, 3), 3), "args": args}


def _flow(phase: str, number: int, pid: int, tid: int, at: float) -> Event:
    event: Event = {**_event(phase, "push", pid, tid, at), "id": number}
    return {**event, "bp": "e"} if phase == "f" else event


def _counter(name: str, pid: int, at: float, value: float) -> Event:
    return {**_event("C", name, pid, 0, at), "args": {name: value}}


def _instant(pid: int, name: str, at: float) -> Event:
    return {**_event("i", name, pid, 0, at), "s": "p"}


def _named(kind: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _event(phase: str, name: str, pid: int, tid: int, at: float) -> Event:
    return {"ph": phase, "name": name, "cat": "paceline", "pid": pid, "tid": tid, "ts": round(max(0.0, at), 3)}
