"""Samples as arrays that gradients come from, and how good scores are."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from sparse_samples import Floats, Ids, Samples


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples, and the ids whose weights they need, sorted: other features count as 0."""

    ids: Ids
    labels: Floats
    owners: Ids  # of each entry its sample, its place among the ids, and its value
    places: Ids
    values: Floats

    @staticmethod
    def of(samples: Samples, ids: Ids) -> "Batch":
        """Return samples, seen through sorted ids."""
        known = np.isin(samples.ids, ids)
        places = np.searchsorted(ids, samples.ids[known])
        return Batch(ids, samples.labels, samples.owners[known], places, samples.values[known])

    def scores(self, weights: Floats) -> Floats:
        """Return the log odds of each sample."""
        return np.bincount(self.owners, self.values * weights[self.places], minlength=len(self.labels))

    def gradient(self, weights: Floats) -> Floats:
        """Return the gradient of the log loss, summed over the samples."""
        errors = 0.5 + 0.5 * np.tanh(0.5 * self.scores(weights)) - self.labels
        return np.bincount(self.places, self.values * errors[self.owners], minlength=len(self.ids))


def log_loss(scores: Floats, labels: Floats) -> float:
    """Return the mean log loss of scores, which are log odds."""
    return float(np.mean(np.logaddexp(0.0, scores) - labels * scores))


def area_under_curve(scores: Floats, labels: Floats) -> float:
    """Return the chance that a positive sample scores above a negative one; equal scores count as half."""
    order = np.argsort(scores, kind="stable")
    edges = np.flatnonzero(np.diff(scores[order], prepend=np.nan, append=np.nan))
    ranks = np.empty(len(scores))
    for start, end in pairwise(edges):
        ranks[order[start:end]] = (start + end + 1) / 2
    num_positive = labels.sum()
    above = ranks[labels > 0].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * (len(labels) - num_positive)))
