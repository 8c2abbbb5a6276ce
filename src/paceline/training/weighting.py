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
    """Used like the optimizer it wraps, which every worker that holds the same steps in the same way.

    Attributes:
        num_refused: steps that were not taken, by any worker, as the combined gradients were not finite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, way: str, settings: Settings, job: TrainingJob) -> None:
        super().__init__(optimizer, settings.name, way, job)
        self.turn_s = time.monotonic()
        self.state = optimizer.state
        self._optimizer = optimizer
        self._numbers = AgreedHyperparameters(optimizer)
        self._settings = settings

    def receive(self) -> None:
        """Ask for nothing: every worker has stepped itself."""

    def arrive(self) -> None:
        """Return at once: parameters never wait."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self._optimizer.state_dict()

    def _set_state(self, state_dict: dict[str, Any]) -> None:
        """Give the wrapped optimizer a state, and share what it makes of it."""
        self._optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state

    def _step_unless(self, problem: str) -> None:
        """Step, unless there is a problem: all workers have heard of the same, so all do the same.

        A GradScaler has found the same on all of them, in gradients that are combined.
        """
        self.turn_s = time.monotonic()
        rank = self._job.exchange.worker_set.rank
        if self.overflowed:
            self.num_refused += 1
        elif not problem:
            self._optimizer.step()
        elif self._settings.nonfinite == "halt":
            raise UsageError(f"worker {rank}, step of '{self._settings.name}': {problem}{self._where()}")
        else:  # all workers find the same, so one of them tells it
            self._note_refused(f"{problem}{self._where()}; no worker took it. {NONFINITE_ADVICE}", is_told=rank == 0)

    def _where(self) -> str:
        """Name parameters whose combined gradients are not finite, as far as they are known here."""
        found = [(name, tensor.grad) for name, tensor in self._named().items() if tensor.grad is not None]
        bad = [name for name, gradient in found if num_nonfinite(gradient)]
        return f", in {some_parameters(bad, len(found))}" if bad else ""

    def _named(self) -> Mapping[str, Tensor]:
        """Return the parameters that this worker has as a whole, by name."""
        return {}


def weight_said(samples: float) -> float:
    """Return what a script says that gradients weigh; raises UsageError unless that is more than 0."""
    if not samples > 0:
        raise UsageError(f"weigh got {samples} samples, expected more than 0.")
    return samples


def require_weighed(where: str, scale: str, samples: float | None, done: float) -> float:
    """Return what gradients weigh that backward has weighed by `done`.

    Raises:
        UsageError: the step says another number of samples, which comes too late.
    """
    if samples is not None and scale == "samples" and samples != done:
        raise UsageError(
            f"{where}: samples={samples:g}, but backward has weighed the gradients by {done:g}: call "
            f"optimizer.weigh({samples:g}) before backward."
        )
    return done if samples is None else samples
