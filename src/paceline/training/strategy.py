"""What a way of distributing training has to be: a strategy makes an optimizer with the face that every loop knows."""

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
from paceline.worker.given import as_count

if TYPE_CHECKING:
    from paceline.training.optimizer import Settings, TrainingJob


class Distributed(torch.optim.Optimizer, ABC):
    """An optimizer whose step is the step of a whole job. Used like the one it was made from.

    Attributes:
        num_refused: steps or pushes of this worker that were not applied, as they were not finite or came too late.
        title: what is distributed, and how, in a few words.
        turn_s: when it was used last, where its workers have to take turns together.
        turns: the numbers of clocks that were finished when it was used last but one, and last; that when it was made
            stands for turns that it has not had.
        overflowed: a `torch.amp.GradScaler` has found gradients of this worker in this clock that are not finite.
    """

    num_refused: int = 0
    turn_s: float = 0.0
    turns: tuple[int, int] = (0, 0)
    # Samples that this step of all workers together is to stand for; 0 where that is not known.
    expected: float = 0.0
    no_slices: str = ""  # why it cannot add up the gradients of several slices of a clock; empty where it can
    no_scaling: str = ""  # why a GradScaler cannot be used; empty where it can
    overflowed: bool = False
    # A GradScaler then calls `step` whatever it has found, so that no worker leaves out a clock of the others.
    _step_supports_amp_scaling = True
    _num_overflows: int = 0  # since the last step that had none
    _accumulator: GradientAccumulator | None = None  # once a loop has slices
    _is_whole: bool = False  # it has all its groups
    _successor: str = ""  # name of the optimizer that was made later for some of its parameters, and has them since

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
        """Refuse groups that come after this was made; used by the constructor before."""
        if self._is_whole:
            raise UsageError(
                f"'{self._name}' has all its parameters from the start: give the wrapped optimizer every group, and "
                "freeze those that are to join later with requires_grad_(False)."
            )
        super().add_param_group(param_group)

    def hold_still(self) -> None:
        """Keep the parameters as they are while a clock ends that is not that of `step`; called before it ends."""

    def hand_over(self, successor: str) -> None:
        """Take no more steps, as an optimizer of this name was made for some of the same parameters; state stays."""
        self._successor = successor
        self.let_go()

    def let_go(self) -> None:
        """Follow forward and backward of the model no more, for strategies that do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters, and with them those that embeddings have collected."""
        super().zero_grad(set_to_none)
        self._job.lookups.zero_grad()

    def shares_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether another optimizer has some of the same parameters."""
        ours = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def begin_slices(self, slices: SliceSums) -> None:
        """Let `step` finish a clock only with the last slice that this worker is given in it.

        Raises:
            UsageError: this strategy has no use for the gradients of several slices.
        """
        if self.no_slices:
            raise UsageError(f"paceline.shard(..., slices=...) does not go with {self.no_slices}")
        if self._accumulator is None:
            self._accumulator = GradientAccumulator(slices, self._job.lookups)
        self._accumulator.slices = slices

    def leave_slices(self) -> None:
        """Drop the gradients of slices whose clock is not finished, as their loop was left."""
        if self._accumulator is not None:
            self._accumulator.forget()

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None, *, samples: float | None = None
    ) -> float | None:
        """Finish a step of the job, and this worker's clock; blocks as long as the strategy asks for.

        Args:
            closure: computes the loss and its gradients first, once.
            samples: how many samples the gradients stand for, their weight under scale="samples". By default as many
                as loaders from `shard` and `feed` have handed out since the last step, or 1 where there are none.

        Returns:
            What the closure returned.

        Raises:
            UsageError: gradients that cannot be used; see `send` of the strategy. Or another optimizer has been
                distributed since for some of the same parameters.
            DeadlineExceeded: values did not become fresh enough in time.
            PeerError: a server or a worker is gone, or this worker was given up.
            SystemExit: this worker was told to leave, and has; see `paceline.preempted`.
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
        self._heed_scaler(parameters)
        if self._accumulator is not None:
            with self._job.communicating():
                if self._accumulator.keep(parameters, samples):
                    return loss
            samples = self._accumulator.pay(parameters, samples)
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

    def _heed_scaler(self, parameters: Iterable[Tensor]) -> None:
        """Do what a GradScaler asks for: unscale the gradients, or leave them out of the clock.

        Raises:
            UsageError: this strategy does not go with a scaler.
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
        """Count a step that a GradScaler left out; told only where it does so again and again."""
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
        """Count a step that was not taken, and tell of it unless another worker does."""
        self.num_refused += 1
        clock = self._job.exchange.worker_set.node.clock
        self._job.meter.note_refused("step", self._name, clock, reason, is_told=is_told)

    @abstractmethod
    def send(self, samples: float | None) -> float:
        """Hand over the gradients of this step, before its clock is finished; return how many samples they weigh."""
        ...

    @abstractmethod
    def receive(self) -> None:
        """Ask for the values of the next step, after the clock is finished."""
        ...

    @abstractmethod
    def follow(self) -> None:
        """Do this worker's part in a step for which it has no batch; its clock is finished already."""
        ...

    @abstractmethod
    def arrive(self) -> None:
        """Wait until the parameters have the values that the last step asked for."""
        ...

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Hold back the gradients of the passes inside, as more are to be added before the step."""
        ...

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Hold one consistent state in the model, without gradients, for evaluation or saving."""
        ...


def in_use(optimizers: Sequence[Distributed]) -> list[Distributed]:
    """Return those that have had a turn since the last turn but one of the newest: what a loop uses with a batch.

    Those that were made after every turn count instead. A script may hold others, of loops that are over.
    """
    newest = max((one for one in optimizers if one.turns[0] < one.turns[1]), key=lambda one: one.turns[1], default=None)
    before, last = newest.turns if newest is not None else (0, 0)
    fresh = [one for one in optimizers if one.turns[0] == one.turns[1] >= last]
    return fresh or [one for one in optimizers if one.turns[1] > before and one.turns[0] < one.turns[1]]


class Strategy(Protocol):
    """How the work of several workers becomes one model."""

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> Distributed:
        """Make the optimizer of this strategy, with the same first values on all workers; blocks until all have come.

        Raises:
            UsageError: an optimizer, a model or settings that this strategy cannot work with.
        """
        ...
