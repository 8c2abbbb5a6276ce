"""Scenarios drawn from a seed: every seed turns on another mix of faults, so that rare mixes come up too."""

from __future__ import annotations

from random import Random

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
from paceline.simulate.scenario import Faults, Network, Scenario, Stragglers

STALENESSES = (0, 1, 2, 4, 8)

POINTS: tuple[Consistency, ...] = (
    bsp(),
    asynchronous(),
    backup(1),
    backup(2),
    *(ssp(s) for s in STALENESSES),
    *(essp(s) for s in STALENESSES),
    Consistency(bound=2, visible="on_clock"),
    Consistency(bound=1, visible="on_clock", deliver="on_clock"),
    Consistency(bound=0, visible="on_clock", deliver="on_clock"),
    Consistency(bound=None, visible="on_clock"),
    Consistency(bound=None, deliver="on_clock"),
    Consistency(bound=None, visible="on_clock", deliver="on_clock", backups=1),
    Consistency(bound=1, visible="on_clock", backups=1),
)


def draw(seed: int, points: tuple[Consistency, ...] = POINTS, num_clocks: tuple[int, int] = (3, 30)) -> Scenario:
    """Return the scenario of this seed; the points take turns, all else is drawn."""
    rng = Random(seed)
    network = _draw_network(rng)
    return Scenario(
        consistency=points[seed % len(points)],
        others=tuple(rng.choice(points) for _ in range(rng.choice((0, 0, 1, 2)))),
        num_pushes=rng.choice((1, 1, 3)),
        num_workers=rng.choice((1, 2, 2, 3, 3, 4, 5)),
        num_servers=rng.choice((1, 1, 2, 3)),
        num_clocks=rng.randint(*num_clocks),
        compute_s=rng.choice(((0.001, 0.002), (0.009, 0.011), (0.001, 0.03))),
        apply_s=rng.choice((0.0, 0.0, 0.001)),
        stragglers=_draw_stragglers(rng),
        network=network,
        fate=_draw_fate(rng),
        refresh=rng.choice((0.0, 0.5, 1.0)),
        # Where nothing is dropped no retry may be needed: it would come after the end of all time.
        retry_s=0.02 if network.drop else 1e6,
        seed=seed,
        rows=tuple(rng.choice(points) for _ in range(rng.choice((0, 0, 1, 2)))),
    )


def _draw_stragglers(rng: Random) -> Stragglers:
    kind = rng.choice(("none", "transient", "persistent"))
    return Stragglers(kind, share=rng.uniform(0.05, 0.4), factor=rng.uniform(2, 8))


def _draw_network(rng: Random) -> Network:
    latency_s = rng.choice(((0.0001, 0.0005), (0.0001, 0.01)))
    if rng.random() < 0.4:
        return Network(latency_s)

    def some(most: float) -> float:
        return rng.uniform(0, most) if rng.random() < 0.5 else 0.0

    return Network(latency_s, drop=some(0.1), duplicate=some(0.3), reorder=some(0.3), cut=some(0.01), spoil=some(0.02))


def _draw_fate(rng: Random) -> Faults:
    if rng.random() < 0.4:
        return Faults()
    return Faults(
        deaths=rng.randint(0, 2),
        pauses=rng.randint(0, 1),
        stops=rng.randint(0, 1),
        stalls=rng.choice((0, 0, 1, 2)),
        restart=rng.random() < 0.5,
        joins=rng.choice((0, 0, 1, 2)),
        early=rng.choice((0.0, 0.0, 0.3)),
    )
