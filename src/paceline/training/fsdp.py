"""Fully sharded data parallelism: every worker computes with the whole model, and stores and steps a slice of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import torch
from torch import nn

from paceline.core.calls import checked, shown
from paceline.errors import UsageError
from paceline.job.strategy import ALL_REDUCE, PARAMETER_SERVER, Distribution
from paceline.training.all_reduce import AllReduce
from paceline.training.parameter_server import ParameterServer
from paceline.training.strategy import Distributed, Settings, Strategy, TrainingJob
from paceline.update.torch_rule import granularity_of

if TYPE_CHECKING:
    from paceline.training.hybrid import HybridOptimizer


@checked
def fsdp(workers: int | None = None, *, between: Strategy | str | None = None) -> FullySharded:
    """Return fully sharded data parallelism for `paceline.distributed(strategy=...)`, on torch's FSDP2.

    Each worker keeps a slice of every parameter, gradient and state of the optimizer, and gathers a layer while it
    runs; `paceline.distributed` needs `model`. Learning is that of one process with the whole
    batch. A step sends and receives 3 (n-1)/n times the bytes of the model, all-reduce 2 (n-1)/n.

    With a number of workers the slices of a model are those of so many neighbours, and the models of these groups
    become one by another strategy ("hybrid sharding"): give the workers of a machine, and layers are gathered there.

    Needs workers that are processes, on the CPU: `paceline run --transport shm` or tcp.

    Args:
        workers: number of workers that keep one model between them, which divides that of all. Default: all.
        between: how the groups' models become one, with `workers`: "all-reduce", or the parameter server under a
            consistency, "ssp:3" for example. Default: the parameter server under that of the job.

    Raises:
        UsageError: `between` is another strategy, or stands without `workers`.

    Example:
        >>> import paceline
        >>> paceline.strategies.fsdp()
        FullySharded(workers=None, between=None)
        >>> paceline.strategies.fsdp(8, between="ssp:3")
        FullySharded(workers=8, between=ParameterServer(consistency='ssp:3'))
    """
    return FullySharded(workers, _named(between) if isinstance(between, str) else between)


def _named(text: str) -> Strategy:
    """Return the strategy between groups that a text names."""
    wanted = Distribution.parse(text)
    if wanted == Distribution(ALL_REDUCE):
        return AllReduce()
    if wanted == Distribution(PARAMETER_SERVER, consistency=wanted.consistency):
        return ParameterServer(wanted.consistency)
    raise _unfit(text)


def _unfit(between: object) -> UsageError:
    return UsageError(
        f"fsdp: between is {shown(between)}, expected how groups of workers become one model: 'all-reduce', or a "
        "consistency of the parameter server, 'ssp:3' for example."
    )


_NOT_ON_SLICES: Final = ("Rprop",)  # it writes to elements by a mask


class FullySharded(msgspec.Struct, frozen=True):
    """Strategy in which each worker keeps a slice of the model; see `paceline.strategies.fsdp`."""

    workers: int | None = None
    between: Strategy | None = None

    def __post_init__(self) -> None:
        """Validate the number of workers, and the strategy between groups of them."""
        if self.workers is None and self.between is not None:
            raise UsageError(
                f"fsdp was given between={shown(self.between)}, but all workers keep one model: say how many do in "
                "each group, fsdp(8, between=...) for example."
            )
        if self.workers is not None and (isinstance(self.workers, bool) or self.workers < 1):
            raise UsageError(f"fsdp: workers is {shown(self.workers)}, expected 1 or more, or None for all.")
        if not isinstance(self.between, AllReduce | ParameterServer | None):
            raise _unfit(self.between)

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> Distributed:
        """Shard a model unless it is sharded, and make an optimizer that steps this worker's slice."""
        if model is None:
            raise UsageError(
                f"strategy fsdp of '{settings.name}' shards a module and follows its forward and backward: give "
                "model=... to paceline.distributed."
            )
        _require_elements(optimizer, settings.name)
        if settings.part is not None and settings.part.grid.pipeline > 1:
            raise UsageError(
                f"strategy fsdp of '{settings.name}' does not go with pipeline, which runs backward once for each "
                "micro-batch: take all-reduce or the parameter server between replicas of a pipeline."
            )
        from paceline.training.fsdp_optimizer import ShardedOptimizer  # its imports from torch take half a second

        if self.workers is None:
            return ShardedOptimizer(optimizer, model, settings, job)
        _require_whole_groups(self.workers, settings, job)
        if isinstance(self.between, AllReduce):
            return ShardedOptimizer(optimizer, model, settings, job, self.workers)
        return self._served(optimizer, model, settings, job, self.workers)

    def _served(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, settings: Settings, job: TrainingJob, workers: int
    ) -> HybridOptimizer:
        """Make an optimizer whose slices are tables on the servers."""
        if settings.overlap or settings.factors:
            what = "overlap=True" if settings.overlap else "factors=True"
            raise UsageError(
                f"'{settings.name}' is told {what}, which is for a model that each worker holds as a whole, and under "
                f"fsdp:{workers} each has a slice: leave it out."
            )
        from paceline.training.hybrid import HybridOptimizer

        between = self.between if isinstance(self.between, ParameterServer) else ParameterServer()
        return HybridOptimizer(optimizer, model, workers, between, settings, job)


def _require_elements(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse an optimizer that cannot step slices."""
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(f"strategy fsdp of '{name}': fused optimizers cannot step slices: leave out fused=True.")
    slow = [own for own in _NOT_ON_SLICES if type(optimizer) is getattr(torch.optim, own, None)]
    if slow or granularity_of(optimizer) != "element":
        why = "does what torch cannot do with slices" if slow else "looks at whole tensors"
        raise UsageError(
            f"strategy fsdp of '{name}': {type(optimizer).__name__} {why}, and each worker has a slice of "
            "every parameter. Take an optimizer that steps each element by itself (AdamW, SGD, ...), or all-reduce "
            "in place of fsdp."
        )


def _require_whole_groups(workers: int, settings: Settings, job: TrainingJob) -> None:
    """Refuse replicas that do not divide into groups."""
    replicas = job.size if settings.part is None else settings.part.grid.replicas
    if replicas % workers:
        raise UsageError(
            f"strategy fsdp of '{settings.name}': groups of {workers} workers keep a model in slices, and {replicas} "
            f"replicas do not divide by that: take -n {job.size // replicas * workers * max(1, replicas // workers)}."
        )
