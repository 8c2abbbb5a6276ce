"""Interfaces of distributed training: a strategy, what it is given, and the optimizer that it makes for a loop."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from paceline.collective.collectives import Collectives
from paceline.core.calls import shown
from paceline.core.consistency import Consistency
from paceline.data.slicing import ClockSlices
from paceline.errors import UsageError
from paceline.model_parallel.arrangement import Arrangement, ModelPart
from paceline.model_parallel.mesh import Mesh
from paceline.notices import is_told
from paceline.torch_private import is_profiling, post_step_hooks, pre_step_hooks
from paceline.training.embedding_gradients import EmbeddingLookups
from paceline.training.flat import FlatParameters, Weights
from paceline.update.table import NonFinite, Scale, TableSpec
from paceline.update.torch_rule import granularity_of
from paceline.worker.metrics import StepMetrics
from paceline.worker.pushes import PushOutcome
from paceline.worker.table import Table
from paceline.worker.table_opener import TableOpener
from paceline.worker.validation import as_count, as_number


@dataclass(slots=True)
class GradientAccumulator:
    """Sum of the gradients of parameters and embeddings over slices, each weighted by its samples."""

    slices: ClockSlices
    lookups: EmbeddingLookups
    # Sum of gradient * samples since the last mean, by parameter, and of samples.
    _sums: dict[Tensor, Tensor] = field(default_factory=dict[Tensor, Tensor])
    _num_samples: float = 0.0

    def add_slice(self, parameters: Iterable[Tensor], samples: float | None) -> bool:
        """Add the gradients of a slice if another one follows in this clock; return whether one does."""
        if not self.slices.claim_next():
            return False
        weight = self.slices.weight if samples is None else samples
        for parameter in parameters:
            if parameter.grad is not None:
                self._add(parameter, parameter.grad.detach(), weight)
        self.lookups.set_aside(weight)
        self._num_samples += weight
        return True

    def finish_mean(self, parameters: Iterable[Tensor], samples: float | None) -> float | None:
        """Set the gradients to the mean over all slices of the clock, the last one included; return its samples.

        Where the clock has one slice or there is no current slice, gradients stay as they are.
        """
        if not self.slices.num_samples:
            return samples
        weight = self.slices.weight if samples is None else samples
        if not self._num_samples:  # an earlier slice without a step has no part in the weight
            return weight
        total, self._num_samples = self._num_samples + weight, 0.0
        sums, self._sums = self._sums, {}
        with torch.no_grad():
            for parameter in parameters:
                _combine(parameter, weight, sums.get(parameter), total)
        self.lookups.combine_slices(weight, total)
        return total

    def forget(self) -> None:
        """Drop the sums, after the loop over the slices was left within a clock."""
        self._sums, self._num_samples = {}, 0.0
        self.lookups.forget()

    def _add(self, parameter: Tensor, gradient: Tensor, weight: float) -> None:
        held = self._sums.get(parameter)
        if held is None:
            self._sums[parameter] = gradient * weight
        else:
            held.add_(gradient, alpha=weight)


def _combine(parameter: Tensor, weight: float, held: Tensor | None, total: float) -> None:
    """Set the gradient to (its own * weight + held) / total, in place if there is one."""
    if parameter.grad is None:
        parameter.grad = None if held is None else held.div_(total)
    elif held is None:
        parameter.grad.mul_(weight / total)
    else:
        parameter.grad.mul_(weight).add_(held).div_(total)


_OVERFLOW: Final = "a GradScaler has found gradients that are not finite: its scale is too high for this batch"
# A scaler tries some scales that are too high, above all at the start; more overflows in a row than this are unusual.
_USUAL_OVERFLOWS: Final = 10


class Settings(msgspec.Struct, frozen=True):
    """Settings of a distributed optimizer; see `paceline.distributed`."""

    consistency: Consistency
    scale: Scale
    fetch_every: int | None
    nonfinite: NonFinite
    name: str
    views: bool | None = None
    overlap: bool = False
    factors: bool = False  # of gradients are sent, where they have fewer bytes
    divide_lr: bool = False  # among the pushes of a clock, where each is an update of its own
    average_buffers: bool = True  # of the model; False where another part of the same model averages them
    part: ModelPart | None = None  # of a model that several workers hold; None for a whole one

    @property
    def first(self) -> int:
        """Rank of the worker whose parameters, buffers and state are the initial values of all."""
        return 0 if self.part is None else self.part.first

    def num_replicas(self, job: TrainingJob) -> int:
        """Return the number of workers that hold this model, or this part of one."""
        return job.size if self.part is None else self.part.num_holders

    def mesh(self, job: TrainingJob) -> Mesh:
        """Return the process groups of the job's workers; blocks until all workers have called it, the first time."""
        mesh = job.arrangement.mesh(job.exchange) if self.part is None else self.part.mesh
        assert mesh is not None, "several workers hold this model"
        return mesh

    @property
    def no_slices(self) -> str:
        """Reason why gradients of several slices of a clock cannot be added up; empty where they can."""
        if self.overlap:
            return "overlap=True, which sends gradients while backward runs: leave one of the two out."
        if self.factors:
            return "factors=True, as the mean over slices is not a product of factors: leave one of the two out."
        if self.scale != "samples" and self.consistency.visible == "on_clock":
            return f'scale="{self.scale}", as workers do not do the same number of slices: leave it at "samples".'
        return ""

    def __post_init__(self) -> None:
        """Validate `fetch_every`."""
        if self.fetch_every is not None and self.fetch_every < 1:
            raise UsageError(f"fetch_every is {self.fetch_every}, expected 1 or more steps, or None.")
        if self.fetch_every is None and self.consistency.bound is None:
            raise UsageError(
                "fetch_every=None fetches when the bound forces it, but asynchronous has none: give a number."
            )


