"""What a way of distributing training has to be: a strategy makes an optimizer with the face that every loop knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from paceline.training.optimizer import Job, Settings


class Distributed(torch.optim.Optimizer, ABC):
    """An optimizer whose step is the step of a whole job. Used like the one it was made from.

    Attributes:
        num_refused: steps or pushes of this worker that were not applied, as they were not finite or came too late.
        turn_s: when it was used last, where its workers have to take turns together.
    """

    num_refused: int
    turn_s: float = 0.0

    @abstractmethod
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None, *, samples: float | None = None
    ) -> float | None:
        """Finish a step of the job, with gradients that stand for so many samples, and this worker's clock."""
        ...

    @abstractmethod
    def follow(self) -> None:
        """Do this worker's part in a step for which it has no batch; its clock is finished already."""
        ...

    @abstractmethod
    def arrive(self) -> None:
        """Wait until the parameters have the values that the last step asked for."""
        ...

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Hold back the gradients of the passes inside, as more are to be added before the step."""
        ...

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Hold one consistent state in the model, without gradients, for evaluation or saving."""
        ...


class Strategy(Protocol):
    """How the work of several workers becomes one model."""

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: Job
    ) -> Distributed:
        """Make the optimizer of this strategy, with the same first values on all workers; blocks until all have come.

        Raises:
            UsageError: an optimizer, a model or settings that this strategy cannot work with.
        """
        ...
