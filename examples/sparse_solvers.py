"""Two solvers of sparse logistic regression: what a worker pushes, and what the servers make of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sparse_batches import Batch
from sparse_samples import Ids, Samples

import paceline

RATE = 0.8  # of the proximal steps of all workers in a clock together
ALPHA = 1.0  # of FTRL
RESET_EVERY = 10  # clocks from one in which KKT lets everything pass to the next
NUM_BATCHES = {"proximal": 1, "ftrl": 16}  # that a worker cuts its share into
KEYS = paceline.filters.KeyCache()


@dataclass(frozen=True, slots=True)
class Solver:
    """What a worker pushes, and what the servers make of it."""

    rule: paceline.update.RuleSpec
    batches: Sequence[Batch]
    divisors: Sequence[float]  # of the gradient of each batch
    filters: dict[str, tuple[paceline.filters.FilterSpec, ...]]  # of each run, by its name


def proximal(samples: Samples, ids: Ids, l1: float, size: int, rank: int) -> Solver:
    """Push all ids in each clock, as the penalty pulls at the weights that are pushed, and at these alone."""
    share = Batch.of(samples.every(size, rank), ids)
    kkt = paceline.filters.KKT(l1, reset_every=RESET_EVERY)
    runs = {"no filters": (), "key caching": (KEYS,), "key caching and KKT": (KEYS, kkt)}
    # The mean over what a worker has on average: so the pushes of uneven shares add up to the mean over all samples.
    return Solver(paceline.update.Proximal(RATE / size, l1=l1), [share], [len(samples) / size], runs)


def ftrl(samples: Samples, l1: float, num_pushes: int, size: int, rank: int) -> Solver:
    """Push the ids of one batch in each clock; the penalty is against the sum of all gradients of a run."""
    share, num_batches = samples.every(size, rank), NUM_BATCHES["ftrl"]
    parts = [share.every(num_batches, number) for number in range(num_batches)]
    rule = paceline.update.FTRL(ALPHA, l1=l1 * num_pushes)
    batches = [Batch.of(part, np.unique(part.ids)) for part in parts]
    return Solver(rule, batches, [len(part) for part in parts], {"no filters": (), "key caching": (KEYS,)})
