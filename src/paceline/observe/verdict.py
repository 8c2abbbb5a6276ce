"""One sentence on a run: healthy, or what holds it up and why. A pure function of its latest records."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from paceline.observe.window import Window, increase, latest_life, worker_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline.observe.disk import DiskUse
    from paceline.observe.trace import Sampled, Serving
    from paceline.observe.window import WorkerTime

Kind = Literal[
    "starting",
    "healthy",
    "worker",
    "data",
    "server",
    "link",
    "row",
    "hung",
    "waiting",
    "dead",
    "stopped",
    "disk",
    "refused",
]

LEAST_STEPS: Final = 5  # of each worker; fewer say nothing
HELD_SHARE: Final = 0.15  # of the time of steps that is lost, from which it is told
SLOW_RATIO: Final = 1.3  # between the work of a worker and that of the others
_LATE_RATIO: Final = 1.25  # of the work in one clock, from which the worker is late in it
_LATE_CLOCKS: Final = 0.25  # share of the clocks in which a slow worker has to be late
_CAUSE_SHARE: Final = 0.4  # of the longer work that a cause has to explain
_SERVER_SHARE: Final = 0.3  # of the time of steps, as servers always take some
_LEAST_FAULTS: Final = 10.0  # of pages in a step, that are read from a disk
_DATA_SHARE: Final = 0.5  # the same for data
_LONG_RATIO: Final = 10.0  # a clock that takes so many times the others, and no less than this:
_LONG_S: Final = 5.0
_HOT_SHARE: Final = 0.9  # of the pushes that have a hot row
_HOT_GAP: Final = 2.0  # times more pushes than the next row is in
SILENT_S: Final = 10.0  # a process that runs writes every two seconds
_BUSY: Final = 0.5
_ASLEEP: Final = 0.5
_LEAST_PUSHES_REFUSED: Final = 3


class ProcessState(msgspec.Struct, frozen=True):
    """What the kernel says of a process of a run, on this machine.

    Args:
        state: the letter of its state; T is stopped, an empty text is gone.
        rss_bytes: memory that it has.
    """

    state: str
    rss_bytes: int = 0


class Surroundings(msgspec.Struct, frozen=True):
    """What the records do not say.

    Args:
        now: time on the clock of the records.
        ends: why workers have ended, from their launcher.
        processes: what the kernel says, by role and rank.
        records_end: whether a process could write its records no more.
        disk: what is on the disk of the run, where records end.
        has_ended: whether the run is over.
    """

    now: float = 0.0
    ends: Mapping[int, str] = msgspec.field(default_factory=dict[int, str])
    processes: Mapping[tuple[str, int], ProcessState] = msgspec.field(
        default_factory=dict[tuple[str, int], ProcessState]
    )
    records_end: bool = False
    disk: DiskUse | None = None
    has_ended: bool = False


class RunVerdict(msgspec.Struct, frozen=True):
    """What holds up a run most.

    Args:
        kind: of what it is.
        text: a sentence.
        subject: the process, "worker 3" or "server 1"; empty where it is none.
        cause: why, in a word or two.
        share: of the time of steps that is lost, 0 to 1.
    """

    kind: Kind
    text: str
    subject: str = ""
    cause: str = ""
    share: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether nothing holds up the run."""
        return self.kind in ("healthy", "starting")


HEALTHY: Final = RunVerdict("healthy", "healthy")
STARTING: Final = RunVerdict("starting", "starting: too few steps for a verdict")


def judge(
    window: Window, around: Surroundings = Surroundings(), times: dict[int, WorkerTime] | None = None
) -> RunVerdict:
    """Return the verdict on the latest steps of a run. `times` are those of the window, where they are known already.

    judge(window).text  # 'worker 3 is 2.1x slower: computing; the others wait 38 % for it'
    """
    found = _of_processes(window, around) or _of_disk(around) or _of_refusals(window)
    if found is not None:
        return found
    times = worker_times(window) if times is None else times
    if not times or min(time.num_steps for time in times.values()) < LEAST_STEPS:
        return STARTING
    lost = [_of_workers(window, times), _of_ways(window, times), _of_all_data(times)]
    worst = max((each for each in lost if each is not None), key=lambda each: each.share, default=None)
    return worst or _of_rows(window) or HEALTHY


# -- processes, disks and refusals -----------------------------------------------------------------------------------


def _of_processes(window: Window, around: Surroundings) -> RunVerdict | None:
    for worker, end in sorted(around.ends.items()):
        if end.startswith("dead"):
            return RunVerdict("dead", f"worker {worker} is {end}", f"worker {worker}", "dead", 1.0)
    if around.has_ended:
        return None
    for (role, rank), process in sorted(around.processes.items()):
        name = f"{role} {rank}"
        if role == "worker" and rank in window.gone:
            continue
        if process.state == "" and role == "server" and rank in window.ended_servers:
            continue  # another process serves, or the launcher has said why the run ends
        if process.state == "":
            return RunVerdict("dead", f"{name} is dead: its process is gone", name, "dead", 1.0)
        if process.state in ("T", "t"):
            text = f"{name} is stopped by a signal; `kill -CONT {_pid(window, role, rank)}` lets it go on"
            return RunVerdict("stopped", text, name, "stopped", 1.0)
    return _of_long_clocks(window, around)


