"""Fully sharded data parallelism: every worker computes with the whole model, and stores and steps a slice of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.mesh import Mesh
from paceline.model_parallel.parallelize import Parallel
from paceline.model_parallel.part import whole
from paceline.model_parallel.sharded import gathered, shard_fully, sliced_like
from paceline.training.agreed_hyperparameters import agree_on, numbers_of_first
from paceline.training.fsdp_passes import Passes
from paceline.training.optimizer import Settings, TrainingJob, require_fresh
from paceline.training.part_job import PartJob
from paceline.training.state import checked_by_all
from paceline.training.weighting import SteppedTogether, weight_said
from paceline.update.torch_rule import granularity_of


class ShardedOptimizer(SteppedTogether):
    """Optimizer used like the one it wraps, which steps this worker's slice of each parameter.

    After `backward` gradients are already combined, in slices. Parameters, gradients and state are `DTensor`s, so that
    norms over them are those of the whole. All workers must call forward, backward, `snapshot` and the state methods
    the same number of times.

    Attributes:
        num_refused: steps that were not taken, by any worker, because the combined gradients were not finite.
    """

    no_slices = "fsdp, which combines gradients in every backward: take the parameter server, or leave slices out."

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, settings: Settings, job: TrainingJob, mesh: Mesh
    ) -> None:
        require_fresh(optimizer)
        self._mesh = mesh
        _require_whole(optimizer, model, settings.name)
        root = _shard(optimizer, model, settings.name, mesh)
        super().__init__(optimizer, "fsdp", settings, job)
        self._model = root
        self._passes = Passes(root, settings, job, mesh)
        job.exchange.when_closed(WeakMethod(self._passes.close))

    def send(self, samples: float | None) -> float:
        """Step this worker's slice with the gradients that the last backward has combined.

        Args:
            samples: how many samples they stand for. Backward weights them by the samples that loaders from `shard`
            have
                returned since the last step; set other numbers before, with `weigh`.

        Raises:
            UsageError: no backward since the last step, or one with another weight; or gradients that are not finite
                under nonfinite="halt".
            PeerError: a worker is gone.
        """
        weight = self._passes.consume_passes(samples)
        self._apply()
        return weight

    def weigh(self, samples: float) -> None:
        """Set before backward how many samples its gradients stand for, their weight in the mean.

        Needed only where that is not what loaders from `shard` have returned: the number of tokens, for example.
        """
        self._passes.weight = weight_said(samples)

    def follow(self) -> None:
        """Take part in a step without a batch: repeat this worker's last batch, with weight 0.

        Raises:
            UsageError: this worker has had no batch at all.
        """
        if not self._passes.has_gradients:  # otherwise use those of an earlier backward of the same step
            self.zero_grad()
        self._passes.repeat_for_nothing()
        self._passes.consume_passes(None)
        self._apply()
        self.zero_grad()  # scripts call it only after steps of their own

    def accumulate(self) -> AbstractContextManager[None]:
        """Do nothing: every backward combines its gradients, and adds them to those present."""
        return nullcontext()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Gather the whole model on every worker for the length of a `with` block, for evaluation or saving.

        All workers enter it together, which blocks until they have; in it each may run the model any number of times.
        Parameters are ordinary tensors there. Gradients are off inside the block.
        """
        with ExitStack() as held:
            held.enter_context(torch.no_grad())
            held.enter_context(self._job.lookups.exactly())
            agree_on(self._mesh, "snapshot")
            with self._mesh.explained(f"snapshot of '{self._settings.name}'"):
                held.enter_context(gathered(self._model))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, which a plain one can load; blocks until all workers call it."""
        agree_on(self._mesh, "state_dict")
        sliced = self._optimizer.state_dict()
        with self._mesh.explained(f"state of '{self._settings.name}'"), torch.no_grad():
            state = {
                index: {key: whole(one) if isinstance(one, Tensor) else one for key, one in of.items()}
                for index, of in sliced["state"].items()
            }
        return {**sliced, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, of which each worker takes its slices. Parameters stay as they are."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with checked_by_all(self._job):
            state = {
                index: {key: _sliced(parameters[index], one) for key, one in of.items()}
                for index, of in state_dict["state"].items()
            }
            self._set_state({**state_dict, "state": state})

    def _apply(self) -> None:
        """Step, unless gradients are not finite."""
        with self._job.communicating():
            told = numbers_of_first(self._mesh, self._numbers.encoded(), has_batch=self._passes.has_batch)
            self._numbers.align_gradients(told)
            self._passes.copy_gradients()
            problem = self._passes.objection()
        with self._numbers.held(told):
            self._step_unless(problem)
        with self._job.communicating():
            self._passes.average_buffers()


def _require_whole(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """Refuse an optimizer whose parameters are not exactly those of the model."""
    names = {parameter: own for own, parameter in model.named_parameters()}
    given = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = [own for parameter, own in names.items() if parameter.requires_grad and parameter not in given]
    if missing or given - names.keys():
        what = f"lacks {', '.join(missing[:5])}" if missing else "has parameters that the model has not"
        raise UsageError(
            f"'{name}' runs under fsdp, which shards the whole model, but the optimizer {what}: make it from "
            "model.parameters(), after paceline.parallelize where that is used."
        )


def _shard(optimizer: torch.optim.Optimizer, model: nn.Module, name: str, mesh: Mesh) -> nn.Module:
    """Shard a model, and replace the parameters of the optimizer; return the module whose forward is hooked."""
    root = model.held if isinstance(model, Parallel) else model
    names = {parameter: own for own, parameter in root.named_parameters()}
    with mesh.explained(f"sharding the model of '{name}'"):
        shard_fully(root, mesh.axis("data"), partial(mesh.explained, f"forward and backward of '{name}'"))
    for group in optimizer.param_groups:
        whole_ones, group["params"] = group["params"], [root.get_parameter(names[one]) for one in group["params"]]
        for parameter, sliced in zip(whole_ones, group["params"], strict=True):
            state = optimizer.state.pop(parameter, {})  # some classes (Adagrad) have state before the first step
            if state:
                optimizer.state[sliced] = {key: _sliced(sliced, value) for key, value in state.items()}
    if root is not model:
        for own, parameter in root.named_parameters(recurse=False):
            model.register_parameter(own, parameter)
    return root


def _sliced(parameter: Tensor, value: Any) -> Any:  # noqa: ANN401 - whatever a state has
    """Return this worker's slice of a state tensor."""
    return sliced_like(parameter, value) if isinstance(value, Tensor) else value


