"""Lightning and Fabric: `strategy="paceline"` once this module is imported, in `Trainer` and `Fabric`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.integrations.ranks import clip_by_norm, distribute, join_with_ranks, require
from paceline.training.strategy import Distributed

require("lightning", "lightning")

from lightning.fabric.plugins import ClusterEnvironment  # noqa: E402 - after the message for a missing one
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_STRATEGIES  # noqa: E402
from lightning.fabric.strategies import DDPStrategy as FabricDDP  # noqa: E402
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl  # noqa: E402
from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # noqa: E402

NAME: Final = "paceline"


class PacelineEnvironment(ClusterEnvironment):
    """The ranks of the job, as Lightning asks for them. Making it joins the job; blocks until all workers have."""

    creates_processes_externally = True
    main_address = "localhost"  # torch's process group is there already, and nothing connects to this
    main_port = 0

    def __init__(self) -> None:
        session = join_with_ranks()
        self._rank, self._size, self._local_rank = session.rank, session.size, session.local_rank

    @staticmethod
    def detect() -> bool:
        """Return False: only the strategy makes it."""
        return False

    def world_size(self) -> int:
        """Return the number of workers."""
        return self._size

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return self._rank

    def local_rank(self) -> int:
        """Return the rank of this worker on its machine."""
        return self._local_rank

    def node_rank(self) -> int:
        """Return 0: the job does not number its machines."""
        return 0

    def set_world_size(self, size: int) -> None:
        """Leave the number of workers as it is: the launcher has settled it, whatever `devices` says."""

    def set_global_rank(self, rank: int) -> None:
        """Leave the rank as it is."""


class PacelineStrategy(DDPStrategy):
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

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return _own_device(self.parallel_devices, self.local_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How a sampler takes this worker's share."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

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
        with ExitStack() as held:
            for optimizer in self._distributed():
                held.enter_context(optimizer.accumulate())
            yield

    def on_validation_start(self) -> None:
        """Put one consistent state into the model."""
        for optimizer in self._distributed():
            self._snapshots.enter_context(optimizer.snapshot())

    def on_validation_end(self) -> None:
        """Go on from the values before."""
        self._snapshots.close()

    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:  # noqa: ANN401 - Lightning wraps it
        optimizer = getattr(optimizer, "optimizer", optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        clip_by_norm([optimizer], parameters, clip_val)

    def _distributed(self) -> list[Distributed]:
        return [each for each in self.optimizers if isinstance(each, Distributed)]


class PacelineFabricStrategy(FabricDDP):
    """Strategy of `Fabric` in which optimizers step by Paceline; modules are not wrapped.

    Args:
        options: of `paceline.distributed`; by default those of the launcher.
    """

    def __init__(self, *, accelerator: Any = None, precision: Any = None, **options: Any) -> None:  # noqa: ANN401
        environment = PacelineEnvironment()
        super().__init__(accelerator, cluster_environment=environment, precision=precision)
        self._options = options
        self._module: nn.Module | None = None
        self._optimizers: list[Distributed] = []
        self._backward_sync_control = _Accumulation(self._optimizers)

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        return _own_device(self.parallel_devices, self.local_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How a sampler takes this worker's share."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module as it is: optimizers combine the gradients of all workers."""
        self._module = module
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Distribute an optimizer of the module that was set up last; blocks until all workers have called it."""
        made = distribute(optimizer, self._module, **self._options)
        self._optimizers.append(made)
        return made

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of the step by their norm; return that of this worker's own gradients."""
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        return clip_by_norm([optimizer], parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


class _Accumulation(BackwardSyncControl):
    """Keeps gradients local where a script says `fabric.no_backward_sync`."""

    def __init__(self, optimizers: list[Distributed]) -> None:
        self._optimizers = optimizers

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        del module
        return self._accumulating() if enabled else nullcontext()

    @contextmanager
    def _accumulating(self) -> Generator[None]:
        with ExitStack() as held:
            for optimizer in self._optimizers:
                held.enter_context(optimizer.accumulate())
            yield


def _own_device(devices: list[torch.device] | None, local_rank: int) -> torch.device:
    """Return the device of a worker; on the CPU Lightning lists as many as `devices` says, not one a worker."""
    found = devices or [torch.device("cpu")]
    return found[local_rank % len(found)]


StrategyRegistry.register(NAME, PacelineStrategy, description="Parameter server and other strategies of Paceline")
FABRIC_STRATEGIES.register(NAME, PacelineFabricStrategy, description="Parameter server and others of Paceline")