@dataclass(slots=True)
class CountedSteps:
    """Steps of an optimizer that pushes those of several clocks together.

    Args:
        every: how many make a push.
        due: when it pushes.
    """

    every: int
    due: str
    num_made: int = 0
    num_unpushed: int = 0  # since the last push
    num_without_batch: int = 0  # steps of other workers for which this one had no batch


class TrainingJob(Protocol):
    """The session, as far as the optimizer uses it."""

    @property
    def rank(self) -> int:
        """Number of this worker."""
        ...

    @property
    def size(self) -> int:
        """Number of workers."""
        ...

    @property
    def num_samples(self) -> int:
        """Number of samples that loaders have given this worker so far, as far as they count them."""
        ...

    @property
    def lookups(self) -> EmbeddingLookups:
        """Embedding lookups of this worker."""
        ...

    @property
    def counted_steps(self) -> dict[str, CountedSteps]:
        """Steps of optimizers that push those of several clocks together, by their name."""
        ...

    @property
    def metrics(self) -> StepMetrics:
        """Metrics of this worker's steps."""
        ...

    @property
    def exchange(self) -> Collectives:
        """Collective calls among the workers."""
        ...

    @property
    def arrangement(self) -> Arrangement:
        """How the workers share models and data."""
        ...

    @property
    def tables(self) -> TableOpener:
        """Opens tables."""
        ...

    def detach_at_close(self, weights: Weights) -> None:
        """Detach these weights from the servers' memory when this worker leaves."""
        ...

    def clock(self, *, samples: float | None) -> int:
        """Push embedding gradients, which stand for `samples` samples, and finish the current clock."""
        ...

    def finish_clock(self, samples: float | None) -> int:
        """Do what `clock` does, for a number of samples that has been checked."""
        ...

    def exit_if_preempted(self) -> None:
        """End this process if it was told to leave; called when a step is over."""
        ...

    def barrier_at(self, place: str, problem: str = "", *, needs_first: bool = False, first: int = 0) -> None:
        """Wait until all workers reach the same place; raise Refused on all of them if one has a problem."""
        ...


def open_flat(
    job: TrainingJob,
    settings: Settings,
    spec: TableSpec,
    flat: FlatParameters,
    *,
    read_my_writes: bool = False,
    live: bool = False,
) -> Table:
    """Open the table of these tensors; blocks until it has the values of the first worker."""
    return job.tables.open_dense(
        spec, (flat.numel,), flat.pack_values, read_my_writes=read_my_writes, live=live, first=settings.first
    )


