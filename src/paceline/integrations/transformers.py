"""Hugging Face: `from paceline.integrations.transformers import Trainer, TrainingArguments` in place of its own."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UsageError
from paceline.integrations.ranks import evaluated, join_with_ranks, require

require("transformers", "hf")

import transformers  # noqa: E402 - after the message for a missing one

from paceline.integrations.accelerate import Accelerator  # noqa: E402


class TrainingArguments(transformers.TrainingArguments):
    """The `TrainingArguments` of transformers, which know the ranks of the job.

    Making them joins the job; blocks until all workers have.
    """

    def __post_init__(self) -> None:
        """Join the job before transformers looks for ranks."""
        join_with_ranks()
        if not torch.accelerator.is_available():
            self.use_cpu = True  # without it transformers takes this process for the only one
        super().__post_init__()


class Trainer(transformers.Trainer):
    """The `Trainer` of transformers, whose optimizer steps by Paceline.

    Worker 0 logs and saves, each worker gets its share of the data, and evaluation is shared, as with torchrun. It
    evaluates one consistent state (`optimizer.snapshot()`), or after training what was loaded since, as the best model.

    Raises:
        UsageError: the arguments are not from this module.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator of transformers, and let it prepare models and optimizers for Paceline."""
        if not isinstance(self.args, TrainingArguments):
            raise UsageError(
                f"Trainer was given {type(self.args).__name__} of {type(self.args).__module__}, which does not know "
                "the ranks of the job: take TrainingArguments from paceline.integrations.transformers, too."
            )
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # the Trainer makes its own, and has no argument for another class

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - transformers' own
        """Evaluate or predict, with one consistent state of the model, or what was loaded into it after training."""
        accelerator = self.accelerator
        with evaluated(accelerator.distributed_optimizers() if isinstance(accelerator, Accelerator) else ()):
            return super().evaluation_loop(*args, **kwargs)
