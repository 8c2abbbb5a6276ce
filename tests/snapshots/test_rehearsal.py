"""Whatever is drawn, a snapshot that is visible is whole, of one cut, and what a job goes on from (K1 to K5)."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.snapshots.rehearsal import POINTS, rehearse

MUST_HAPPEN = (
    "a snapshot reported",
    "one with changed rows",
    "a snapshot that was not made",
    "a job resumed",
    "a worker killed",
    "the writer killed",
    "a server killed while a snapshot is written",
    "the disk full",
    "power cut while a snapshot is written",
)


@pytest.mark.parametrize("num_seeds", [8 * len(POINTS), pytest.param(2000, marks=pytest.mark.campaign)])
def test_no_drawn_run_of_snapshots_breaks_a_promise(num_seeds: int) -> None:
    counts, num_checked = Counter[str](), 0
    for seed in range(num_seeds):
        try:
            history, happened = rehearse(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_checked += history.num_checked
        counts += happened
    assert num_checked > num_seeds
    assert not [name for name in MUST_HAPPEN if not counts[name]], counts
