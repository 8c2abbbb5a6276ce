"""Fabric: `Fabric(strategy="paceline")` once this module is imported; and what its strategy and the Trainer's share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from paceline.integrations.ranks import accumulating, distribute, join_with_ranks, model_of, require
from paceline.training.strategy import Distributed

require("lightning", "lightning")

from lightning.fabric.plugins import ClusterEnvironment  # noqa: E402 - after the message for a missing one
from lightning.fabric.strategies import STRATEGY_REGISTRY  # noqa: E402
from lightning.fabric.strategies.ddp import DDPStrategy  # noqa: E402

NAME: Final = "paceline"
DESCRIPTION: Final = "Parameter server and other strategies of Paceline"


class PacelineEnvironment(ClusterEnvironment):
    """The ranks of the job, as Lightning asks for them. Making it joins the job; blocks until all workers have."""

    def __init__(self) -> None:
        session = join_with_ranks()
        self._rank, self._size, self._local_rank = session.rank, session.size, session.local_rank

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: the launcher of the job has started the workers."""
        return True

    @property
    def main_address(self) -> str:
        """Return an address that no process connects to, as torch has its process group already."""
        return "localhost"

    @property
    def main_port(self) -> int:
        """Return 0: see `main_address`."""
        return 0

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


class _OnWorkers(Protocol):
    """What both of Lightning's classes of parallel strategies have, which share no base."""

    @property
    def parallel_devices(self) -> list[torch.device] | None: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class WorkerPlacement:
    """The device and the share of the data of one worker; a base of the strategies of Fabric and of the Trainer."""

    @property
    def root_device(self: _OnWorkers) -> torch.device:
        """The device of this worker; on the CPU Lightning lists as many as `devices` says, not one a worker."""
        found = self.parallel_devices or [torch.device("cpu")]
        return found[self.local_rank % len(found)]

    @property
    def distributed_sampler_kwargs(self: _OnWorkers) -> dict[str, Any]:
        """How a sampler takes this worker's share."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class PacelineFabricStrategy(WorkerPlacement, DDPStrategy):
    """Strategy of `Fabric` in which optimizers step by Paceline; modules are not wrapped.

    Args:
        options: of `paceline.distributed`; by default those of the launcher.
    """

    def __init__(self, *, accelerator: Any = None, precision: Any = None, **options: Any) -> None:  # noqa: ANN401
        environment = PacelineEnvironment()
        super().__init__(accelerator, cluster_environment=environment, precision=precision)
        self._options = options
        self._modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # in the order of their setup
        self._optimizers: list[Distributed] = []
        self._backward_sync_control = _Accumulation(self._optimizers)  # pyright: ignore[reportAttributeAccessIssue]

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:  # noqa: ANN401
        """Return the reduction of a tensor over all workers."""
        return reduce_by_sum(super().all_reduce, tensor, group, reduce_op, self.world_size)

    def setup_module(self, module: nn.Module) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the module as it is: optimizers combine the gradients of all workers."""
        self._modules[module] = None
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Distribute an optimizer of a module that was set up; blocks until all workers have called it."""
        made = distribute(optimizer, model_of(optimizer, self._modules), **self._options)
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
        if not isinstance(optimizer, Distributed):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        return optimizer.clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


class _Accumulation:
    """Keeps gradients local where a script says `fabric.no_backward_sync`."""

    def __init__(self, optimizers: list[Distributed]) -> None:
        self._optimizers = optimizers

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return accumulating(self._optimizers if enabled else (), module)


def reduce_by_sum(reduce: Callable[..., Tensor], tensor: Tensor, group: Any, reduce_op: Any, size: int) -> Tensor:  # noqa: ANN401
    """Reduce a tensor over all workers by `reduce` of Lightning; a mean as a sum, which the process group computes."""
    if reduce_op in (None, "mean", "avg", torch.distributed.ReduceOp.AVG):
        return reduce(tensor, group, "sum") / size
    return reduce(tensor, group, reduce_op)


STRATEGY_REGISTRY.register(NAME, PacelineFabricStrategy, description=DESCRIPTION)
