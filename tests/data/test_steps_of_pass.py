"""From the steps of a worker follows whether others take one more for the batch that they have more."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from tests.data.test_sharding import Recorder, loader_of

from paceline.data.partition import Sharding
from paceline.data.sharding import shard_source

Steps = Callable[[int, int], bool]  # whether a loop steps after so many batches, of so many in the pass


def by_one(done: int, num: int) -> bool:
    return True


def to_the_end(usual: int) -> Steps:
    return lambda done, num: done % usual == 0 or done == num


def whole_only(usual: int) -> Steps:
    return lambda done, num: done % usual == 0


def at_the_end(done: int, num: int) -> bool:
    return False


def clocks_of(num_batches: int, others: int, steps: Steps, behind: int) -> int:
    """Return the clocks of a worker in a pass in which another one has so many batches."""
    recorder = Recorder(1, 2)
    made = [0]
    sharding = Sharding(1, 2, 0, recorder.sharding.on_samples, recorder.sharding.on_missing, clock=lambda: made[0])
    mine: Iterator[object] = iter(shard_source(loader_of(num_batches + others, 1), sharding))
    for done, _ in enumerate(mine, 1):
        made[0] += steps(done, num_batches)
    return made[0] + recorder.num_skipped + behind


# With steps of several batches a pass has as many as one of them has: else it does not show how many that are.
LOOPS = [
    *((by_one, 0, num_batches) for num_batches in range(1, 6)),
    *((to_the_end(usual), 0, num_batches) for usual in (2, 3, 4) for num_batches in range(usual, 14)),
    *((at_the_end, 1, num_batches) for num_batches in range(1, 6)),
]


@pytest.mark.parametrize(("steps", "behind", "num_batches"), LOOPS)
def test_workers_with_one_batch_less_finish_as_many_clocks(steps: Steps, behind: int, num_batches: int) -> None:
    theirs = sum(steps(done, num_batches + 1) for done in range(1, num_batches + 2)) + behind
    assert clocks_of(num_batches, num_batches + 1, steps, behind) == theirs


# Where whole steps take all batches, as six do for three each, the loop may be one that steps at the end, too.
@pytest.mark.parametrize(("usual", "num_batches"), [(2, 5), (2, 7), (3, 4), (3, 5), (3, 11), (4, 6), (4, 7), (4, 13)])
def test_loops_that_step_with_the_usual_number_alone(usual: int, num_batches: int) -> None:
    steps = whole_only(usual)
    assert clocks_of(num_batches, num_batches + 1, steps, 0) == (num_batches + 1) // usual


def test_a_loop_that_leaves_batches_out_is_counted_by_batches() -> None:
    def steps(done: int, num: int) -> bool:
        return done != 3

    assert clocks_of(6, 7, steps, 0) == 6
    assert all(one < other for one, other in pairwise([clocks_of(n, n + 1, steps, 0) for n in range(4, 8)]))
