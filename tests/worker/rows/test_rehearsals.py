"""Row tables under any order of events, as whole nodes: no read is older than the bound, no own write is lost."""

from collections import Counter

import pytest
import torch
from tests.worker.rows.rehearsal import POINTS, Rehearsal
from tests.worker.rows.truth import digits

from paceline.core.consistency import Consistency, essp, ssp

BOUNDED = tuple(point(s) for s in (0, 1, 2, 4, 8) for point in (ssp, essp))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_no_fault_of_a_carrier_shows_in_what_is_read(point: Consistency) -> None:
    seed = POINTS.index(point)
    kept = (True, None)[seed % 2]
    run = Rehearsal(seed, point, num_servers=1 + seed % 3, roughness=0.03, keep=kept, max_rows=6 * (seed % 2))
    run.run(350)
    assert run.num_reads > 20
    assert min(run.world.faults[fault] for fault in ("cut", "lost", "doubled", "overtaken")) > 0


def test_a_worker_that_dies_stops_no_other() -> None:
    for seed, point in enumerate((ssp(1), essp(1))):
        Rehearsal(seed, point, roughness=0.01).run(250, crash_at=120)


def test_reading_without_own_writes_promises_the_bound_all_the_same() -> None:
    Rehearsal(5, ssp(2), roughness=0.02, reads_own_writes=False).run(250)


def test_values_tell_which_pushes_they_contain() -> None:
    assert digits(4.0**2 + 1.0) == [1, 0, 1]
    assert digits(2 * 4.0) == [0, 2], "a push that counts twice shows"


@pytest.mark.campaign
@pytest.mark.parametrize("point", BOUNDED, ids=str)
def test_a_hundred_thousand_rows_are_read_and_none_is_too_old_and_no_own_write_is_lost(point: Consistency) -> None:
    """Read the tenth part of them for each of the ten points, with stragglers, faults, and a crash in every run."""
    num_reads, seed = 0, 1000 * BOUNDED.index(point)
    faults = Counter[str]()
    while num_reads < 10_000:
        run = Rehearsal(seed, point, num_servers=1 + seed % 3, roughness=0.02, most_ids=20, straggler=seed % 3)
        run.run(700, crash_at=400)
        num_reads, seed = num_reads + run.num_reads, seed + 1
        faults += run.world.faults
    assert min(faults[fault] for fault in ("cut", "lost", "doubled", "overtaken")) > 0
