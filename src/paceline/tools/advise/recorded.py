"""What a recorded run says about its computation, servers and messages, as a scenario of the simulator."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import inf
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from paceline.core.consistency import Consistency, bsp
from paceline.core.server import LEAD
from paceline.errors import UsageError
from paceline.job.spec import ClusterSpec
from paceline.observe.averages import mean
from paceline.observe.runs import Run, read_run
from paceline.simulate.outcome import Outcome, rehearse
from paceline.simulate.scenario import Network, Scenario, SimulatedLines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.observe.trace import ReadRecord, Step

_SPEC: Final = "spec.json"
_LEAST_CLOCKS: Final = 10  # fewer say nothing about delays
_LEAST_FREE: Final = 20  # reads that say what a fetch takes
_NETWORKS: Final = ("tcp",)  # carriers that cost time by the byte
_LONG_BYTES: Final = 65536.0  # of a worker in a clock; with fewer, a line is not what it waits for
_NET_LATENCY_S: Final = 0.0002
_SLOWEST_LINE: Final = 1e5  # bytes a second that are looked at
_FASTEST_LINE: Final = 1e11
_NUM_FITS: Final = 12


class RecordedRun(msgspec.Struct, frozen=True):
    """A recorded run: what happened, and the scenario that rehearses it.

    Args:
        consistency: that it ran under.
        clock_s: seconds of a clock of a worker, on average.
        mean_lag: clocks that the values lacked that workers read, on average.
        wait_share: share of their time that workers waited for values.
        losses: mean losses of the first and of the last tenth of its steps; None without.
        scenario: rehearses it, on the same delays.
        rehearsed: outcome of that.
        is_network: whether it went over a network, whose lines are guessed from what steps took.
    """

    consistency: Consistency
    clock_s: float
    mean_lag: float
    wait_share: float
    losses: tuple[float, float] | None
    scenario: Scenario
    rehearsed: Outcome
    is_network: bool

    @property
    def rehearsed_clock_s(self) -> float:
        """Seconds of a clock of a worker in the rehearsal of the run itself."""
        return self.rehearsed.clock_s

    @property
    def error(self) -> float:
        """By what share the rehearsal of the run itself is too slow (above 0) or too fast."""
        return self.rehearsed_clock_s / self.clock_s - 1


def read_recorded(folder: Path, consistency: str | None = None, *, is_beside: bool = False) -> RecordedRun:
    """Read the trace of a run and rehearse it.

    Args:
        folder: of the run.
        consistency: that it ran under; by default what the launcher was told, or else bsp.
        is_beside: whether server k ran on the machine of worker k.

    Raises:
        UsageError: there is no trace, or it is too short, or it is of a run without servers.
    """
    spec = ClusterSpec.read(folder / _SPEC)
    run = read_run(folder)
    policy = Consistency.parse(consistency or spec.consistency or str(bsp()))
    steps = _steps_by_worker(run, folder)
    scenario = replace(_scenario(run, steps, spec, policy), starts=_starts(run))
    scenario = replace(scenario, lines=replace(scenario.lines, beside=is_beside))
    recorded_s = _recorded_s(run, steps)
    if spec.transport in _NETWORKS and scenario.lines.gradient_bytes > _LONG_BYTES:
        scenario = _with_line(scenario, recorded_s)
    all_steps = [step for own in steps.values() for step in own]
    lags = [read.staleness for read in run.reads]
    return RecordedRun(
        consistency=policy,
        clock_s=recorded_s,
        mean_lag=fmean(lags) if lags else 0.0,
        wait_share=sum(step.wait_s for step in all_steps) / sum(step.step_s for step in all_steps),
        losses=_losses(all_steps),
        scenario=scenario,
        rehearsed=rehearse(scenario),
        is_network=spec.transport in _NETWORKS,
    )


def _steps_by_worker(run: Run, folder: Path) -> dict[int, list[Step]]:
    """Return the steps of each worker in order, without the first, which includes the start."""
    steps: dict[int, list[Step]] = defaultdict(list)
    for step in run.steps:
        steps[step.worker].append(step)
    if not run.reads:
        raise UsageError(
            f"{folder}: its trace has no reads of dense tables, expected some: give a run of a parameter server."
        )
    least = min((len(own) - 1 for own in steps.values()), default=0)
    if least < _LEAST_CLOCKS:
        raise UsageError(
            f"{folder}: its trace has {max(0, least)} whole clocks of some worker, expected {_LEAST_CLOCKS} or more; "
            "let the run go on for longer."
        )
    return {worker: own[1:] for worker, own in sorted(steps.items())}


def _starts(run: Run) -> tuple[float, ...]:
    """Return by how much later than the first each worker began its second clock: they do not start at once."""
    ends = {step.worker: step.t for step in reversed(run.steps)}
    first = min(ends.values())
    return tuple(ends[worker] - first for worker in sorted(ends))


def _recorded_s(run: Run, steps: Mapping[int, Sequence[Step]]) -> float:
    """Return the seconds of a clock of a worker, as `Outcome.clock_s`: pushes that came too late do not count."""
    refused = Counter(refusal.worker for refusal in run.refusals if refusal.server == LEAD)
    rates = [(len(own) - refused[worker]) / sum(step.step_s for step in own) for worker, own in steps.items()]
    return len(rates) / max(sum(rates), 1e-9)


def _scenario(run: Run, steps: Mapping[int, Sequence[Step]], spec: ClusterSpec, policy: Consistency) -> Scenario:
    num_steps = sum(map(len, steps.values()))
    num_servers = max(spec.num_servers, 1)
    reads = [read for read in run.reads if read.clock > 0]
    num_tables = len({read.table for read in reads}) or 1
    fetched = [read for read in reads if read.source == "fetch"]
    free = _free_fetches(policy, fetched)
    fetch_s = _fetch_s(free, fetched)
    apply_s, handle_s = _server_s(run, num_steps, num_servers, is_network=spec.transport in _NETWORKS)
    update_s = apply_s * (len(steps) if policy.visible == "on_clock" else 1)
    latency_s = _NET_LATENCY_S if fetch_s is None else max(0.0, fetch_s - handle_s - update_s) / 2
    received, sent = _bytes(run)
    num_fetches = len(fetched) // num_tables or num_steps
    return Scenario(
        policy,
        num_workers=len(steps),
        num_servers=num_servers,
        num_clocks=max(map(len, steps.values())),
        recorded=tuple(
            tuple(step.own_s + step.load_s for step in own)  # a push that leaves slowly is the line's, not the worker's
            if spec.transport in _NETWORKS
            else _computed_s(own, free, fetch_s or 0.0)
            for own in steps.values()
        ),
        refresh=1.0 if len(fetched) == len(reads) else 0.0,
        num_reads=max(1, round(len(reads) / num_tables / num_steps)),
        apply_s=apply_s,
        handle_s=handle_s,
        network=Network(latency_s=(latency_s, latency_s)),
        lines=SimulatedLines(
            gradient_bytes=received / num_steps,
            value_bytes=sent / num_fetches,
            early=spec.transport in _NETWORKS,
        ),
        retry_s=1e6,
    )


def _computed_s(own: Sequence[Step], free: Mapping[tuple[int, int], float], fetch_s: float) -> tuple[float, ...]:
    """Return the seconds of each clock of a worker without the waiting.

    A fetch that waited for no other worker counts as one that takes as long as most: what it took beyond that belongs
    to this worker and clock, as its computation does.
    """
    waits = (fetch_s if (step.worker, step.clock) in free else step.wait_s for step in own)
    return tuple(max(0.0, step.step_s - wait_s) for step, wait_s in zip(own, waits, strict=True))


def _server_s(run: Run, num_steps: int, num_servers: int, *, is_network: bool) -> tuple[float, float]:
    """Return the seconds that a server takes to apply a push, and for each of its messages beside that.

    Over a network its thread counts as busy while a body comes in or leaves, which the line accounts for.
    """
    applied_s = sum(record.took_s for record in run.applied) / num_servers / num_steps
    if is_network:
        return applied_s, 0.0
    last = {record.server: record.busy_s for record in (*run.serving, *run.loads)}
    busy_s = fmean(last.values()) / num_steps if last else applied_s
    num_messages = 1 if num_servers == 1 else 3  # of a step: all in one, or a push, its tick and a pull
    return applied_s, max(0.0, busy_s - applied_s) / num_messages


def _bytes(run: Run) -> tuple[float, float]:
    """Return the bytes that all servers have received, and sent."""
    last = {record.server: (record.received_bytes, record.sent_bytes) for record in (*run.serving, *run.loads)}
    return float(sum(received for received, _ in last.values())), float(sum(sent for _, sent in last.values()))


def _free_fetches(policy: Consistency, fetched: Sequence[ReadRecord]) -> dict[tuple[int, int], float]:
    """Return what fetches took that waited for no other worker, by worker and clock, if there are enough of them.

    One that brings values newer than it needs has waited for none.
    """
    free = {
        (read.worker, read.clock): read.waited_s
        for read in fetched
        if policy.bound is None or read.value_clock > policy.needs(read.clock)
    }
    return free if len(free) >= _LEAST_FREE else {}


def _fetch_s(free: Mapping[tuple[int, int], float], fetched: Sequence[ReadRecord]) -> float | None:
    """Return what a fetch takes that waits for no other worker; None with too few fetches, as under essp.

    In lockstep no value is newer than it needs to be; but the last worker of each clock waits for none.
    """
    if free:
        return fmean(free.values())
    if len(fetched) < _LEAST_FREE:
        return None
    num_workers = len({read.worker for read in fetched})
    return sorted(read.waited_s for read in fetched)[len(fetched) // (2 * num_workers)]


def _with_line(scenario: Scenario, recorded_s: float) -> Scenario:
    """Return the scenario with the line on which its rehearsal takes as long as the run did."""
    slow, fast = _SLOWEST_LINE, _FASTEST_LINE
    scenario = replace(scenario, network=Network(latency_s=(_NET_LATENCY_S, _NET_LATENCY_S)))
    free = replace(scenario, lines=replace(scenario.lines, bytes_per_s=inf))
    if rehearse(free).clock_s >= recorded_s:
        return free
    for _ in range(_NUM_FITS):
        middle = (slow * fast) ** 0.5
        tried = replace(scenario, lines=replace(scenario.lines, bytes_per_s=middle))
        slow, fast = (middle, fast) if rehearse(tried).clock_s > recorded_s else (slow, middle)
    return replace(scenario, lines=replace(scenario.lines, bytes_per_s=(slow * fast) ** 0.5))


def _losses(steps: Sequence[Step]) -> tuple[float, float] | None:
    losses = [step.loss for step in sorted(steps, key=lambda step: step.t) if step.loss is not None]
    tenth = max(1, len(losses) // 10)
    return (mean(losses[:tenth]), mean(losses[-tenth:])) if losses else None
