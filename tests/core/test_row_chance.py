"""Row tables by chance: seeded runs of the cores, in which frames are lost, late, doubled and overtaken."""

import pytest
from tests.core.row_chance import chance


def test_seeded_runs_keep_every_promise() -> None:
    stages = [chance(seed) for seed in range(100)]
    assert sum(stage.num_done for stage in stages) > 1000
    assert sum(stage.num_again for stage in stages) > 0, "no read found that its rows had gone"


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1000, 21_000, 2500))
def test_twenty_thousand_seeds_keep_every_promise(first: int) -> None:
    for seed in range(first, first + 2500):
        chance(seed)
