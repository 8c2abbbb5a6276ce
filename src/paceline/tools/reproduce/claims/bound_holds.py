"""Anchor A1: no read is ever older than its bound, whatever dies, stalls or is lost on the way."""

from __future__ import annotations

from collections import Counter
from typing import Final

from paceline.core.consistency import Consistency
from paceline.errors import PacelineError
from paceline.simulate.history import Violation
from paceline.simulate.scenario import Faults, Network, Scenario, Stragglers
from paceline.simulate.world import World
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot

_BOUNDS: Final = (0, 1, 2, 4, 8)
_READS: Final = {True: 20_000, False: 100_000}


def _run(options: ClaimOptions) -> Finding:
    ages: dict[int, Counter[int]] = {bound: Counter() for bound in _BOUNDS}
    num_killed, seed = 0, options.seed
    while sum(each.total() for each in ages.values()) < _READS[options.is_quick]:
        for bound in _BOUNDS:
            world = World(_scenario(bound, seed))
            try:
                history = world.run()
            except Violation as broken:
                raise PacelineError(f"seed {seed}, bound {bound}: the core broke a promise: {broken}") from broken
            ages[bound].update(-1 - min(-1, read.differential) for read in history.reads)
            num_killed += sum(actor.incarnation for actor in world.actors.values())
        seed += 1
    total = sum(each.total() for each in ages.values())
    too_old = sum(count for bound, each in ages.items() for age, count in each.items() if age > bound)
    names = tuple(str(bound) for bound in _BOUNDS)
    return Finding(
        (
            Check(
                "reads that were checked",
                f"at least {_READS[options.is_quick]:,}",
                f"{total:,}",
                total >= _READS[options.is_quick],
            ),
            Check("reads older than the bound", "0", str(too_old), too_old == 0),
            Check(
                "own updates that a read lacked, updates lost or applied twice",
                "0",
                "0: the history's checkers found none",
                True,
            ),
            Check("workers that were killed and came back", "1 or more", str(num_killed), num_killed > 0),
        ),
        (
            Plot(
                "Oldest read under each bound",
                "bound s",
                "clocks behind",
                (
                    Curve("oldest", names, tuple(float(max(ages[bound])) for bound in _BOUNDS)),
                    Curve("allowed", names, tuple(map(float, _BOUNDS)), is_reference=True),
                ),
                "bars",
            ),
        ),
        "The real cores on virtual time: 6 workers, 2 servers, one clock in ten four times as long, messages that "
        "are lost, doubled and overtaken, connections that "
        "are cut, and a worker that is killed and comes back. Checkers that share no code with the protocol look at "
        "every read and update.",
    )


def _scenario(bound: int, seed: int) -> Scenario:
    return Scenario(
        Consistency.parse(f"ssp:{bound}"),
        num_workers=6,
        num_servers=2,
        num_clocks=60,
        stragglers=Stragglers.parse("transient:0.1:4"),
        network=Network(drop=0.01, duplicate=0.01, reorder=0.02, cut=0.002),
        fate=Faults(deaths=1, restart=True),
        refresh=0.5,
        seed=seed,
    )


CLAIM: Final = Claim(
    "A1",
    "No read is older than its bound, and no update is lost",
    "Ho et al. 2013",
    "the bound",
    "virtual",
    (0.4, 1.6),
    _run,
    ("A1",),
)
