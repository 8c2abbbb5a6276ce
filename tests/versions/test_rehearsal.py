"""Whatever is drawn, readers get what was published, whole, and feeds of rows are the table at their cursor.

Gates count each sample once, within the bound.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.versions.feed_rehearsal import rehearse_feeds
from tests.versions.gates import rehearse_gate
from tests.versions.rehearsal import World, small_and_quick


@pytest.mark.parametrize("num_seeds", [60, pytest.param(3000, marks=pytest.mark.campaign)])
def test_no_drawn_run_of_readers_and_relays_breaks_a_promise(num_seeds: int) -> None:
    num_reads, counts = 0, Counter[str]()
    with small_and_quick():
        for seed in range(num_seeds):
            try:
                history = World(seed).run()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            num_reads += history.num_reads
            counts += history.counts
    assert num_reads > 10 * num_seeds
    assert counts["a version that comes"] > num_seeds
    assert counts["a compressed difference"] > num_seeds
    assert counts["no bytes of a version that comes no further"] > num_seeds // 4


@pytest.mark.parametrize("num_samples", [20_000, pytest.param(1_000_000, marks=pytest.mark.campaign)])
def test_no_drawn_run_of_a_gate_breaks_a_promise(num_samples: int) -> None:
    num_used, seed = 0, 0
    while num_used < num_samples:
        try:
            num_used += rehearse_gate(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seed += 1


MUST_HAPPEN_TO_FEEDS = (
    "a cursor checked",
    "a feed begun anew",
    "rows gone",
    "a log ended",
    "a consumer restarted",
    "a server killed",
    "a line cut",
)


@pytest.mark.parametrize("num_seeds", [16, pytest.param(1000, marks=pytest.mark.campaign)])
def test_no_drawn_run_of_feeds_breaks_a_promise(num_seeds: int) -> None:
    counts = Counter[str]()
    for seed in range(num_seeds):
        try:
            counts += rehearse_feeds(seed).counts
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert counts["a cursor checked"] > 10 * num_seeds
    assert not [name for name in MUST_HAPPEN_TO_FEEDS if not counts[name]], counts
