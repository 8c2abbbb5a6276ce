"""Gradient accumulation over the slices of a clock, which are pushed as one after the last slice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from paceline.training.embedding_gradients import EmbeddingLookups


class SliceSums(Protocol):
    """The slices that a worker is given in a clock."""

    @property
    def num_samples(self) -> int:
        """How many samples the slice under way has; 0 where there is none."""
        ...

    @property
    def weight(self) -> float:
        """What the slice under way weighs: its samples, as those of the clock under way weigh."""
        ...

    @property
    def num_expected(self) -> int:
        """How many samples all workers together are to have in the clock under way; 0 where that is not known."""
        ...

    def more(self) -> bool:
        """Say whether this worker has another slice in the clock under way; blocks for one round trip to ask."""
        ...


@dataclass(slots=True)
class GradientAccumulator:
    """Adds up the gradients of some parameters, and of embeddings, each slice weighed by its samples."""

    slices: SliceSums
    lookups: EmbeddingLookups
    # Sum of gradient * samples since the last payment, by parameter, and of samples.
    _sums: dict[Tensor, Tensor] = field(default_factory=dict[Tensor, Tensor])
    _num_samples: float = 0.0

    def keep(self, parameters: Iterable[Tensor], samples: float | None) -> bool:
        """Keep the gradients of a slice if another one follows in this clock; say whether."""
        if not self.slices.more():
            return False
        weight = self.slices.weight if samples is None else samples
        for parameter in parameters:
            if parameter.grad is not None:
                self._add(parameter, parameter.grad.detach(), weight)
        self.lookups.accumulator(weight)
        self._num_samples += weight
        return True

    def pay(self, parameters: Iterable[Tensor], samples: float | None) -> float | None:
        """Make the gradients the mean of all that was kept and the last slice; return how many samples that is of.

        Where nothing was kept, or no slice is under way, gradients stay as they are.
        """
        if not self.slices.num_samples:
            return samples
        weight = self.slices.weight if samples is None else samples
        if not self._num_samples:
            return samples if weight == self.slices.num_samples else weight
        total, self._num_samples = self._num_samples + weight, 0.0
        sums, self._sums = self._sums, {}
        with torch.no_grad():
            for parameter in parameters:
                _combine(parameter, weight, sums.get(parameter), total)
        self.lookups.pay(weight, total)
        return total

    def forget(self) -> None:
        """Drop what was kept: the loop over the slices was left within a clock."""
        self._sums, self._num_samples = {}, 0.0
        self.lookups.forget()

    def _add(self, parameter: Tensor, gradient: Tensor, weight: float) -> None:
        held = self._sums.get(parameter)
        if held is None:
            self._sums[parameter] = gradient * weight
        else:
            held.add_(gradient, alpha=weight)


def _combine(parameter: Tensor, weight: float, held: Tensor | None, total: float) -> None:
    """Make the gradient (its own * weight + held) / total, where it lies if it has a place."""
    if parameter.grad is None:
        parameter.grad = None if held is None else held.div_(total)
    elif held is None:
        parameter.grad.mul_(weight / total)
    else:
        parameter.grad.mul_(weight).add_(held).div_(total)
