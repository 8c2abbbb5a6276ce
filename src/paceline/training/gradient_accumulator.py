"""Adds up the gradients of the slices of a clock, each weighted by its samples, to their mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.data.slicing import ClockSlices
from paceline.training.embedding_gradients import EmbeddingLookups


@dataclass(slots=True)
class GradientAccumulator:
    """Sum of the gradients of parameters and embeddings over slices, each weighted by its samples."""

    slices: ClockSlices
    lookups: EmbeddingLookups
    # Sum of gradient * samples since the last mean, by parameter, and of samples.
    _sums: dict[Tensor, Tensor] = field(default_factory=dict[Tensor, Tensor])
    _num_samples: float = 0.0

    def add_slice(self, parameters: Iterable[Tensor], samples: float | None) -> bool:
        """Add the gradients of a slice if another one follows in this clock; return whether one does."""
        if not self.slices.claim_next():
            return False
        weight = self.slices.weight if samples is None else samples
        for parameter in parameters:
            if parameter.grad is not None:
                self._add(parameter, parameter.grad.detach(), weight)
        self.lookups.set_aside(weight)
        self._num_samples += weight
        return True

    def finish_mean(self, parameters: Iterable[Tensor], samples: float | None) -> float | None:
        """Set the gradients to the mean over all slices of the clock, the last one included; return its samples.

        Where the clock has one slice or there is no current slice, gradients stay as they are.
        """
        if not self.slices.num_samples:
            return samples
        weight = self.slices.weight if samples is None else samples
        if not self._num_samples:  # an earlier slice without a step has no part in the weight
            return weight
        total, self._num_samples = self._num_samples + weight, 0.0
        sums, self._sums = self._sums, {}
        with torch.no_grad():
            for parameter in parameters:
                _combine(parameter, weight, sums.get(parameter), total)
        self.lookups.combine_slices(weight, total)
        return total

    def forget(self) -> None:
        """Drop the sums, after the loop over the slices was left within a clock."""
        self._sums, self._num_samples = {}, 0.0
        self.lookups.forget()

    def _add(self, parameter: Tensor, gradient: Tensor, weight: float) -> None:
        held = self._sums.get(parameter)
        if held is None:
            self._sums[parameter] = gradient * weight
        else:
            held.add_(gradient, alpha=weight)


def _combine(parameter: Tensor, weight: float, held: Tensor | None, total: float) -> None:
    """Set the gradient to (its own * weight + held) / total, in place if there is one."""
    if parameter.grad is None:
        parameter.grad = None if held is None else held.div_(total)
    elif held is None:
        parameter.grad.mul_(weight / total)
    else:
        parameter.grad.mul_(weight).add_(held).div_(total)
