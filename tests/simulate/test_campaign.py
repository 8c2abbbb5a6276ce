"""A seeded campaign: at least 100,000 reads without a violation, in which every rare thing happened."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.simulate.campaign import run
from tests.simulate.swarm import STALENESSES, draw

from paceline.core.consistency import Consistency, essp, ssp
from paceline.simulate.scenario import Scenario
from paceline.simulate.world import World

BOUNDED: tuple[Consistency, ...] = tuple(point(s) for s in STALENESSES for point in (ssp, essp))
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("least_reads", [400, pytest.param(10_000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("point", BOUNDED, ids=str)
def test_of_all_reads_under_a_bound_none_is_too_old(point: Consistency, least_reads: int) -> None:
    """With ten points, that is a hundred thousand reads in the campaign."""

    def longer(seed: int) -> Scenario:
        drawn = draw(seed, (point,), num_clocks=(60, 120))
        return replace(drawn, num_workers=5, num_servers=1 + seed % 2, others=(), rows=(point,), num_pushes=1)

    num_reads, seed = 0, 1000 * BOUNDED.index(point)
    while num_reads < least_reads:
        totals = run(range(seed, seed + 2), longer)
        assert totals.broken == {}
        num_reads, seed = num_reads + totals.num_reads, seed + 2


def test_a_swarm_over_all_points_keeps_every_rule_and_everything_rare_happens() -> None:
    totals = run(range(260))
    assert totals.broken == {}
    assert totals.missing == []


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1000, 101_000, 5000))
def test_a_hundred_thousand_seeds_keep_every_rule(first: int) -> None:
    totals = run(range(first, first + 5000))
    assert totals.broken == {}
    assert totals.missing == []


@pytest.mark.parametrize("seed", [3, 17, 40])
def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    assert trace_hash(seed) == trace_hash(seed)
    assert trace_hash(seed) != trace_hash(seed + 1)


def test_a_trace_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    here = [trace_hash(seed) for seed in range(8)]
    for hash_seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", "from tests.simulate.test_campaign import main; main()"]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
        )
        assert done.stdout.split() == here


def trace_hash(seed: int) -> str:
    """Return a hash over every event and every effect of this seed."""
    world = World(draw(seed), trace=[])
    world.run()
    return hashlib.sha256("\n".join(world.trace or []).encode()).hexdigest()


def main() -> None:
    """Print the hashes of the first seeds."""
    for seed in range(8):
        print(trace_hash(seed))
