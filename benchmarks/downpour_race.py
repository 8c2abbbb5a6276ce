"""Asynchronous workers in simulated time: they fetch, compute for a while, and push what they found on old values.

The servers' part is real: one shard with the update rule of a table. Workers, network and clock are an event loop.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.partition import Range
from paceline.update.named_rules import resolve
from paceline.update.rules import RuleSpec
from paceline.update.shard import Shard
from paceline.update.summing import Contribution
from paceline.update.table import Segment, TableSpec

BATCH_SIZE: Final = 8
NUM_TRAINING: Final = 1440
NUM_HIDDEN: Final = 48
MAX_SAMPLES: Final = 20 * NUM_TRAINING
UPDATES_PER_EPOCH: Final = NUM_TRAINING // BATCH_SIZE
TARGET_LOSS: Final = 0.1  # over all training examples
EVALUATE_EVERY: Final = 36  # updates, a fifth of an epoch
COMPUTE_S: Final = (0.5, 1.5)  # virtual seconds that a gradient takes, evenly distributed

_SEGMENTS: Final = (
    Segment("hidden.weight", (NUM_HIDDEN, 64)),
    Segment("hidden.bias", (NUM_HIDDEN,)),
    Segment("out.weight", (10, NUM_HIDDEN)),
    Segment("out.bias", (10,)),
)


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits: images (n, 64) float32 in 0..1, labels (n,)."""

    images: Tensor
    labels: Tensor

    @staticmethod
    def load() -> "Digits":
        """Load the training examples that scikit-learn brings along."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(labels))[:NUM_TRAINING]
        return Digits(torch.from_numpy(images[order]).float() / 16, torch.from_numpy(labels[order]))

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Yield indices of batches for ever, epoch by epoch in another order."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from torch.randperm(NUM_TRAINING, generator=generator).split(BATCH_SIZE)

    def loss(self, flat: Tensor, chosen: Tensor | slice = slice(None)) -> Tensor:
        """Return the loss of a perceptron whose parameters are given flat."""
        parts = flat.split([segment.numel for segment in _SEGMENTS])
        weight, bias, out_weight, out_bias = (p.view(s.shape) for p, s in zip(parts, _SEGMENTS, strict=True))
        hidden = functional.relu(functional.linear(self.images[chosen], weight, bias))
        return functional.cross_entropy(functional.linear(hidden, out_weight, out_bias), self.labels[chosen])

    def gradient(self, flat: Tensor, chosen: Tensor) -> Tensor:
        """Return the gradient of the loss of a batch."""
        leaf = flat.requires_grad_()
        return torch.autograd.grad(self.loss(leaf, chosen), leaf)[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run went.

    Args:
        samples: until the target was reached; None where it was not, within `MAX_SAMPLES`.
        staleness: how many updates of others lay between fetch and push, in the mean after the warm start.
        seconds: of virtual time.
    """

    samples: int | None
    staleness: float
    seconds: float


def race(digits: Digits, rule: RuleSpec, num_workers: int, warm_updates: int, seed: int) -> Outcome:
    """Train until the target or the end of the samples: worker 0 alone through the warm start, then all."""
    random, batches, shard = np.random.default_rng(seed), digits.batches(seed), new_shard(rule, seed)
    seen: dict[int, tuple[Tensor, int]] = {}  # the values that each worker computes on, and how old they are
    events: list[tuple[float, int]] = []  # when each worker pushes
    now_s, staleness, loss = 0.0, 0, math.inf

    def fetch(worker: int) -> None:
        seen[worker] = (shard.values.clone(), shard.version)
        heapq.heappush(events, (now_s + float(random.uniform(*COMPUTE_S)), worker))

    for worker in range(1 if warm_updates else num_workers):
        fetch(worker)
    while loss > TARGET_LOSS and shard.version * BATCH_SIZE < MAX_SAMPLES:
        now_s, worker = heapq.heappop(events)
        values, version = seen[worker]
        staleness += shard.version - version
        shard.apply([Contribution(digits.gradient(values, next(batches)))])
        fetch(worker)
        if shard.version == warm_updates:
            for other in range(1, num_workers):
                fetch(other)
        if shard.version % EVALUATE_EVERY == 0:
            loss = digits.loss(shard.values).item()
    after = max(1, shard.version - warm_updates)
    return Outcome(shard.version * BATCH_SIZE if loss <= TARGET_LOSS else None, staleness / after, now_s)


def new_shard(rule: RuleSpec, seed: int) -> Shard:
    """Return a server's part of a table, with the values that torch's own layers begin with."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, NUM_HIDDEN), torch.nn.ReLU(), torch.nn.Linear(NUM_HIDDEN, 10))
    spec = TableSpec("model", _SEGMENTS, "float32", rule, "asynchronous", "samples", "ignore")
    shard = Shard(spec, Range(0, 0, spec.numel), rule=resolve(rule, allowed=None))
    shard.store(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    return shard
