"""Base of optimizers that step on every worker at once with the same combined gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.training.agreed_hyperparameters import AgreedHyperparameters
from paceline.training.optimizer import Settings, TrainingJob
from paceline.training.strategy import Distributed
from paceline.update.summing import num_nonfinite
from paceline.worker.pushes import NONFINITE_ADVICE, some_parameters

NOT_FINITE = "the combined gradients have NaN or infinity: a worker's loss was not finite, or the rate is too high"


class SteppedTogether(Distributed):
    """Optimizer used like the one it wraps; all workers with the same part of a model step it identically.

    Attributes:
        num_refused: steps that were not taken, by any worker, because the combined gradients were not finite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, way: str, settings: Settings, job: TrainingJob) -> None:
        super().__init__(optimizer, settings.name, way, job)
        self.turn_s = time.monotonic()
        self.state = optimizer.state
        self._optimizer = optimizer
        self._numbers = AgreedHyperparameters(optimizer)
        self._settings = settings

    def receive(self) -> None:
        """Do nothing: every worker has computed its new values itself."""

    def arrive(self) -> None:
        """Do nothing: parameters are complete after every step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self._optimizer.state_dict()

    def _set_state(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer, and share its resulting objects."""
        self._optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state

    def _step_unless(self, problem: str) -> None:
        """Step, unless there is a problem, which is the same on all workers, so that all do the same.

        So is the result of a GradScaler, which checks combined gradients.
        """
        self.turn_s = time.monotonic()
        rank = self._job.exchange.worker_set.rank
        if self.overflowed:
            self.num_refused += 1
        elif not problem:
            self._optimizer.step()
        elif self._settings.nonfinite == "halt":
            raise UsageError(f"worker {rank}, step of '{self._settings.name}': {problem}{self._where()}")
        else:  # the problem is the same on all workers, so one of them reports it
            self._note_refused(f"{problem}{self._where()}; no worker took it. {NONFINITE_ADVICE}", is_told=rank == 0)

    def _where(self) -> str:
        """Return a phrase with the parameters known here whose combined gradients are not finite."""
        found = [(name, tensor.grad) for name, tensor in self._named().items() if tensor.grad is not None]
        bad = [name for name, gradient in found if num_nonfinite(gradient)]
        return f", in {some_parameters(bad, len(found))}" if bad else ""

    def _named(self) -> Mapping[str, Tensor]:
        """Return the parameters that this worker has as a whole, by name."""
        return {}


def weight_said(samples: float) -> float:
    """Return a weight that the script has set; raises UsageError unless it is more than 0."""
    if not samples > 0:
        raise UsageError(f"weigh got {samples} samples, expected more than 0.")
    return samples


def require_weighed(where: str, scale: str, samples: float | None, done: float) -> float:
    """Return the weight of gradients, which backward has weighted by `done`.

    Raises:
        UsageError: the step names another number of samples, which is too late.
    """
    if samples is not None and scale == "samples" and samples != done:
        raise UsageError(
            f"{where}: samples={samples:g}, but backward has weighed the gradients by {done:g}: call "
            f"optimizer.weigh({samples:g}) before backward."
        )
    return done if samples is None else samples
