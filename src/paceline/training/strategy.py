"""Interfaces of distributed training: a strategy, and the optimizer that it makes for a training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.observe.notices import is_told
from paceline.training.gradient_accumulation import GradientAccumulator, SliceSums
from paceline.training.scaling import OVERFLOW, USUAL_OVERFLOWS, Scaling
from paceline.worker.validation import as_count

if TYPE_CHECKING:
    from paceline.training.optimizer import Settings, TrainingJob


class Distributed(torch.optim.Optimizer, ABC):
    """Optimizer whose step is a step of the whole job; used like the optimizer it was made from.

    Attributes:
        num_refused: steps or pushes of this worker that were not applied, because they were not finite or too late.
        title: what is distributed, and how, in a few words.
        turn_s: time of its last step, where optimizers of all workers have to step in the same order.
        turns: clocks of its last step but one and of its last step; before its first step, the clock at which it was
            made.
        overflowed: whether a `torch.amp.GradScaler` found gradients of this worker in this clock that are not finite.
    """

    num_refused: int = 0
    turn_s: float = 0.0
    turns: tuple[int, int] = (0, 0)
    # Number of samples in this step over all workers; 0 where that is not known.
    expected: float = 0.0
    no_slices: str = ""  # reason why gradients of several slices of a clock cannot be added up; empty where they can
    no_scaling: str = ""  # reason why a GradScaler cannot be used; empty where it can
    overflowed: bool = False
    # Makes a GradScaler call `step` on every worker, also after an overflow, so that all finish the same clocks.
    _step_supports_amp_scaling = True
    _num_overflows: int = 0  # since the last step without one
    _accumulator: GradientAccumulator | None = None  # made when a loop has slices
    _is_whole: bool = False  # whether all parameter groups have been added
    _successor: str = ""  # name of the optimizer that was distributed later for some of its parameters

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, way: str, job: TrainingJob) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._name = name
        self.title = f"Distributed {type(optimizer).__name__}, {way}"
        self._job = job
        self._is_whole = True

    def __repr__(self) -> str:
        """Return what is distributed, and how."""
        groups = self.param_groups
        num_parameters = sum(len(group["params"]) for group in groups)
        rates = ", ".join(str(group.get("lr", "-"))[:12] for group in groups[:4]) + (", ..." if groups[4:] else "")
        return f"{self.title} ('{self._name[:60]}', {num_parameters} parameters, lr {rates})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that are added after construction."""
        if self._is_whole:
            raise UsageError(
                f"'{self._name}' has all its parameters from the start: give the wrapped optimizer every group, and "
                "freeze those that are to join later with requires_grad_(False)."
            )
        super().add_param_group(param_group)

    def hold_still(self) -> None:
        """Freeze the parameters before a clock is finished by another call than `step`."""

    def hand_over(self, successor: str) -> None:
        """Refuse further steps, because `successor` has taken over some of the parameters; the state stays."""
        self._successor = successor
        self.detach()

    def detach(self) -> None:
        """Remove hooks from forward and backward of the model, where the strategy has any."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters and those collected by embeddings."""
        super().zero_grad(set_to_none)
        self._job.lookups.zero_grad()

    def shares_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether another optimizer has some of the same parameters."""
        ours = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def accumulate_slices(self, slices: SliceSums) -> None:
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
                f"worker {self._job.rank}, step of '{self._name}': '{self._successor}' was distributed later for some "
                "of its parameters, and has them since. Step that one and drop this one; or give each optimizer "
                "parameters of its own."
            )
        if samples is not None:  # before anything is sent
            samples = as_count(samples, f"step of '{self._name}'")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.expected = (
            0.0 if self._accumulator is None or samples is not None else self._accumulator.slices.num_expected
        )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._apply_scaler(parameters)
        if self._accumulator is not None:
            with self._job.communicating():
                if self._accumulator.add_slice(parameters, samples):
                    return loss
            samples = self._accumulator.finish_mean(parameters, samples)
        weight = self.send(samples)
        if self.overflowed:
            weight = 0.0
            self._job.lookups.zero_grad()
        self._note_overflow()
        self._job.lookups.expected = self.expected
        self.turns = self.turns[1], self._job.clock(samples=weight)
        self.receive()
        self._job.heed()
        return loss

    def _apply_scaler(self, parameters: Iterable[Tensor]) -> None:
        """Unscale the gradients, or leave them out of the clock, as a GradScaler requires.

        Raises:
            UsageError: this strategy does not support a GradScaler.
        """
        scaling = Scaling.of(self)
        if scaling is None:
            return
        where = f"worker {self._job.rank}, step of '{self._name}'"
        if self.no_scaling:
            raise UsageError(f"{where}: a GradScaler does not go with {self.no_scaling}")
        if scaling.overflowed:
            self.overflowed = True
        else:
            scaling.undo(parameters, self._job.lookups, where)

    def _note_overflow(self) -> None:
        """Count a step that a GradScaler skipped, and report it on stderr where that happens repeatedly."""
        self._num_overflows, overflowed = (self._num_overflows + 1 if self.overflowed else 0), self.overflowed
        self.overflowed = False
        if not overflowed:
            return
        meter, clock = self._job.meter, self._job.exchange.worker_set.node.clock
        meter.note_refused("step", self._name, clock, OVERFLOW, is_told=False)
        if self._num_overflows >= USUAL_OVERFLOWS and is_told(self._num_overflows):
            meter.tell(
                f"worker {self._job.rank}, clock {clock}: the last {self._num_overflows} steps of '{self._name}' were "
                "left out, as the GradScaler found gradients that are not finite at every scale: see whether the loss "
                "is finite, and train in bfloat16 if it is."
            )

    def _note_refused(self, reason: str, *, is_told: bool = True) -> None:
        """Count a step that was not applied, and report it unless another worker does."""
        self.num_refused += 1
        clock = self._job.exchange.worker_set.node.clock
        self._job.meter.note_refused("step", self._name, clock, reason, is_told=is_told)

    @abstractmethod
    def send(self, samples: float | None) -> float:
        """Send the gradients of this step, before its clock is finished; return their weight in samples."""
        ...

    @abstractmethod
    def receive(self) -> None:
        """Request the values of the next step, after the clock is finished."""
        ...

    @abstractmethod
    def follow(self) -> None:
        """Take part in a step without a batch, after the clock is finished."""
        ...

    @abstractmethod
    def arrive(self) -> None:
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


def in_use(optimizers: Sequence[Distributed]) -> list[Distributed]:
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