def fsdp() -> FullySharded:
    """Return fully sharded data parallelism for `paceline.distributed(strategy=...)`, on torch's FSDP2.

    `paceline.distributed(optimizer, strategy=paceline.fsdp(), model=model)` leaves each worker a slice of every
    parameter, gradient and state of the optimizer, and gathers a layer while it runs. Learning is that of one process
    with the whole batch. A step sends and receives 3 (n-1)/n times the bytes of the model, all-reduce 2 (n-1)/n.

    Needs torch 2.9 or later, and workers that are processes, on the CPU: `paceline run --transport shm` or tcp.

    Example:
        >>> import paceline
        >>> paceline.fsdp()
        FullySharded()
    """
    return FullySharded()


_NOT_ON_SLICES: Final = ("Rprop",)  # it writes to elements by a mask


@dataclass(frozen=True, slots=True)
class FullySharded:
    """Strategy in which each worker keeps a slice of the model; see `paceline.fsdp`."""

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> ShardedOptimizer:
        """Shard a model unless it is sharded, and make an optimizer that steps this worker's slice."""
        if model is None:
            raise UsageError(
                f"strategy fsdp of '{settings.name}' shards a module and follows its forward and backward: give "
                "model=... to paceline.distributed."
            )
        if any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"strategy fsdp of '{settings.name}': fused optimizers cannot step slices: leave out fused=True."
            )
        slow = [name for name in _NOT_ON_SLICES if type(optimizer) is getattr(torch.optim, name, None)]
        if slow or granularity_of(optimizer) != "element":
            why = "does what torch cannot do with slices" if slow else "looks at whole tensors"
            raise UsageError(
                f"strategy fsdp of '{settings.name}': {type(optimizer).__name__} {why}, and each worker has a slice of "
                "every parameter. Take an optimizer that steps each element by itself (AdamW, SGD, ...), or all-reduce "
                "in place of fsdp."
            )
        if isinstance(job, PartJob) and job.part.grid.pipeline > 1:
            raise UsageError(
                f"strategy fsdp of '{settings.name}' does not go with pipeline, which runs backward once for each "
                "micro-batch: take all-reduce or the parameter server between replicas of a pipeline."
            )
        from paceline.training.fsdp import ShardedOptimizer  # its imports from torch take half a second

        mesh = job.mesh if isinstance(job, PartJob) else job.arrangement.mesh(job.exchange)
        return ShardedOptimizer(optimizer, model, settings, job, mesh)