def _pid(window: Window, role: str, rank: int) -> int:
    samples = window.sampled[role, rank]
    return samples[-1].pid if samples else 0


def _of_long_clocks(window: Window, around: Surroundings) -> RunVerdict | None:
    """Name a worker that is silent, or that computes in one clock for much longer than before."""
    usual_s = fmean([step.step_s for steps in window.steps.values() for step in steps] or [0.0])
    for worker in window.workers():
        name, state = f"worker {worker}", window.states.get(worker)
        last_t = max(state.t if state else 0.0, window.steps[worker][-1].t)
        silent_s = around.now - last_t
        if silent_s > max(SILENT_S, _LONG_RATIO * usual_s):
            text = f"{name} is hung: not a sign of it for {silent_s:.0f} s; `py-spy dump` or gdb shows where it is"
            return RunVerdict("hung", text, name, "hung", 1.0)
        if state and state.doing == "computing" and state.for_s > max(_LONG_S, _LONG_RATIO * usual_s):
            text = f"{name} computes for {state.for_s:.0f} s in clock {state.clock}; its steps took {_time(usual_s)}"
            return RunVerdict("hung", text, name, "computing", 1.0)
    return _of_long_waits(window, max(_LONG_S, _LONG_RATIO * usual_s))


def _of_long_waits(window: Window, long_s: float) -> RunVerdict | None:
    """Return the verdict that no worker goes on: where all wait, the time of the last steps does not say why."""
    workers = window.workers()
    waits_s = [state.for_s for worker in workers if (state := window.states.get(worker)) and state.doing != "computing"]
    if len(workers) < 2 or len(waits_s) < len(workers) or min(waits_s) < long_s:
        return None
    return RunVerdict(
        "waiting", f"no worker goes on: all {len(workers)} wait, for {min(waits_s):.0f} s", "", "waiting", 1.0
    )


def _of_disk(around: Surroundings) -> RunVerdict | None:
    if not around.records_end:
        return None
    text = "the disk of the run is full, or a limit of its files is reached: records end"
    return RunVerdict("disk", text if around.disk is None else f"{text}. {around.disk.text}", "", "disk")


def _of_refusals(window: Window) -> RunVerdict | None:
    """Name a worker most of whose latest pushes were refused."""
    for worker in window.workers():
        first_t = window.latest(worker)[0].t
        own = [refusal for refusal in window.refused if refusal.worker == worker and refusal.t >= first_t]
        if len(own) >= max(_LEAST_PUSHES_REFUSED, len(window.latest(worker)) / 2):
            text = f"pushes of worker {worker} are refused: {own[-1].reason}"
            return RunVerdict("refused", text, f"worker {worker}", "refused")
    return None


# -- where the time goes ---------------------------------------------------------------------------------------------


def _of_workers(window: Window, times: dict[int, WorkerTime]) -> RunVerdict | None:
    """Name the worker for which the others wait, or that is much slower where none waits for it."""
    if len(times) < 2:
        return None
    slow = max(times.values(), key=lambda time: time.working_s)
    others = [time for time in times.values() if time is not slow]
    usual_s = fmean(time.working_s for time in others)
    ratio = slow.working_s / usual_s if usual_s > 0 else 1.0
    share = fmean(time.waited_s.get(("worker", slow.worker), 0.0) / time.step_s for time in others)
    late = sum(each_s > _LATE_RATIO * usual_s for each_s in slow.own_each_s) / slow.num_steps
    waits = any(time.for_workers_s for time in times.values())
    if ratio < SLOW_RATIO or late < _LATE_CLOCKS or (waits and share < HELD_SHARE):
        return None
    if not waits:
        behind = max(time.num_steps for time in times.values()) and _behind(window, slow.worker)
        ending = f"none waits for it, and it is {behind} clocks behind" if behind else "none waits for it"
    else:
        ending = f"the others wait {_percent(share)} for it"
    cause, kind = _cause(window, slow, others, usual_s)
    name = f"worker {slow.worker}"
    if kind == "data":
        return RunVerdict("data", f"{name} waits for its data and is {ratio:.1f}x slower; {ending}", name, cause, share)
    return RunVerdict("worker", f"{name} is {ratio:.1f}x slower: {cause}; {ending}", name, cause, share)


def _behind(window: Window, worker: int) -> int:
    return max(steps[-1].clock for steps in window.steps.values()) - window.steps[worker][-1].clock


