"""Scenarios about row tables, drawn from a seed: little is asked for twice, much overtakes, and caches are small."""

from __future__ import annotations

from random import Random

from paceline.core.consistency import Consistency, asynchronous, essp, ssp
from paceline.simulate.scenario import Faults, Network, Scenario

# Deliveries are what can come in a wrong order, so most tables have some.
POINTS: tuple[Consistency, ...] = (
    *(essp(s) for s in (0, 1, 2, 4)),
    *(essp(s) for s in (1, 2)),
    *(ssp(s) for s in (0, 1, 2)),
    Consistency(bound=1, visible="on_clock", deliver="on_clock"),
    Consistency(bound=None, deliver="on_clock"),
    asynchronous(),
)


def draw_rows(seed: int) -> Scenario:
    """Return the scenario of this seed; the points take turns, all else is drawn."""
    rng = Random(f"rows {seed}")
    drop = rng.choice((0.0, 0.0, 0.1, 0.2))
    return Scenario(
        consistency=asynchronous(),
        rows=(POINTS[seed % len(POINTS)], rng.choice(POINTS)),
        num_pushes=rng.choice((1, 1, 3)),
        num_workers=rng.choice((2, 2, 3, 4)),
        num_servers=rng.choice((1, 1, 2)),
        num_clocks=rng.randint(5, 20),
        compute_s=rng.choice(((0.001, 0.002), (0.001, 0.01))),
        network=Network(
            latency_s=rng.choice(((0.0001, 0.0005), (0.0001, 0.005), (0.0001, 0.02))),
            drop=drop,
            duplicate=rng.choice((0.0, 0.2, 0.4)),
            reorder=rng.choice((0.0, 0.2, 0.5)),
            cut=rng.choice((0.0, 0.02, 0.1)),
        ),
        fate=Faults(deaths=rng.choice((0, 0, 1)), pauses=rng.choice((0, 0, 1)), restart=rng.random() < 0.5),
        refresh=rng.choice((0.0, 0.0, 0.3)),
        retry_s=0.02 if drop else 1e6,
        evicted=rng.choice((0.0, 0.1, 0.5)),
        seed=seed,
    )
