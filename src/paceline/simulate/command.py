"""`paceline simulate`: try policies on virtual time; prints speed, waiting time and staleness."""

from __future__ import annotations

import json as json_format
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.core.consistency import Consistency, bsp
from paceline.errors import UsageError
from paceline.simulate.actor import SimulatedWorker
from paceline.simulate.history import History
from paceline.simulate.scenario import Network, Scenario, Stragglers
from paceline.simulate.world import World

if TYPE_CHECKING:
    from rich.table import Table

_DEFAULT_POLICIES = ("bsp", "ssp:3", "essp:3", "asynchronous", "backup:1")
_SPREAD = 0.1  # compute times vary by this share around their mean


def simulate(
    *,
    consistency: Annotated[tuple[str, ...], Parameter(negative="")] = _DEFAULT_POLICIES,
    workers: int = 4,
    servers: int = 1,
    clocks: int = 200,
    stragglers: str = "transient:0.1:4",
    compute_s: float = 0.05,
    latency_s: float = 0.0005,
    seed: int = 0,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Rehearse policies on virtual time: the real protocol, with simulated computation and network.

    Prints for each policy the clocks a second, the share of time that workers wait, and the age of the values that they
    compute on. How well a model learns from such values is not simulated.

    Parameters
    ----------
    consistency
        bsp, ssp:S, essp:S, asynchronous or backup:B, separated by commas or given several times. A policy may also
        be given by its axes, on its own: bound=2,visible=on_clock.
    workers
        Number of workers.
    servers
        Number of servers.
    clocks
        Number of clocks of each worker.
    stragglers
        none, transient:SHARE:FACTOR (that share of all clocks takes so many times as long) or persistent:FACTOR
        (worker 0 is always slow).
    compute_s
        Seconds of computation of a clock, within a tenth.
    latency_s
        Seconds that a message takes, within a half.
    seed
        Seed of all random numbers; equal seeds give equal results.
    json
        Print one JSON object instead of a table.
    """
    scenario = _scenario(workers, servers, clocks, Stragglers.parse(stragglers), compute_s, latency_s, seed)
    wanted = _policies(consistency)
    reference = rehearse(scenario)
    outcomes = [reference if policy == bsp() else rehearse(_under(scenario, policy)) for policy in wanted]
    told = explain(scenario, reference, outcomes)
    if json:
        print(json_format.dumps(_as_json(scenario, reference, outcomes, told)))
    else:
        _print(_table(scenario, reference, outcomes), told)
    return 0


def explain(scenario: Scenario, reference: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Explain the numbers by the fastest policy: any if one worker is always slow, else a bounded one."""
    stragglers = scenario.stragglers
    bounded = [outcome for outcome in outcomes if outcome.consistency.bound is not None]
    candidates = outcomes if stragglers.kind == "persistent" else bounded or outcomes
    best = max(candidates, key=lambda outcome: outcome.clocks_per_s)
    gain = best.clocks_per_s / reference.clocks_per_s
    example = (
        f"{best.consistency} finishes {gain:.2f} times the clocks of bsp, on values {best.mean_lag:.1f} clocks behind "
        f"on average and {best.max_lag} at most."
    )
    if stragglers.kind == "persistent":
        return (
            f"Worker 0 is always {stragglers.factor:g} times slower, so under any bound the others soon run at its "
            f"pace, and only policies that do not wait for it gain: {example}"
        )
    if stragglers.kind == "transient":
        return (
            f"{stragglers.share:.0%} of the clocks take {stragglers.factor:g} times as long, and bsp waits for the "
            f"slowest of {scenario.num_workers} workers in every one: {example}"
        )
    return f"All workers are equally fast, so there is little to wait for: {example}"


def _scenario(
    workers: int, servers: int, clocks: int, stragglers: Stragglers, compute_s: float, latency_s: float, seed: int
) -> Scenario:
    for name, value in (("--workers", workers), ("--servers", servers), ("--clocks", clocks)):
        if value < 1:
            raise UsageError(f"{name} is {value}, expected 1 or more.")
    if compute_s <= 0 or latency_s < 0:
        raise UsageError(
            f"--compute-s is {compute_s}, expected more than 0; --latency-s is {latency_s}, expected 0 or more."
        )
    return Scenario(
        bsp(),
        num_workers=workers,
        num_servers=servers,
        num_clocks=clocks,
        compute_s=(compute_s * (1 - _SPREAD), compute_s * (1 + _SPREAD)),
        stragglers=stragglers,
        network=Network(latency_s=(latency_s / 2, latency_s * 3 / 2)),
        retry_s=100 * (latency_s + compute_s * stragglers.factor),
        seed=seed,
    )


def _under(scenario: Scenario, policy: Consistency) -> Scenario:
    """Return the scenario under a policy."""
    return replace(scenario, consistency=policy, refresh=0.0 if policy.deliver == "on_clock" else 1.0)


def _policies(texts: Iterable[str]) -> list[Consistency]:
    names = [name for text in texts for name in ([text] if "=" in text else text.split(","))]
    return list(dict.fromkeys(Consistency.parse(name) for name in names))


def _table(scenario: Scenario, reference: Outcome, outcomes: Iterable[Outcome]) -> Table:
    from rich.table import Table

    title = f"{scenario.num_workers} workers, {scenario.num_clocks} clocks each, on virtual time"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("consistency", header_style="dim", overflow="fold")
    for heading in ("clocks/s", "per worker", "vs bsp", "waiting", "clocks behind", "at most"):
        table.add_column(heading, justify="right", header_style="dim")
    for outcome in outcomes:
        table.add_row(
            str(outcome.consistency),
            f"{outcome.clocks_per_s:,.1f}",
            _span(outcome.clocks_per_s_by_worker),
            f"{outcome.clocks_per_s / reference.clocks_per_s:.2f}x",
            f"{outcome.wait_share:.0%}",
            f"{outcome.mean_lag:.2f}",
            f"{outcome.max_lag}",
        )
    return table


def _span(rates: tuple[float, ...]) -> str:
    low, high = f"{min(rates):,.1f}", f"{max(rates):,.1f}"
    return low if low == high else f"{low} .. {high}"


def _print(table: Table, told: str) -> None:
    from rich.console import Console

    console = Console()
    console.print(table)
    console.print()
    console.print(told, highlight=False)


def _as_json(scenario: Scenario, reference: Outcome, outcomes: Iterable[Outcome], told: str) -> dict[str, object]:
    return {
        "workers": scenario.num_workers,
        "servers": scenario.num_servers,
        "clocks": scenario.num_clocks,
        "seed": scenario.seed,
        "policies": [
            {
                "consistency": str(outcome.consistency),
                "clocks_per_s": outcome.clocks_per_s,
                "clocks_per_s_by_worker": outcome.clocks_per_s_by_worker,
                "speedup_over_bsp": outcome.clocks_per_s / reference.clocks_per_s,
                "wait_share": outcome.wait_share,
                "mean_lag_clocks": outcome.mean_lag,
                "max_lag_clocks": outcome.max_lag,
                "differentials": outcome.differentials,
            }
            for outcome in outcomes
        ],
        "told": told,
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one simulation. A clock counts for throughput once all servers have applied its update.

    `differentials` counts the reads by clock differential: -1 is as fresh as can be, -(bound + 1) as old as allowed.
    """

    consistency: Consistency
    clocks_per_s: float
    clocks_per_s_by_worker: tuple[float, ...]
    wait_share: float
    differentials: dict[int, int]

    @property
    def mean_lag(self) -> float:
        """Return the mean lag of values behind the freshest possible ones, in clocks."""
        lags = sum((-1 - differential) * count for differential, count in self.differentials.items())
        return lags / sum(self.differentials.values())

    @property
    def max_lag(self) -> int:
        """Return the largest lag of values, in clocks."""
        return -1 - min(self.differentials)


def rehearse(scenario: Scenario) -> Outcome:
    """Run a scenario and measure it.

    Raises:
        Violation: the core broke a rule.
    """
    world = World(scenario)
    history = world.run()
    rates = tuple(_rate(actor, history) for _, actor in sorted(world.actors.items()))
    busy_s = sum(actor.finished_at for actor in world.actors.values())
    return Outcome(
        consistency=scenario.consistency,
        clocks_per_s=sum(rates),
        clocks_per_s_by_worker=rates,
        wait_share=sum(actor.waited_s for actor in world.actors.values()) / busy_s,
        # A late worker of a quorum may read values newer than its clock; it then goes on from there.
        differentials=dict(sorted(Counter(min(-1, read.differential) for read in history.reads).items())),
    )


def _rate(actor: SimulatedWorker, history: History) -> float:
    """Return the clocks a second of one worker, over the time until its own last clock."""
    made = history.made[actor.worker, actor.incarnation]
    refused = {push_id for _, push_id in history.refused}
    return sum(push_id not in refused for push_id, _ in made) / actor.finished_at
