"""Lightning: `Trainer(strategy="paceline")` once this module is imported, and the same in `Fabric`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from paceline.integrations.ranks import accumulating, distribute, evaluated, require
from paceline.training.strategy import Distributed

require("lightning", "lightning")

from lightning.pytorch import Trainer  # noqa: E402 - after the message for a missing one
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402

from paceline.integrations.fabric import (  # noqa: E402
    DESCRIPTION,
    NAME,
    PacelineEnvironment,
    WorkerPlacement,
    reduce_by_sum,
)


class PacelineStrategy(WorkerPlacement, DDPStrategy):
    """Strategy of Lightning's `Trainer` in which optimizers step by Paceline; the model is not wrapped.

    Args:
        options: of `paceline.distributed`, `consistency="ssp:3"` for example; by default those of the launcher.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from paceline.integrations.lightning import PacelineStrategy
        >>> strategy = PacelineStrategy(consistency="ssp:3")
        >>> Trainer(strategy=strategy, logger=False, enable_checkpointing=False).world_size
        1
    """

    def __init__(self, *, accelerator: Any = None, precision_plugin: Any = None, **options: Any) -> None:  # noqa: ANN401
        environment = PacelineEnvironment()
        super().__init__(accelerator, cluster_environment=environment, precision_plugin=precision_plugin)
        self._options = options
        self._snapshots = ExitStack()

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:  # noqa: ANN401
        """Return the reduction of a tensor over all workers."""
        return reduce_by_sum(super().reduce, tensor, group, reduce_op, self.world_size)

    def configure_ddp(self) -> None:
        """Leave the model as it is: optimizers combine the gradients of all workers."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Distribute the optimizers of the module; blocks until all workers have called it."""
        super().setup_optimizers(trainer)
        self.optimizers = [distribute(each, self.lightning_module, **self._options) for each in self.optimizers]
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:  # noqa: ANN401 - Lightning wraps it
        """Return the state of an optimizer once all workers are here, so that it is of one clock."""
        self.barrier()
        return super().optimizer_state(optimizer)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Keep the gradients of a backward local, because more are added before the step."""
        with accumulating(self._distributed()):
            yield

    def on_validation_start(self) -> None:
        """Put one consistent state into the model, unless a checkpoint was loaded after training."""
        self._snapshots.enter_context(evaluated(self._distributed()))

    def on_validation_end(self) -> None:
        """Go on from the values before."""
        self._snapshots.close()

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:  # noqa: ANN401 - Lightning wraps it
        getattr(optimizer, "optimizer", optimizer).clip_gradients(clip_val)

    def _distributed(self) -> list[Distributed]:
        return [each for each in self.optimizers if isinstance(each, Distributed)]


StrategyRegistry.register(NAME, PacelineStrategy, description=DESCRIPTION)
