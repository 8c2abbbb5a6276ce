"""Optimizer of fully sharded data parallelism; the forward and backward passes of its model."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast
from weakref import WeakMethod

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad_norm_

from paceline.errors import UsageError
from paceline.model_parallel.arrangement import whole
from paceline.model_parallel.mesh import Mesh
from paceline.model_parallel.parallelize import Parallel
from paceline.model_parallel.sharded import gathered, is_gathered, local_slice, shard_fully, sliced_like
from paceline.torch_private import call_after_backward, tree_leaves, tree_map_only
from paceline.training.buffers import floating_buffers
from paceline.training.collective_optimizer import (
    NOT_FINITE,
    CollectiveOptimizer,
    agree_on,
    checked_weight,
    numbers_of_first,
    require_weighed,
)
from paceline.training.hooks import call_if_alive
from paceline.training.model_checks import (
    require_dense_gradients,
    require_no_aliases,
    require_no_gradient_hooks,
    require_own_memory,
)
from paceline.training.same_batches import SameBatches, digest_of_batch
from paceline.training.state import checked_by_all, numbered_for
from paceline.training.strategy import Settings, TrainingJob, require_fresh
from paceline.update.summing import num_nonfinite


class ShardGroup(msgspec.Struct, frozen=True):
    """The workers that keep slices of one model, and those with whose gradients backward combines their own.

    Args:
        mesh: of all workers of the job.
        slices: of the workers that keep one model between them.
        batches: the workers whose gradients backward combines: those of this group, or of all groups.
        peers: the workers with the same slice in other groups, where backward combines the gradients of all.
    """

    mesh: Mesh
    slices: DeviceMesh
    batches: dist.ProcessGroup
    peers: dist.ProcessGroup | None = None

    @staticmethod
    def of_all(mesh: Mesh) -> ShardGroup:
        """Return the only group, of all workers."""
        return ShardGroup(mesh, mesh.axis("data"), mesh.group("data"))

    @staticmethod
    def of_neighbours(mesh: Mesh, size: int, *, combined: bool) -> ShardGroup:
        """Return this worker's group; the first call for a size blocks until all workers call it.

        Args:
            mesh: of all workers.
            size: number of workers in a group, which divides that of the replicas.
            combined: whether backward combines the gradients of all groups.
        """
        if combined and size == mesh.grid.replicas:
            return ShardGroup.of_all(mesh)
        slices, peers = mesh.neighbours(size)
        return ShardGroup(mesh, slices, *((mesh.group("data"), peers) if combined else (slices.get_group(), None)))


class Passes:
    """Hooks around the forward and backward of a model that a group of workers keeps in slices.

    Torch takes the plain mean of a group's gradients, layer by layer. To make it the mean weighted by samples, each
    worker scales the input of its backward, after all have exchanged their weights.

    In a step for which some workers have no batch, backward gives the others the gradients of the whole model, so that
    their scripts can change these without the workers that wait. With the step, every worker gets its slice of the
    result.

    Attributes:
        weight: of the gradients of the next backward, where the script has set it.
        samples: weight of the gradients that were used last, over all workers whose gradients backward combines.
    """

    def __init__(self, model: nn.Module, settings: Settings, job: TrainingJob, group: ShardGroup) -> None:
        self.weight: float | None = None
        self.samples = 0.0
        self._model = model
        self._named = list(model.named_parameters())  # as slices
        self._settings = settings
        self._job = job
        self._mesh = group.mesh
        self._group = group.batches
        self._num_slices = group.slices.size()
        self._num_samples = job.num_samples  # at the last backward
        self._scale: float | None = None  # of the backward under way
        self._done: float | None = None  # weight of the backward passes since the last step
        self._weights = 0.0  # of the backward passes of all workers since the last step
        self._weight_before = 1.0  # of the backward before
        self._with_batch = [True] * self._group.size()  # in the last backward, by rank in the group
        self._same_batches = SameBatches(job.rank, settings.name)
        self._last: tuple[Any, Any] | None = None  # arguments of the last call of the model
        before, after = WeakMethod(self._before), WeakMethod(self._after)
        # A compiled model runs hooks as they are.
        call = cast("Callable[..., Any]", torch.compiler.disable(call_if_alive))
        self._handles = [
            model.register_forward_pre_hook(  # before torch gathers the model, which all do together
                lambda _, args, kwargs: call(before, args, kwargs), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(lambda _, args, outputs: call(after, outputs)),
        ]

    @property
    def has_batch(self) -> bool:
        """Whether this worker had a batch in the last backward."""
        return self._with_batch[self._group.rank()]

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has combined gradients since the last step."""
        return self._done is not None

    def consume_passes(self, samples: float | None) -> float:
        """Return the weight of the combined gradients, and mark them as used.

        Raises:
            UsageError: there are none, or they were weighted by another number of samples.
        """
        done, self._done, self.weight = self._done, None, None
        self.samples, self._weights = self._weights, 0.0
        where = f"worker {self._job.rank}, step of '{self._settings.name}'"
        if done is None:
            raise UsageError(
                f"{where}: no backward has combined gradients since the last step. Call the model itself, not a part "
                "of it and not its .forward, and run backward on what it returns."
            )
        return require_weighed(where, self._settings.scale, samples, done)

    def repeat_for_nothing(self) -> None:
        """Run the last forward again, and a backward with weight 0, while the other workers run theirs."""
        if self._last is None:
            raise UsageError(
                f"worker {self._job.rank}: fsdp needs at least one batch on every worker, as all compute each layer "
                "together, and this one has had none. Take fewer workers or smaller batches."
            )
        args, kwargs = self._last
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        self.weight = 0.0
        with torch.enable_grad():
            outputs = [one for one in tree_leaves(self._model(*args, **kwargs)) if _has_gradient(one)]
            torch.autograd.backward(outputs, [torch.zeros_like(one) for one in outputs])
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)

    def copy_gradients(self) -> None:
        """Set each worker's slices to the gradients of the first worker with a batch, as its script has left them.

        Only in a step for which some workers have none; all have gradients of the same parameters by then. Blocks until
        all workers call it.
        """
        if not self._is_short:
            return
        group, first = self._group, self._with_batch.index(True)
        source = dist.get_global_rank(group, first)
        with self._mesh.explained(f"gradients of '{self._settings.name}'", group), torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    gradient = torch.zeros(parameter.shape, dtype=parameter.dtype)
                    if group.rank() == first:
                        gradient = local_slice(parameter.grad).contiguous()
                        self._require_whole(gradient, parameter)
                    dist.broadcast(gradient, src=source, group=group)
                    parameter.grad = None  # torch requires slices of the same kind
                    parameter.grad = sliced_like(parameter, gradient)

    def _require_whole(self, gradient: Tensor, parameter: Tensor) -> None:
        """Refuse a slice that a script has assigned in place of a whole gradient."""
        if gradient.shape != parameter.shape:
            raise UsageError(
                f"worker {self._job.rank}, step of '{self._settings.name}': some workers have no batch, so the others "
                f"have whole gradients; one has become {tuple(gradient.shape)} of {tuple(parameter.shape)}, as if made "
                "from this worker's slice of a parameter. Change gradients without looking at parameters, or have "
                "batches that divide by the workers (drop_last=True)."
            )

    def objection(self) -> str:
        """Return why the combined gradients may not be used; blocks until all workers have checked their slices."""
        if self._settings.nonfinite == "ignore":
            return ""
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        slices = [local_slice(one) for one in gradients]
        if self._settings.nonfinite == "zero":
            for one in slices:
                one.nan_to_num_(0.0, 0.0, 0.0)
            return ""
        (bad,) = self._summed([float(any(map(num_nonfinite, slices)))], self._group)
        if self._mesh.grid.tensor > 1:
            (bad,) = self._summed([bad], self._mesh.group("tensor"))
        return NOT_FINITE if bad else ""

    def average_buffers(self) -> None:
        """Set floating-point buffers to the mean over the workers that had a batch."""
        buffers = list(floating_buffers(self._model).values()) if self._settings.average_buffers else []
        own, count = float(self.has_batch), max(1, sum(self._with_batch))
        with self._mesh.explained(f"the buffers of '{self._settings.name}'", self._group), torch.no_grad():
            for buffer in buffers:
                total = buffer * own
                dist.all_reduce(total, group=self._group)
                buffer.copy_(total / count)

    def close(self, politely: bool) -> None:
        """Remove the hooks from the model."""
        del politely
        while self._handles:
            self._handles.pop().remove()
        self._last = None

    # -- around forward and backward ---------------------------------------------------------------------------------

    def _before(self, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - whatever the module takes
        if torch.is_grad_enabled():
            require_no_gradient_hooks(self._named, self._settings.name)
            same = self._same_batches
            digest = digest_of_batch(tree_leaves((args, kwargs))) if same.is_checking else 0
            with self._job.metrics.communicating():
                told = agree_on(self._mesh, "forward", digest, group=self._group)
            if same.is_checking:
                workers = [dist.get_global_rank(self._group, index) for index in range(len(told))]
                same.compare(workers, [digest for digest, *_ in told])
            self._last = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        elif not is_gathered(self._model):
            agree_on(self._mesh, "forward without gradients", group=self._group)

    def _after(self, outputs: Any) -> None:  # noqa: ANN401 - whatever the module returns
        if torch.is_grad_enabled():
            for tensor in tree_leaves(outputs):
                if _has_gradient(tensor):
                    tensor.register_hook(partial(call_if_alive, WeakMethod(self._weighed)))

    def _weighed(self, gradient: Tensor) -> Tensor:
        """Return scaled inputs of backward; the first of several outputs agrees on the scale with all workers."""
        if self._scale is None:
            with self._job.metrics.communicating():
                self._scale = self._agreed()
            call_after_backward(self._end_backward)
        return gradient if self._scale == 1.0 else gradient * self._scale

    def _agreed(self) -> float:
        """Exchange the weights of this backward; return the factor that turns torch's mean into the weighted one."""
        weight, self.weight = self.weight, None
        if weight is None:
            again = self._weight_before if self._done is not None else 1.0
            weight = float(self._job.num_samples - self._num_samples or again)
        is_new = self._done is None or self._num_samples < self._job.num_samples
        self._num_samples = self._job.num_samples
        counted = _bits(weight if is_new else 0.0)
        words = torch.tensor(agree_on(self._mesh, "backward", _bits(weight), counted, group=self._group))
        told, new = words[:, :2].contiguous().view(torch.float64).unbind(1)
        self._with_batch = (told > 0).tolist()
        own = weight if self._settings.scale == "samples" else float(weight > 0)
        total = float((told if self._settings.scale == "samples" else told > 0).sum())
        self._weight_before = weight
        self._done = (self._done or 0.0) + (weight if is_new else 0.0)
        self._weights += float(new.sum())
        size = self._num_slices
        return own * size if self._settings.scale == "sum" else own * size / (total or 1.0)

    @property
    def _is_short(self) -> bool:
        """Whether some workers had a batch in the last backward and others had none."""
        return any(self._with_batch) and not all(self._with_batch)

    def _end_backward(self) -> None:
        self._scale = None
        if self._is_short:
            self._make_gradients_whole()

    def _make_gradients_whole(self) -> None:
        """Give the workers with a batch the gradients of the whole model; blocks until all workers call it."""
        parameters = list(self._model.parameters())
        own = [float(parameter.grad is not None) for parameter in parameters]
        holders = self._summed(own, self._group)
        with self._mesh.explained(f"backward of '{self._settings.name}'", self._group), torch.no_grad():
            for parameter, count in zip(parameters, holders, strict=True):
                if count:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    gathered = whole(gradient)
                    if self.has_batch and isinstance(parameter, DTensor):
                        mesh = parameter.device_mesh
                        parameter.grad = DTensor.from_local(gathered, mesh, [Replicate()], run_check=False)

    def clip(self, some: Sequence[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the combined gradients by their norm; blocks until all workers call it."""
        if norm_type == math.inf:
            return self._clip_by_largest(max_norm, error_if_nonfinite=error_if_nonfinite)
        return clip_grad_norm_(some, max_norm, norm_type, error_if_nonfinite)

    def _clip_by_largest(self, max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip by the largest number; torch has no such norm of slices without elements, as of a small bias."""
        gradients = [local_slice(one.grad) for one in self._model.parameters() if one.grad is not None]
        largest = [one.abs().max().double() for one in gradients if one.numel()]
        own = float(torch.stack(largest).max()) if largest else 0.0
        told = agree_on(self._mesh, "clip_gradients", _bits(own), group=self._group)
        norm = torch.tensor([bits for bits, *_ in told]).view(torch.float64).max()  # NaN where one is
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the gradients of '{self._settings.name}' have the norm {norm:g}, so they are not clipped"
            )
        share = max_norm / (float(norm) + 1e-6)
        for one in gradients:
            if not share >= 1:  # or NaN
                one.mul_(share)
        return norm

    def _summed(self, numbers: list[float], group: dist.ProcessGroup | None) -> list[float]:
        """Return the sums of numbers over a group; blocks until all of it call this."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        with self._mesh.explained(f"backward of '{self._settings.name}'", group):
            dist.all_reduce(sums, group=group)
        return sums.tolist()


def _bits(number: float) -> int:
    """Return the bits of a float as an integer."""
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class ShardedOptimizer(CollectiveOptimizer):
    """Optimizer used like the one it wraps, which steps this worker's slice of each parameter.

    After `backward` gradients are already combined, in slices. Parameters, gradients and state are `DTensor`s, so that
    norms over them are those of the whole. All workers must call forward, backward, `snapshot` and the state methods
    the same number of times.

    Attributes:
        num_refused: steps that were not taken, by any worker, because the combined gradients were not finite.
    """

    no_slices = "fsdp, which combines gradients in every backward: take the parameter server, or leave slices out."
    joins_batches = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, settings: Settings, job: TrainingJob, workers: int = 0
    ) -> None:
        require_fresh(optimizer)
        self._mesh = settings.mesh(job)
        group = (
            ShardGroup.of_neighbours(self._mesh, workers, combined=True) if workers else ShardGroup.of_all(self._mesh)
        )
        root = shard_model(optimizer, model, settings.name, group)
        super().__init__(optimizer, f"fsdp:{workers} under all-reduce" if workers else "fsdp", settings, job)
        self._model = root
        self._passes = Passes(root, settings, job, group)
        job.exchange.when_closed(WeakMethod(self._passes.close))

    def send(self, samples: float | None) -> float:
        """Step this worker's slice with the gradients that the last backward has combined.

        Args:
            samples: number of samples behind them; set a number other than that of the loaders with `weigh`.

        Raises:
            UsageError: no backward since the last step, or one with another weight; or gradients that are not finite
                under nonfinite="halt".
            PeerError: a worker is gone.
        """
        weight = self._passes.consume_passes(samples)
        self._apply()
        return weight

    def _clip(self, some: Sequence[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        return self._passes.clip(some, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def weigh(self, samples: float) -> None:
        """Set before backward how many samples its gradients stand for, their weight in the mean.

        Needed only where that is not what loaders from `shard` have returned: the number of tokens, for example.
        """
        self._passes.weight = checked_weight(samples)

    def step_without_batch(self) -> None:
        """Take part in a step without a batch: repeat this worker's last batch, with weight 0.

        Raises:
            UsageError: this worker has had no batch at all.
        """
        self._tell_of_scales()
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
            with self._mesh.explained(f"snapshot of '{self._settings.name}'", self._mesh.group("data")):
                held.enter_context(gathered(self._model))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, which a plain one can load; blocks until all workers call it."""
        agree_on(self._mesh, "state_dict")
        sliced = self._optimizer.state_dict()
        with self._mesh.explained(f"state of '{self._settings.name}'", self._mesh.group("data")), torch.no_grad():
            state = {
                index: {key: whole(one) if isinstance(one, Tensor) else one for key, one in of.items()}
                for index, of in sliced["state"].items()
            }
        return {**sliced, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state; each worker takes its slices of it. Parameters stay as they are."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with checked_by_all(self._job):
            named = dict(self._model.named_parameters())
            numbered = numbered_for(self, state_dict, self._settings.name, named)
            state = {
                index: {key: _sliced(parameters[index], one) for key, one in of.items()}
                for index, of in numbered["state"].items()
            }
            self._set_state({**numbered, "state": state})

    def _apply(self) -> None:
        """Step, unless gradients are not finite."""
        with self._job.metrics.communicating():
            told = numbers_of_first(self._mesh, self._numbers.encoded(), has_batch=self._passes.has_batch)
            self._numbers.align_gradients(told)
            self._passes.copy_gradients()
            problem = self._passes.objection()
        with self._numbers.held(told):
            self._step_unless(problem)
        with self._job.metrics.communicating():
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


def shard_model(optimizer: torch.optim.Optimizer, model: nn.Module, name: str, group: ShardGroup) -> nn.Module:
    """Shard a model, and replace the parameters of the optimizer; return the module whose forward is hooked.

    Raises:
        UsageError: the optimizer has not exactly the parameters of the model, or the model cannot be sharded: it has
            parameters that share memory, or sparse gradients, or hooks on gradients.
    """
    _require_whole(optimizer, model, name)
    mesh = group.mesh
    root = model.held if isinstance(model, Parallel) else model
    require_dense_gradients(root, name)
    require_own_memory(dict(root.named_parameters()), name)
    require_no_gradient_hooks(root.named_parameters(), name)
    require_no_aliases(root, name)
    names = {parameter: own for own, parameter in root.named_parameters()}
    with mesh.explained(f"sharding the model of '{name}'", group.batches):
        guard = partial(mesh.explained, f"forward and backward of '{name}'", group.batches)
        shard_fully(root, group.slices, guard, group.peers)
    for given in optimizer.param_groups:
        whole_ones, given["params"] = given["params"], [root.get_parameter(names[one]) for one in given["params"]]
        for parameter, sliced in zip(whole_ones, given["params"], strict=True):
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
