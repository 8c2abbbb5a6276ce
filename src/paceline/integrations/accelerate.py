"""Accelerate: `from paceline.integrations.accelerate import Accelerator` in place of accelerate's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.data.sharding import PositionedLoader
from paceline.integrations.ranks import accumulating, clip_by_norm, distribute, join_with_ranks, model_of, require
from paceline.training.strategy import Distributed

require("accelerate", "hf")

import accelerate  # noqa: E402 - after the message for a missing one
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator`, which knows the ranks of the job and prepares optimizers that step by Paceline.

    Prepare models together with their optimizers. Loaders are sharded by Accelerate, as with its other launchers; one
    from `paceline.shard` is sharded already and stays as it is.

    Example:
        >>> import torch
        >>> from paceline.integrations.accelerate import Accelerator
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(1, 2)).sum())
        >>> optimizer.step()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - accelerate's own
        join_with_ranks()
        if not torch.accelerator.is_available():
            kwargs.setdefault("cpu", True)  # without it Accelerate takes this process for the only one
        super().__init__(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - accelerate's own
        """Prepare models, optimizers, loaders and schedulers; blocks until all workers have called it."""
        models = [each for each in args if isinstance(each, nn.Module)]
        if self.device_placement:
            for model in models:
                model.to(self.device)
        made = [distribute(each, model_of(each, models)) if _is_plain(each) else each for each in args]
        return super().prepare(*made, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model; it is not wrapped, as the optimizer combines the gradients of all workers."""
        del evaluation_mode
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,  # noqa: ANN401 - accelerate's own
    ) -> DataLoader[Any]:
        """Prepare a loader, unless `paceline.shard` returned it; its batches come from where the dataset has them."""
        if isinstance(data_loader, PositionedLoader):
            return data_loader
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Keep the gradients of a model from the passes in the block local, because more are added before the step."""
        with accumulating(self.distributed_optimizers(), model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:  # noqa: ANN401
        """Clip the gradients of the step by their norm; return that of this worker's own gradients."""
        self.unscale_gradients()
        return clip_by_norm(self.distributed_optimizers(), list(parameters), max_norm, norm_type)

    def distributed_optimizers(self) -> list[Distributed]:
        """Return the prepared optimizers, without Accelerate's wrapper."""
        found = [optimizer.optimizer for optimizer in self._optimizers]
        return [each for each in found if isinstance(each, Distributed)]


def _is_plain(prepared: object) -> bool:
    return isinstance(prepared, torch.optim.Optimizer) and not isinstance(prepared, AcceleratedOptimizer)