def _cause(
    window: Window, slow: WorkerTime, others: list[WorkerTime], usual_s: float
) -> tuple[str, Literal["worker", "data"]]:
    """Return what makes a worker slower than the others: from what its process says of itself."""
    longer_s = slow.working_s - usual_s
    if slow.load_s - fmean(time.load_s for time in others) >= _CAUSE_SHARE * longer_s:
        return "data", "data"

    def more(of: Callable[[Sampled], float]) -> float:
        """Return how much more a step of the slow worker has of this than those of the others."""
        rates = {time.worker: _rate(window, time.worker, of) * time.step_s for time in (slow, *others)}
        return rates[slow.worker] - fmean(rates[time.worker] for time in others)

    faults = more(lambda sample: float(sample.num_faults))
    if faults >= _LEAST_FAULTS:  # before the wait for a core, which reading from a disk is in part
        return f"its memory is short, {faults:.0f} pages a step come from the disk", "worker"
    if more(lambda sample: sample.gc_s) >= _CAUSE_SHARE * longer_s:
        return "garbage collection", "worker"
    if more(lambda sample: sample.delayed_s) >= _CAUSE_SHARE * longer_s:
        return "other processes have its core", "worker"
    busy = _rate(window, slow.worker, lambda sample: sample.cpu_s) * slow.step_s / slow.working_s
    known = len(window.sampled["worker", slow.worker]) > 1
    return ("computing (asleep)" if known and busy < _ASLEEP else "computing"), "worker"


def _rate(window: Window, worker: int, of: Callable[[Sampled], float]) -> float:
    steps = window.latest(worker)
    return increase(window.sampled["worker", worker], steps[0].t - steps[0].step_s, of)


def _of_ways(window: Window, times: dict[int, WorkerTime]) -> RunVerdict | None:
    """Name the link or the server that takes most of the time of steps."""
    lost: dict[tuple[str, int], float] = {}
    for time in times.values():
        for (kind, rank), seconds in time.waited_s.items():
            if kind != "worker":
                lost[kind, rank] = lost.get((kind, rank), 0.0) + seconds / time.step_s / len(times)
    pushed = {time.worker: time.push_s for time in times.values()}
    for worker, seconds in pushed.items():
        rest = [other for rank, other in pushed.items() if rank != worker]
        if rest and seconds > 3 * max(rest):
            lost["link", worker] = lost.get(("link", worker), 0.0) + seconds / times[worker].step_s
    if not lost:
        return None
    kind, rank = max(lost, key=lambda key: lost[key])
    share = lost[kind, rank]
    if kind == "link" and share >= HELD_SHARE:
        resent = _rate(window, rank, lambda sample: float(sample.num_resent))
        why = f"loses packets, {resent:.0f} a second are sent again" if resent >= 1 else "is thin"
        text = f"the link of worker {rank} {why}: {_percent(share)} of the steps' time"
        return RunVerdict("link", text, f"worker {rank}", "link", share)
    if kind == "server" and share >= _SERVER_SHARE:
        why = _server_cause(window, rank)
        text = f"server {rank} is slow to {why}; the workers wait {_percent(share)} for it"
        return RunVerdict("server", text, f"server {rank}", why, share)
    return None


def _server_cause(window: Window, server: int) -> str:
    since_t = window.began_t()
    delayed = increase(window.sampled["server", server], since_t, lambda sample: sample.delayed_s)
    if delayed > _CAUSE_SHARE / 2:
        return "run: other processes have its core"
    busy = busy_share(record for record in window.serving[server] if record.t >= since_t)
    applied = [record.took_s for record in window.applied[server] if record.t >= since_t]
    if busy is not None and busy >= _BUSY:
        return (
            f"apply: it is busy {_percent(busy)}, {_time(fmean(applied))} an update"
            if applied
            else "answer: it is busy"
        )
    return "answer, though it is idle: its link, or its process, is slow"


def busy_share(serving: Iterable[Serving]) -> float | None:
    """Return the share of the latest time in which the thread of a server worked; None if it is not known."""
    records = latest_life(serving)
    if len(records) < 2:
        return None
    in_use_s = records[-1].in_use_s - records[0].in_use_s
    return (records[-1].busy_s - records[0].busy_s) / in_use_s if in_use_s > 0 else None


def _of_all_data(times: dict[int, WorkerTime]) -> RunVerdict | None:
    share = fmean(time.load_s / time.step_s for time in times.values())
    if share < _DATA_SHARE:
        return None
    text = f"all workers wait for their data, {_percent(share)} of the time"
    if len(times) == 1:
        text = f"worker {next(iter(times))} waits for its data, {_percent(share)} of the time"
    return RunVerdict("data", text, "", "data", share)


def _of_rows(window: Window) -> RunVerdict | None:
    """Name a row that is in nearly all pushes, where the next one is in few."""
    for records in window.serving.values():
        hot = records[-1].hot_rows if records else ()
        if not hot:
            continue
        table, row, share = hot[0]
        following = hot[1][2] if len(hot) > 1 else 0.0
        if share >= _HOT_SHARE and following * _HOT_GAP <= share:
            text = f"row {row} of table '{table}' is hot: {_percent(share)} of the pushes have it"
            return RunVerdict("row", f"{text}, and the next one {_percent(following)}", f"row {row}", "hot")
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
