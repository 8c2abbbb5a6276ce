"""Outcome of a rehearsal: speed, waiting, age of values, use of lines, and the loss if there is one."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

import msgspec

from paceline.core.consistency import Consistency
from paceline.simulate.happenings import Happening
from paceline.simulate.lines import Line
from paceline.simulate.rehearsal import Rehearsal, RehearsedWorker
from paceline.simulate.scenario import Scenario


class WorkerOutcome(msgspec.Struct, frozen=True):
    """All lives of one rank: finished clocks, and seconds of computation, of waiting for values and for batches.

    `num_refused` of the clocks do not count: their pushes came after their clock was closed.
    """

    rank: int
    num_clocks: int
    num_refused: int
    busy_s: float
    wait_s: float
    load_s: float

    @property
    def clocks_per_s(self) -> float:
        """Clocks a second that count, of the time until its last one."""
        spent_s = self.busy_s + self.wait_s + self.load_s
        return (self.num_clocks - self.num_refused) / spent_s if spent_s else 0.0


class ServerOutcome(msgspec.Struct, frozen=True):
    """One server: the seconds in which its thread worked, and the bytes of its line."""

    rank: int
    busy_s: float
    received_bytes: float
    sent_bytes: float


class LineUse(msgspec.Struct, frozen=True):
    """Share of the rehearsal's time in which the busiest line of its kind sent and received, and bytes of all lines."""

    sending: float = 0.0
    receiving: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """Results of one simulation. A clock counts for throughput once all servers have applied its update.

    Where workers come or go, all clocks count over all of the time.

    `differentials` counts the reads by clock differential: -1 is as fresh as can be, -(bound + 1) as old as allowed;
    `freshest` those of them that have the newest complete values that the servers had. `losses` are (second, clock,
    loss) of finished clocks. `uses` are the lines by kind of process.
    """

    consistency: Consistency
    clocks_per_s: float
    clocks_per_s_by_worker: tuple[float, ...]
    wait_share: float
    differentials: dict[int, int]
    freshest: dict[int, int]
    seconds: float
    workers: tuple[WorkerOutcome, ...]
    servers: tuple[ServerOutcome, ...]
    load_share: float
    uses: dict[str, LineUse]
    num_refused: int
    num_deaths: int
    num_joined: int
    num_left: int
    losses: tuple[tuple[float, int, float], ...] = ()
    happenings: tuple[Happening, ...] = ()

    @property
    def clock_s(self) -> float:
        """Return the seconds of a clock of a worker, for workers that all had the mean rate of these.

        A mean of seconds would say nothing of a worker that a quorum leaves out nearly always: few of its clocks count.
        """
        clocks_per_s = sum(own.clocks_per_s for own in self.workers)
        return len(self.workers) / clocks_per_s if clocks_per_s else 0.0

    @property
    def server_busy(self) -> float:
        """Return the share of the time in which the busiest server worked."""
        return max(server.busy_s for server in self.servers) / self.seconds if self.seconds else 0.0

    @property
    def mean_lag(self) -> float:
        """Return the mean lag of values behind the freshest possible ones, in clocks."""
        lags = sum((-1 - differential) * count for differential, count in self.differentials.items())
        return lags / sum(self.differentials.values())

    @property
    def max_lag(self) -> int:
        """Return the largest lag of values, in clocks."""
        return -1 - min(self.differentials)

    @property
    def last_loss(self) -> float | None:
        """Return the mean loss of the last tenth of the clocks, None without a model."""
        losses = [loss for _, _, loss in self.losses]
        last = losses[-max(1, len(losses) // 10) :]
        return sum(last) / len(last) if last else None


def rehearse(scenario: Scenario, *, keeps_happenings: bool = False) -> Outcome:
    """Run a scenario and measure it; `keeps_happenings`: also return what happened, for a trace.

    Raises:
        UsageError: the scenario has faults or tables that a rehearsal does not play.
        ProtocolBug: workers wait for what never comes.

    Example:
        >>> from paceline.core.consistency import ssp
        >>> rehearse(Scenario(ssp(3), num_clocks=20)).max_lag <= 3
        True
    """
    happenings: list[Happening] | None = [] if keeps_happenings else None
    job = Rehearsal(scenario, happenings)
    with _without_collections():
        job.run()
    lives = _lives_by_rank(job)
    workers = tuple(_worker(rank, own) for rank, own in lives.items())
    all_s = sum(own.busy_s + own.wait_s + own.load_s for own in workers) or 1.0
    rates = tuple(map(_rate, lives.values()))
    tally = job.tally
    is_steady = not (tally.num_deaths or tally.num_joined or tally.num_left)
    return Outcome(
        consistency=scenario.consistency,
        clocks_per_s=sum(rates) if is_steady else sum(map(_num_counted, job.workers)) / job.now,
        clocks_per_s_by_worker=rates,
        wait_share=sum(own.wait_s for own in workers) / all_s,
        differentials=dict(sorted(tally.differentials.items())),
        freshest=dict(sorted(tally.freshest.items())),
        seconds=job.now,
        workers=workers,
        servers=tuple(
            ServerOutcome(one.rank, one.busy_s, one.line.received_bytes, one.line.sent_bytes) for one in job.servers
        ),
        load_share=sum(own.load_s for own in workers) / all_s,
        uses=_uses(job),
        num_refused=sum(life.num_refused for life in job.workers),
        num_deaths=tally.num_deaths,
        num_joined=tally.num_joined,
        num_left=tally.num_left,
        losses=tuple(tally.losses),
        happenings=tuple(happenings or ()),
    )


@contextmanager
def _without_collections() -> Generator[None]:
    """Collect no cycles meanwhile: a job makes none, and to look for them takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _lives_by_rank(job: Rehearsal) -> dict[int, list[RehearsedWorker]]:
    lives: dict[int, list[RehearsedWorker]] = {}
    for life in job.workers:
        lives.setdefault(life.rank, []).append(life)
    return dict(sorted(lives.items()))


def _worker(rank: int, lives: list[RehearsedWorker]) -> WorkerOutcome:
    return WorkerOutcome(
        rank=rank,
        num_clocks=sum(life.num_finished for life in lives),
        num_refused=sum(life.num_refused for life in lives),
        busy_s=sum(_busy_s(life) for life in lives),
        wait_s=sum(life.waited_s for life in lives),
        load_s=sum(life.loaded_s for life in lives),
    )


def _busy_s(life: RehearsedWorker) -> float:
    spent_s = max(life.finished_at, life.read_at) - life.started_at
    return max(0.0, spent_s - life.waited_s - life.loaded_s)


def _rate(lives: list[RehearsedWorker]) -> float:
    """Return the clocks a second of one worker that count, over the time until its own last clock."""
    spent_s = max(life.finished_at for life in lives) - lives[0].started_at
    return sum(map(_num_counted, lives)) / spent_s if spent_s > 0 else 0.0


def _num_counted(life: RehearsedWorker) -> int:
    return life.num_finished - life.num_refused


def _uses(job: Rehearsal) -> dict[str, LineUse]:
    kinds = {
        "workers": [life.line for life in job.workers],
        "servers": [server.line for server in job.servers],
        "data servers": job.data_lines,
    }
    return {kind: _use(lines, job.now or 1.0) for kind, lines in kinds.items() if lines}


def _use(lines: list[Line], seconds: float) -> LineUse:
    return LineUse(
        sending=max(line.sent_s for line in lines) / seconds,
        receiving=max(line.received_s for line in lines) / seconds,
        sent_bytes=sum(line.sent_bytes for line in lines),
        received_bytes=sum(line.received_bytes for line in lines),
    )
