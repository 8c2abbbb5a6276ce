"""A factorization machine over rows of features, and the batches that it learns from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sparse_samples import Samples
from torch import Tensor, nn

import paceline

INTERCEPT = torch.tensor([-1])  # an id like any other: the weight that all samples have
NUM_FACTORS = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples, and the distinct ids in them."""

    ids: Tensor  # int64 (m,)
    labels: Tensor  # (n,)
    owners: Tensor  # of each entry its sample, its place among the ids, and its value
    places: Tensor
    values: Tensor

    @staticmethod
    def of(samples: Samples) -> "Batch":
        """Return samples as tensors."""
        ids, places = np.unique(samples.ids, return_inverse=True)
        arrays = (ids, samples.labels.astype(np.float32), samples.owners, places, samples.values.astype(np.float32))
        return Batch(*map(torch.from_numpy, arrays))

    def summed(self, entries: Tensor) -> Tensor:
        """Return for each sample the sum over its entries."""
        return entries.new_zeros((len(self.labels), *entries.shape[1:])).index_add(0, self.owners, entries)


@dataclass(frozen=True, slots=True)
class Model:
    """A weight for each feature; perhaps factors too, and perhaps a network that sees the factors of a sample."""

    weights: paceline.RowTable
    factors: paceline.RowTable | None
    network: nn.Module | None

    def pull(self, ids: Tensor) -> list[Tensor]:
        """Return the rows of some ids, ready for gradients; those of different tables are under way together."""
        asked = [self.weights.pull_later(torch.cat((ids, INTERCEPT)))]
        asked += [self.factors.pull_later(ids)] if self.factors else []
        return [each.result().requires_grad_() for each in asked]

    def push(self, ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Push the gradients of pulled rows."""
        self.weights.push(torch.cat((ids, INTERCEPT)), rows[0].grad)
        if self.factors:
            self.factors.push(ids, rows[1].grad)

    def scores(self, batch: Batch, rows: Sequence[Tensor]) -> Tensor:
        """Return the log odds of each sample, (n,)."""
        weights, *factors = rows
        scores = batch.summed(weights[batch.places, 0] * batch.values) + weights[-1, 0]
        if factors:
            entries = factors[0][batch.places] * batch.values[:, None]
            sums = batch.summed(entries)
            scores = scores + 0.5 * (sums.square() - batch.summed(entries.square())).sum(1)  # over all pairs
            if self.network:
                scores = scores + self.network(sums)[:, 0]
        return scores


def new_network() -> nn.Module:
    """Return a network that says 0 until it has learned something, so that factors get no random gradients from it."""
    torch.manual_seed(0)
    last = nn.Linear(32, 1)
    nn.init.zeros_(last.weight)
    return nn.Sequential(nn.Linear(NUM_FACTORS, 32), nn.ReLU(), last)