class HeldTensor(msgspec.Struct, frozen=True, eq=False):
    """A parameter or a buffer whose values servers hold: the elements of a table from `start` on."""

    name: str
    tensor: Tensor
    table: Table
    start: int


def held_by(flat: FlatParameters, table: Table) -> list[HeldTensor]:
    """Return where in a table the tensors are that were laid out flat for it."""
    places = zip(flat.named.items(), flat.bounds, strict=True)
    return [HeldTensor(name, tensor, table, start) for (name, tensor), (start, _) in places]


P = ParamSpec("P")
R = TypeVar("R")
Step = Callable[Concatenate["Distributed", P], R]


def _watched_on_demand(step: Step[P, R]) -> Step[P, R]:
    """Return a step of one thread at a time that torch's hooks and profiler surround while there are any.

    Torch puts them around every step of an optimizer, which takes as long as a good part of a small step.
    """
    watched = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def stepped(self: Distributed, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.stepping.acquire(blocking=False):
            raise self.stepped_by_another_thread()
        try:
            return watched(self, *args, **kwargs) if self.is_watched else step(self, *args, **kwargs)
        finally:
            self.stepping.release()

    setattr(stepped, "hooked", True)  # noqa: B010 - for torch, which surrounds others
    return stepped


class Distributed(torch.optim.Optimizer, ABC):
    """Optimizer whose step is a step of the whole job; used like the optimizer it was made from.

    `paceline.distributed` returns one. Its parameter groups are those of the optimizer it was made from, and complete.

    Example:
        >>> import torch, paceline
        >>> def rate(optimizer: paceline.Distributed) -> float:
        ...     return optimizer.param_groups[0]["lr"]
        >>> _ = paceline.init()
        >>> weights = [torch.zeros(2, requires_grad=True)]
        >>> rate(paceline.distributed(torch.optim.SGD(weights, lr=0.1), name="doc-rate"))
        0.1

    Attributes:
        num_refused: steps or pushes of this worker that were not applied, because they were not finite or too late.
        title: what is distributed, and how, in a few words.
        turn_s: time of its last step, where optimizers of all workers have to step in the same order.
        turns: clocks of its last step but one and of its last step; before its first step, the clock at which it was
            made.
        overflowed: whether a `torch.amp.GradScaler` found gradients of this worker in this clock that are not finite.
        kind: class of the optimizer that it was made from.
        stepping: held during a step.
    """

    num_refused: int = 0
    turn_s: float = 0.0
    turns: tuple[int, int] = (0, 0)
    # Number of samples in this step over all workers; 0 where that is not known.
    expected: float = 0.0
    no_slices: str = ""  # reason why gradients of several slices of a clock cannot be added up; empty where they can
    joins_batches: bool = False  # whether all workers take part in each batch of any, whether a step follows or not
    no_scaling: str = ""  # reason why a GradScaler cannot be used; empty where it can
    clips_mean: bool = False  # whether `clip_gradients` clips the mean of all workers' gradients, where it can
    overflowed: bool = False
    # Makes a GradScaler call `step` on every worker, also after an overflow, so that all finish the same clocks.
    _step_supports_amp_scaling = True
    _num_overflows: int = 0  # since the last step without one
    _has_scaler: bool = False  # whether a GradScaler has called `step`
    _has_told_of_scales: bool = False
    _accumulator: GradientAccumulator | None = None  # made when a loop has slices
    _is_whole: bool = False  # whether all parameter groups have been added
    _successor: str = ""  # name of the optimizer that was distributed later for some of its parameters

    def __init__(self, optimizer: torch.optim.Optimizer, way: str, settings: Settings, job: TrainingJob) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.kind = type(optimizer)
        self.stepping = threading.Lock()
        self.title = f"Distributed {self.kind.__name__}, {way}"
        self._settings = settings
        self._job = job
        self._num_samples = job.num_samples  # at the last step
        self._is_whole = True

    def __repr__(self) -> str:
        """Return what is distributed, and how."""
        groups = self.param_groups
        num_parameters = sum(len(group["params"]) for group in groups)
        rates = ", ".join(str(group.get("lr", "-"))[:12] for group in groups[:4]) + (", ..." if groups[4:] else "")
        return f"{self.title} ('{self._settings.name[:60]}', {num_parameters} parameters, lr {rates})"

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: the steps of a job are this worker's, and a copy would have no part in it."""
        raise UsageError(
            f"'{self._settings.name[:60]}' cannot be copied or pickled, as its steps are those of the job: keep "
            "state_dict(), which a plain optimizer or another distributed one can load."
        )

    @property
    def is_watched(self) -> bool:
        """Whether there are hooks around steps, or a profiler is on."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or pre_step_hooks
            or post_step_hooks
            or is_profiling()
        )

    def stepped_by_another_thread(self) -> UsageError:
        """Return what is wrong where a step begins during one of another thread."""
        return UsageError(
            f"worker {self._job.rank}, step of '{self._settings.name}': another thread is in a step of it, and one "
            "thread steps (or pushes and reads) at a time: step in one thread, or hold a lock from zero_grad to step."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that are added after construction."""
        if self._is_whole:
            raise UsageError(
                f"'{self._settings.name}' has all its parameters from the start: give the wrapped optimizer every "
                "group, and freeze those that are to join later with requires_grad_(False)."
            )
        super().add_param_group(param_group)

    def freeze_values(self) -> None:
        """Freeze the parameters before a clock is finished by another call than `step`."""

    def retire(self, successor: str) -> None:
        """Refuse further steps, because `successor` has taken over some of the parameters; the state stays."""
        self._successor = successor
        self.detach()

    def held_tensors(self) -> list[HeldTensor]:
        """Return the tensors whose values servers hold, and where; empty where servers hold none."""
        return []

    def detach(self) -> None:
        """Remove hooks from forward and backward of the model, where the strategy has any."""

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of this step by their norm over all parameters, after backward and before `step`.

        What is clipped is the mean of all workers' gradients, as after torch's DDP: by the servers under bsp, and here
        where backward has combined them. Under other policies each push is an update of its own, and clipped as such.
        Does not block.

        Args:
            max_norm: the greatest norm of the update.
            norm_type: 2, or another norm as of `torch.nn.utils.clip_grad_norm_`, which servers do not compute.
            error_if_nonfinite: raise RuntimeError for a norm that is not finite.

        Returns:
            The norm of this worker's gradients before, which under bsp are its own.

        Raises:
            UsageError: this worker holds a part of the model only, or a number is not valid.

        Example:
            >>> import torch, paceline
            >>> _ = paceline.init()
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), name="clipped")
            >>> (100 * model(torch.ones(2))).sum().backward()
            >>> optimizer.clip_gradients(1.0) > 100
            tensor(True)
            >>> optimizer.step()
        """
        max_norm, norm_type = self._checked_norms(max_norm, norm_type)
        return self._clip(self._clipped(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def _clipped(self) -> list[Tensor]:
        """Return the parameters whose gradients are clipped; raises UsageError as `clip_gradients`."""
        part = self._settings.part
        if part is not None and part.grid.is_split:
            raise UsageError(
                f"worker {self._job.rank}: optimizer.clip_gradients of '{self._settings.name}' would clip by the norm "
                "of this worker's part of the model: call model.clip_gradients, which knows that of all parts."
            )
        return [one for one in self._parameters() if one.numel()]  # torch has no norm of others

    def _clip(self, some: Sequence[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip gradients of parameters that have elements, as their strategy has them."""
        return clip_grad_norm_(some, max_norm, norm_type, error_if_nonfinite)

    def _checked_norms(self, max_norm: object, norm_type: object) -> tuple[float, float]:
        """Return the numbers for `clip_gradients`; raises UsageError for one that would turn or spoil gradients."""
        where = f"clip_gradients of '{self._settings.name}'"
        norm = as_number(max_norm, where, "max_norm")
        kind = math.inf if norm_type == "inf" else as_number(norm_type, where, "norm_type")  # torch takes the word
        if not norm > 0 or kind != kind:  # is NaN
            raise UsageError(
                f"{where}: max_norm is {norm:g} and norm_type {kind:g}, expected a norm above 0 (inf clips nothing), "
                "and 2 or another number."
            )
        return norm, kind

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and those collected by embeddings."""
        super().zero_grad(set_to_none)
        self._job.lookups.zero_grad()

    def shares_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether another optimizer has some of the same parameters."""
        ours = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def accumulate_slices(self, slices: ClockSlices) -> None:
        """Make `step` finish a clock only with this worker's last slice of that clock.

        Raises:
            UsageError: this strategy cannot add up the gradients of several slices.
        """
        if self.no_slices:
            raise UsageError(f"paceline.shard(..., slices=...) does not go with {self.no_slices}")
        if self._accumulator is None:
            self._accumulator = GradientAccumulator(slices, self._job.lookups)
        self._accumulator.slices = slices

    def drop_slices(self) -> None:
        """Drop the gradients of an unfinished clock, after its loop was left early."""
        if self._accumulator is not None:
            self._accumulator.forget()

    @_watched_on_demand
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None, *, samples: float | None = None
    ) -> float | None:
        """Finish a step of the job and this worker's clock; blocks as long as the strategy requires.

        Args:
            closure: computes the loss and its gradients; called once, before the step.
            samples: how many samples the gradients stand for, their weight under scale="samples". By default as many
                as loaders from `shard` and `feed` have returned since the last step, or 1 where there are none.

        Returns:
            The result of the closure.

        Raises:
            UsageError: gradients that cannot be used (see `send` of the strategy), or another optimizer has since been
                distributed for some of the same parameters.
            DeadlineExceeded: values did not become fresh enough in time.
            PeerError: a server or a worker is gone, or this worker was evicted.
            SystemExit: this worker was told to leave, and has left; see `paceline.preempted`.
        """
        if self._successor:
            raise UsageError(
                f"worker {self._job.rank}, step of '{self._settings.name}': '{self._successor}' was distributed later "
                "for some of its parameters, and has them since. Step that one and drop this one; or give each "
                "optimizer parameters of its own."
            )
        if samples is not None:  # before anything is sent
            samples = as_count(samples, f"step of '{self._settings.name}'")
        loss = None
        if closure is not None:
            if not callable(closure):  # pyright: ignore[reportUnnecessaryComparison] - scripts are not typed
                raise UsageError(
                    f"step of '{self._settings.name}': closure is {shown(closure)}, expected a function, or step() "
                    "after loss.backward()."
                )
            with torch.enable_grad():
                loss = closure()
        self.expected = (
            0.0 if self._accumulator is None or samples is not None else self._accumulator.slices.num_expected
        )
        found_inf = cast("Tensor | None", getattr(self, "found_inf", None))  # set by a GradScaler during this call
        if found_inf is not None:
            self._has_scaler = True
            self._apply_scaler(self._parameters(), overflowed=bool(found_inf.item()))
        if self._accumulator is not None:
            parameters = self._parameters()
            with self._job.metrics.communicating():
                if self._accumulator.add_slice(parameters, samples):
                    return loss
            samples = self._accumulator.finish_mean(parameters, samples)
        weight, job = self.send(samples), self._job
        if self.overflowed:
            weight = 0.0
            job.lookups.zero_grad()
        if self.overflowed or self._num_overflows:
            self._note_overflow()
        job.lookups.expected = self.expected
        self.turns = self.turns[1], job.finish_clock(weight)
        self.receive()
        job.exit_if_preempted()
        return loss

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _apply_scaler(self, parameters: Iterable[Tensor], *, overflowed: bool) -> None:
        """Unscale the gradients, and those of embeddings, or leave them out of the clock, as a GradScaler requires.

        Raises:
            UsageError: this strategy does not support a GradScaler; or the script has unscaled gradients itself, which
                the scaler cannot do for embeddings.
        """
        where = f"worker {self._job.rank}, step of '{self._settings.name}'"
        if self.no_scaling:
            raise UsageError(f"{where}: a GradScaler does not go with {self.no_scaling}")
        scale = cast("Tensor | None", getattr(self, "grad_scale", None))  # None where the script has unscaled
        if overflowed:
            self.overflowed = True
        elif scale is not None:
            inverse = float(scale.double().reciprocal().float())
            with torch.no_grad():
                for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
                    gradient.mul_(inverse)
            self._job.lookups.multiply(inverse)
        elif self._job.lookups.have_gradients:
            raise UsageError(
                f"{where}: scaler.unscale_ does not know the gradients of paceline.Embedding, which stay scaled: "
                "leave it out, or train in bfloat16, which needs no scaler."
            )

    def _note_overflow(self) -> None:
        """Count a step that a GradScaler skipped, and report it on stderr where that happens repeatedly."""
        self._num_overflows, overflowed = (self._num_overflows + 1 if self.overflowed else 0), self.overflowed
        self.overflowed = False
        if not overflowed:
            return
        metrics, clock = self._job.metrics, self._job.exchange.worker_set.node.clock
        metrics.note_refused("step", self._settings.name, clock, _OVERFLOW, is_told=False)
        if self._num_overflows >= _USUAL_OVERFLOWS and is_told(self._num_overflows):
            metrics.tell(
                f"worker {self._job.rank}, clock {clock}: the last {self._num_overflows} steps of "
                f"'{self._settings.name}' were left out, as the GradScaler found gradients that are not finite at "
                "every scale: see whether the loss is finite, and train in bfloat16 if it is."
            )

    def _note_refused(self, reason: str, *, is_told: bool = True) -> None:
        """Count a step that was not applied, and report it unless another worker does."""
        self.num_refused += 1
        clock = self._job.exchange.worker_set.node.clock
        self._job.metrics.note_refused("step", self._settings.name, clock, reason, is_told=is_told)

    def _count_refusal(self, _: PushOutcome) -> None:
        self.num_refused += 1

    def _tell_of_scales(self) -> None:
        """Tell, once, that this worker's GradScaler misses a step whose gradients are combined in the scales of all."""
        if not self._has_scaler or self._has_told_of_scales:
            return
        self._has_told_of_scales = True
        self._job.metrics.tell(
            f"worker {self._job.rank}, '{self._settings.name}': it has no batch in a step of the others, so its "
            "GradScaler does not count that step and will change its scale in another one than theirs. Gradients are "
            "combined while they are scaled, so replicas part then: have batches that divide by the workers "
            "(drop_last=True), or train in bfloat16, which needs no scaler."
        )

    def _share_of_rate(self, weight: float) -> float:
        """Return which part of the learning rate a push has, of those that a clock applies one by one."""
        return weight / self.expected if self.expected else 1.0 / self._settings.num_replicas(self._job)

    def _weight_of_step(self, samples: float | None) -> float:
        """Return the weight of a step: what the script says, else the samples since the last step, else 1."""
        new, self._num_samples = self._job.num_samples - self._num_samples, self._job.num_samples
        return samples if samples is not None else new or 1

    @abstractmethod
    def send(self, samples: float | None) -> float:
        """Send the gradients of this step, before its clock is finished; return their weight in samples."""
        ...

    @abstractmethod
    def receive(self) -> None:
        """Request the values of the next step, after the clock is finished."""
        ...

    def send_without_batch(self) -> None:
        """Send what is due for a step without a batch, before its clock is finished; by default nothing."""

    @abstractmethod
    def step_without_batch(self) -> None:
        """Take part in a step without a batch, after the clock is finished."""
        ...

    @abstractmethod
    def wait_for_values(self) -> None:
        """Wait until the parameters have the values requested by the last step."""
        ...

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Keep the gradients of the passes in the block local, because more are added before the step."""
        ...

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Put one consistent state into the model, without gradients, for evaluation or saving."""
        ...


