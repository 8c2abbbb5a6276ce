"""Hybrid sharding: groups of workers keep a model in slices, and each slice is a table that the groups share."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod

import torch
from msgspec.structs import replace
from safetensors.torch import load, save
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.arrangement import ModelPart, whole
from paceline.model_parallel.sharded import gathered, local_slice, slice_of, sliced_like
from paceline.training.collective_optimizer import (
    AgreedHyperparameters,
    agree_on,
    broadcast_content,
    checked_weight,
    numbers_of_first,
)
from paceline.training.fsdp_optimizer import Passes, ShardGroup, shard_model
from paceline.training.state import StateOf, checked_by_all, hyperparameters, numbered_for, optimizer_over
from paceline.training.strategy import Distributed, HeldTensor, Settings, Strategy, TrainingJob, require_fresh
from paceline.update.torch_rule import from_optimizer
from paceline.worker.pushes import NONFINITE_ADVICE


class HybridOptimizer(Distributed):
    """Optimizer used like the one it wraps, for a model that each group of workers keeps in slices.

    Backward combines the gradients of a group, in slices. A worker pushes its slice to a table that it shares with the
    workers at the same place in other groups, and pulls what the servers make of it. The workers of a group call
    forward, backward, `step`, `snapshot` and the state methods equally often; groups wait for each other as the
    strategy between them says.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        workers: int,
        between: Strategy,
        settings: Settings,
        job: TrainingJob,
    ) -> None:
        from_optimizer(optimizer)  # refuses one that servers cannot run, while the model is as it was
        require_fresh(optimizer)
        group = ShardGroup.of_neighbours(settings.mesh(job), workers, combined=False)
        root = shard_model(optimizer, model, settings.name, group)
        super().__init__(optimizer, f"fsdp:{workers}", settings, job)
        self.no_slices = "fsdp, which combines gradients in every backward: leave slices out."
        self.joins_batches = True
        self._group = group
        self._has_told_of_clipping = False
        self._model = root
        self._passes = Passes(root, settings, job, group)
        self._numbers = AgreedHyperparameters(self)
        job.exchange.when_closed(WeakMethod(self._passes.close))
        names = {parameter: name for name, parameter in root.named_parameters()}
        # By parameter, in order: this worker's slice as the tables have it. Torch's own slices may be padded.
        self._slices = {one: local_slice(one).detach().clone() for one in self._parameters()}
        groups = [
            {**hyperparameters(own), "params": [(names[one], self._slices[one]) for one in own["params"]]}
            for own in self.param_groups
        ]
        part = ModelPart(group.mesh.grid, job.rank, group.mesh, workers)
        shard = group.slices.get_local_rank()
        own = replace(settings, name=f"{settings.name}.shard{shard}", part=part)
        self._inner = between.distribute(optimizer_over(optimizer, groups), root, own, job)
        self.title = f"{self.title} under {self._inner.title.rpartition(', ')[2]}"
        self._take_values()

    @property
    def num_refused(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return how many steps of this worker were not applied."""
        return self._inner.num_refused

    # -- the loop ----------------------------------------------------------------------------------------------------

    def send(self, samples: float | None) -> float:
        """Push this worker's slice of the gradients that the last backward has combined.

        Args:
            samples: number of samples behind those of this worker; set a number other than that of the loaders with
                `weigh`.

        Raises:
            UsageError: no backward since the last step, or one with another weight; or gradients that are not finite
                under nonfinite="halt".
            PeerError: a worker of this group is gone.
        """
        weight = self._passes.consume_passes(samples)
        self._push()
        return weight

    def weigh(self, samples: float) -> None:
        """Set before backward how many samples its gradients stand for, their weight in the mean.

        Needed only where that is not what loaders from `shard` have returned: the number of tokens, for example.
        """
        self._passes.weight = checked_weight(samples)

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the mean of this group's gradients by its norm; see `Distributed.clip_gradients`.

        Servers have slices, so they do not know the norm of the mean over all groups; which is told once under bsp.
        """
        first, group = not self._has_told_of_clipping, self._group
        self._has_told_of_clipping = True
        if first and self._settings.consistency.lockstep and group.slices.size() < group.mesh.grid.replicas:
            self._job.metrics.tell(
                f"worker {self._job.rank}, '{self._settings.name}': each group of workers clips the mean of its own "
                "gradients, not that of all as torch's DDP: take all-reduce between groups for that."
            )
        return super().clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def _clip(self, some: Sequence[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        return self._passes.clip(some, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def receive(self) -> None:
        """Request the values of the next step, and slice the model by them."""
        self._inner.receive()
        self._take_values()

    def send_without_batch(self) -> None:
        """Repeat this worker's last batch with weight 0, and push its slice where others of the group have a batch.

        Raises:
            UsageError: this worker has had no batch at all.
        """
        self._tell_of_scales()
        if not self._passes.has_gradients:  # otherwise use those of an earlier backward of the same step
            self.zero_grad()
        self._passes.repeat_for_nothing()
        self._passes.consume_passes(None)
        self._push()
        self.zero_grad()  # scripts call it only after steps of their own

    def step_without_batch(self) -> None:
        """Take the values of the next step, after a clock for which this worker had no batch."""
        self._inner.step_without_batch()
        self._take_values()

    def wait_for_values(self) -> None:
        """Wait until the parameters have the values requested by the last step."""
        self._inner.wait_for_values()

    def accumulate(self) -> AbstractContextManager[None]:
        """Do nothing: every backward combines its gradients, and adds them to those present."""
        return nullcontext()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Gather one consistent state of the whole model on every worker of this group, for evaluation or saving.

        The workers of a group enter it together, which blocks until they have; in it each may run the model any number
        of times. Parameters are ordinary tensors there. Gradients are off inside the block. Training continues
        afterwards from the values before it.
        """
        with ExitStack() as held:
            held.enter_context(torch.no_grad())
            agree_on(self._group.mesh, "snapshot", group=self._group.batches)
            held.enter_context(self._inner.snapshot())
            self._take_values()
            with self._group.mesh.explained(f"snapshot of '{self._settings.name}'", self._group.batches):
                held.enter_context(gathered(self._model))
            yield
        self._take_values()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, which a plain one can load.

        Blocks until all workers of the group call it. Call it at a barrier, while no pushes are under way.
        """
        sliced: StateOf = self._inner.state_dict()["state"]
        parameters, state = self._parameters(), StateOf()
        first = self._state_of_first(sliced, parameters)
        with self._group.mesh.explained(f"state of '{self._settings.name}'", self._group.batches), torch.no_grad():
            for name, value in sorted(first.items()):  # in the same order on all workers
                number, _, key = name.partition(".")
                index, is_sliced = int(number), value.numel() == 0
                if is_sliced:
                    empty = torch.empty_like(local_slice(parameters[index]), dtype=value.dtype)
                    value = whole(slice_of(parameters[index], sliced.get(index, {}).get(key, empty)))
                state.setdefault(index, {})[key] = value
        return {**super().state_dict(), "state": dict(sorted(state.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state into the servers, with the parameters and buffers of the first group.

        Every worker must call it, with the same state; blocks until all have.

        Raises:
            UsageError: the state belongs to another optimizer or model; nothing is changed then.
        """
        parameters = self._parameters()
        with checked_by_all(self._job):
            numbered = numbered_for(self, state_dict, self._settings.name, dict(self._model.named_parameters()))
            sliced = {
                index: {key: local_slice(sliced_like(parameters[index], one)) for key, one in of.items()}
                for index, of in numbered["state"].items()
            }
        with torch.no_grad():
            for parameter, held in self._slices.items():
                held.copy_(local_slice(parameter))
        self._inner.load_state_dict({**numbered, "state": sliced})
        for own, given in zip(self.param_groups, self._inner.param_groups, strict=True):
            own.update(hyperparameters(given))
        self._take_values()

    def held_tensors(self) -> list[HeldTensor]:
        """Return none: tables hold slices of the tensors."""
        return []

    def detach(self) -> None:
        """Keep the parameters as they are."""
        self._inner.detach()

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _push(self) -> None:
        """Push this worker's slice, unless no worker of the group has a batch, or gradients are not finite."""
        passes, inner, group = self._passes, self._inner, self._group
        if not passes.samples:
            return
        with self._job.metrics.communicating():
            own = self._numbers.encoded()
            told = numbers_of_first(group.mesh, own, has_batch=passes.has_batch, group=group.batches)
            self._numbers.align_gradients(told)
            passes.copy_gradients()
            problem = passes.objection()
            passes.average_buffers()
        for parameter, held in self._slices.items():
            held.grad = None if parameter.grad is None else local_slice(parameter.grad)
        with self._numbers.held(told):
            for numbers, pushed in zip(self.param_groups, inner.param_groups, strict=True):
                pushed.update(hyperparameters(numbers))
        if problem and not self.overflowed:
            self._refuse(problem)
        inner.overflowed = self.overflowed or bool(problem)
        inner.send(passes.samples)
        inner.overflowed = False

    def _state_of_first(self, sliced: StateOf, parameters: list[Tensor]) -> dict[str, Tensor]:
        """Return the state that the first worker of the group has, by index and key: slices as tensors of no elements.

        It has a slice of each parameter, while the last ones may have none of short parameters, nor state of them.
        """
        found = {
            f"{index}.{key}": one.new_empty(0) if one.shape == self._slices[parameters[index]].shape else one
            for index, of in sorted(sliced.items())
            for key, one in of.items()
        }
        content, group = save(found), self._group
        told = agree_on(group.mesh, "state_dict", len(content), group=group.batches)
        with group.mesh.explained(f"state of '{self._settings.name}'", group.batches):
            return load(broadcast_content(group.batches, 0, content, told[0][0]))

    def _refuse(self, problem: str) -> None:
        """Report gradients that no worker of the group pushes; under "halt", end the worker."""
        job, name = self._job, self._settings.name
        if self._settings.nonfinite == "halt":
            raise UsageError(f"worker {job.rank}, step of '{name}': {problem}")
        clock, is_told = job.exchange.worker_set.node.clock, self._group.batches.rank() == 0
        reason = f"{problem}; no worker of this group pushed it. {NONFINITE_ADVICE}"
        job.metrics.note_refused("step", name, clock, reason, is_told=is_told)

    @torch.no_grad()
    def _take_values(self) -> None:
        """Set the slices of the model to the values of the tables."""
        for parameter, held in self._slices.items():
            local_slice(parameter).copy_(held)
