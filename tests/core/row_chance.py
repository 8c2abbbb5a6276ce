"""A seeded run of the row stage: what happens next is drawn, most of it being that messages arrive."""

from __future__ import annotations

import random

from tests.core.row_stage import RowStage

from paceline.core.consistency import Consistency, asynchronous, bsp, essp, ssp

POINTS: tuple[Consistency, ...] = (
    bsp(),
    asynchronous(),
    *(point(s) for s in (0, 1, 2, 4) for point in (ssp, essp)),
    Consistency(2, "on_clock"),
    Consistency(1, "on_clock", "on_clock"),
)


def chance(seed: int, num_steps: int = 300) -> RowStage:
    """Run a seed; raises AssertionError where a promise is broken."""
    dice = random.Random(seed)
    stage = RowStage(POINTS[seed % len(POINTS)], 3, dice.randint(1, 2))
    roughness = dice.choice([0.0, 0.05, 0.15])
    for _ in range(num_steps):
        act(stage, dice, roughness)
    stage.finish()
    return stage


def act(stage: RowStage, dice: random.Random, roughness: float) -> None:
    """Do something."""
    rank, server = dice.randrange(3), dice.randrange(stage.num_servers)
    rows = set(dice.sample(range(6), dice.randrange(5)))
    kind = dice.random()
    if kind < roughness:
        fault = dice.choice(["cut", "cut", "lost", "doubled", "doubled", "overtaken", "overtaken", "overtaken"])
        if fault == "doubled":
            stage.to_server(rank, server, copy=True)
            stage.to_worker(rank, server, copy=True)
        elif fault == "overtaken":
            stage.overtake(rank, server)
        elif fault == "cut" or dice.random() < 0.1:
            stage.lose(rank, server, reconnects=fault == "cut")
        return
    kind = dice.random()
    if kind < 0.06:
        stage.push(rank, rows)
    elif kind < 0.16:
        stage.read(rank, rows, refresh=dice.random() < 0.15)
    elif kind < 0.24:
        stage.tick(rank)
    elif kind < 0.243:
        stage.evict(rank, rows)
    elif kind < 0.246:
        stage.wait()
    elif kind < 0.6:
        stage.to_server(rank, server)
    else:
        stage.to_worker(rank, server)