def require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step evaluates the model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "torch.optim.LBFGS evaluates the model several times a step, each time with gradients of this worker "
            "alone. Choose another, Adam for example."
        )


def require_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has taken steps, whose state would be lost silently, or whose step needs a closure."""
    require_plain_step(optimizer)
    for state in cast("dict[Tensor, dict[str, object]]", optimizer.state).values():
        steps = cast("Tensor | float", state.get("step", 0))
        if float(steps) > 0 or ("step" not in state and any(value is not None for value in state.values())):
            raise UsageError(
                "this optimizer has already taken steps: distribute a new one, then give that the state with "
                "load_state_dict(...)."
            )


def optimizers_of_loop(optimizers: Sequence[Distributed]) -> list[Distributed]:
    """Return the optimizers that the current loop steps once a batch.

    These are the ones whose last step is later than the last step but one of the most recent optimizer, or, if there
    are any, those made since and not yet stepped. Optimizers of loops that are over are left out.
    """
    newest = max((one for one in optimizers if one.turns[0] < one.turns[1]), key=lambda one: one.turns[1], default=None)
    before, last = newest.turns if newest is not None else (0, 0)
    fresh = [one for one in optimizers if one.turns[0] == one.turns[1] >= last]
    return fresh or [one for one in optimizers if one.turns[1] > before and one.turns[0] < one.turns[1]]


class Strategy(Protocol):
    """Way to train one model on several workers."""

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> Distributed:
        """Make the optimizer of this strategy, with the same initial values on all workers; blocks until all call it.

        Raises:
            UsageError: the strategy does not support the optimizer, the model or the settings.
        """
        ...


def distribute(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    settings: Settings,
    job: TrainingJob,
) -> Distributed:
    """Distribute the optimizer of a whole model among all workers; that of a part among the workers that hold it.

    Raises:
        UsageError: a `SyncBatchNorm` that would not combine batches; for a part, `overlap`, as each micro-batch adds to
            the gradients, `factors`, or an optimizer that needs whole tensors, for layers that are split.
    """
    part = settings.part
    if model is not None and settings.num_replicas(job) > 1:
        _require_no_own_exchange(model, settings.name)
    if part is None:
        return strategy.distribute(optimizer, model, settings, job)
    if settings.overlap:
        raise UsageError(
            f"'{settings.name}' was given overlap=True, but the gradients of a model that is cut are whole only when "
            "forward_backward is over: leave it out."
        )
    if settings.factors:
        raise UsageError(
            f"'{settings.name}' was given factors=True, which is for a model that each worker holds as a whole, and "
            "this one is cut over several: leave it out."
        )
    if part.grid.tensor > 1 and model is not None:
        _require_elements(optimizer, model, settings.name)
    settings = replace(settings, name=f"{settings.name}{part.name_end}")
    made = strategy.distribute(optimizer, model, settings, job)
    made.no_slices = "a model that several workers hold, as all of them need the same slices: leave them out."
    made.no_scaling = "a model that several workers hold, as they do not see the same gradients: train in bfloat16."
    return made


def _require_no_own_exchange(model: nn.Module, name: str) -> None:
    """Refuse layers that exchange statistics in their forward by a process group of torch that is not there."""
    for own, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and not _can_exchange(layer):
            raise UsageError(
                f"'{name}': layer '{own}' is a SyncBatchNorm, which combines the batches of all workers in its forward "
                "by torch.distributed, on GPUs only; here each would use its own batch alone. Take BatchNorm, "
                "whose statistics Paceline averages over the workers after each step, or a layer that looks at no "
                "batch (GroupNorm, LayerNorm)."
            )


def _can_exchange(layer: nn.SyncBatchNorm) -> bool:
    """Return whether torch combines batches in this layer; without a group it silently does not."""
    on_host = any(each.device.type == "cpu" for each in (*layer.parameters(), *layer.buffers()))
    return not on_host and torch.distributed.is_initialized()


def _require_elements(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """Refuse an optimizer that needs whole tensors, for parameters of which each rank has a part."""
    from paceline.model_parallel.tensor import (
        cut_parameters,  # takes half a second, and is imported already if layers are split
    )

    cut = {id(parameter): own for own, parameter in cut_parameters(model).items()}
    found = [cut[id(one)] for group in optimizer.param_groups for one in group["params"] if id(one) in cut]
    if found and granularity_of(optimizer) != "element":
        raise UsageError(
            f"'{name}': {type(optimizer).__name__} looks at whole tensors, and of '{found[0]}' each tensor rank has a "
            "part: every rank would step by what its part says. Take an optimizer that steps each element by itself "
            "(AdamW, SGD, ...) for parameters of split layers, or pipeline:K or all-reduce in place of tensor:T."
        )
