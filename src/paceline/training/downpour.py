"""Downpour SGD: workers step copies of their own, and push accrued gradients and fetch values every few steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakMethod

import msgspec
import torch
from torch import Tensor, nn

from paceline.core.calls import checked
from paceline.core.consistency import asynchronous
from paceline.errors import UsageError
from paceline.training.buffers import open_buffers
from paceline.training.flat import FlatParameters, Weights, segments_of, sparse_gradient
from paceline.training.model_checks import require_own_memory
from paceline.training.state import (
    check_state,
    checked_by_all,
    fetch_state,
    hyperparameters,
    loaded_by_first,
    send_state,
)
from paceline.training.strategy import CountedSteps, Distributed, Settings, TrainingJob, open_flat, require_fresh
from paceline.update.named_rules import Add
from paceline.update.rates import require_rate, with_share_of_rate
from paceline.update.summing import num_nonfinite
from paceline.update.table import NonFinite, Segment, TableSpec
from paceline.update.torch_rule import from_optimizer, pushed_hyper
from paceline.worker.pushes import NONFINITE_ADVICE, PushOutcome, some_parameters
from paceline.worker.table import PendingRead


@dataclass(slots=True)
class Accrual:
    """The sum of a worker's gradients since its last push.

    Attributes:
        total: (elements of all,), on the CPU.
        num_steps: number of steps in the sum.
        num_samples: number of samples in the sum.
    """

    flat: FlatParameters
    total: Tensor = field(init=False)
    num_steps: int = 0
    num_samples: float = 0.0
    _parts: list[Tensor] = field(init=False)  # of `total`, one a tensor
    _present: set[int] = field(default_factory=set[int])  # tensors that had a gradient in any of the steps

    def __post_init__(self) -> None:
        """Start with an empty sum."""
        self.total = self.flat.empty().zero_()
        self._parts = self.flat.parts(self.total)

    def add(self, gradients: Mapping[int, Tensor], samples: float) -> None:
        """Add the gradients of a step, by the indices of their tensors."""
        for index, gradient in gradients.items():
            self._parts[index].add_(gradient.to(self._parts[index].device))
        self._present.update(gradients)
        self.num_steps += 1
        self.num_samples += samples

    def absent(self) -> tuple[int, ...]:
        """Return the indices of the tensors that had no gradient in any of the steps."""
        return tuple(index for index in range(len(self._parts)) if index not in self._present)

    def descend(self, rates: Sequence[float]) -> None:
        """Step the tensors against the sum, at a rate for each."""
        descend(self.flat, {index: self._parts[index] for index in self._present}, rates)

    def clear(self) -> None:
        """Reset the sum."""
        self.total.zero_()
        self._present.clear()
        self.num_steps, self.num_samples = 0, 0.0


def descend(flat: FlatParameters, gradients: Mapping[int, Tensor], rates: Sequence[float]) -> None:
    """Step each tensor against its gradient, both by the index of the tensor."""
    with torch.no_grad():
        for index, gradient in gradients.items():
            tensor = flat.tensors[index]
            tensor.add_(gradient.to(tensor.device), alpha=-rates[index])


def gradients_of(flat: FlatParameters, nonfinite: NonFinite, where: str) -> dict[int, Tensor] | None:
    """Return the gradients of the tensors, by index; None if they may not be used.

    Values that are not finite become 0 under "zero", and stay under "ignore".

    Raises:
        UsageError: a gradient is sparse, or under "halt" not finite.
    """
    found: dict[int, Tensor] = {}
    for index, (name, tensor) in enumerate(flat.named.items()):
        gradient = tensor.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise sparse_gradient(name)
        found[index] = gradient.detach()
    if nonfinite == "ignore" or not any(map(num_nonfinite, found.values())):
        return found
    if nonfinite == "zero":
        return {index: gradient.nan_to_num(0.0, 0.0, 0.0) for index, gradient in found.items()}
    if nonfinite == "halt":
        raise UsageError(f"{where}: a gradient has NaN or infinity: the loss was not finite, or the rate is too high.")
    return None


def refusal_of(named: Mapping[str, Tensor]) -> str:
    """Return why a step is left out: the parameters whose gradients are not finite."""
    dense = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
    bad = [name for name, gradient in dense.items() if gradient.layout == torch.strided and num_nonfinite(gradient)]
    return f"the gradient of {some_parameters(bad, len(dense))} has NaN or infinity. {NONFINITE_ADVICE}"


_POLICY: Final = asynchronous()


class Downpour(msgspec.Struct, frozen=True):
    """Downpour SGD strategy; see `paceline.strategies.downpour`.

    Args:
        push_every: number of steps whose gradients make one push.
        fetch_every: number of steps between two fetches.
        warm_start_steps: number of steps that worker 0 takes alone before the others start.
        local_lr: learning rate of the steps on a worker's own copy; None for that of the optimizer.
    """

    push_every: int = 1
    fetch_every: int = 1
    warm_start_steps: int = 0
    local_lr: float | None = None

    def __post_init__(self) -> None:
        """Validate the cadences and the rate."""
        for name, value, least in (
            ("push_every", self.push_every, 1),
            ("fetch_every", self.fetch_every, 1),
            ("warm_start_steps", self.warm_start_steps, 0),
        ):
            if value < least:
                raise UsageError(f"{name} of downpour is {value}, expected {least} or more steps.")
        if self.local_lr is not None and not 0 <= self.local_lr < math.inf:
            raise UsageError(f"local_lr of downpour is {self.local_lr}, expected 0 or a number above.")

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> DownpourOptimizer:
        """Make an optimizer that pushes accrued gradients; the update runs on the servers."""
        return DownpourOptimizer(optimizer, model, settings, self, job)


@checked
def downpour(
    push_every: int = 1, fetch_every: int = 1, *, warm_start_steps: int = 0, local_lr: float | None = None
) -> Downpour:
    """Return Downpour SGD (Dean et al., 2012) for `paceline.distributed(strategy=...)`: no worker waits for another.

    Every worker adds up its gradients, and steps its own copy of the parameters at once, with a fixed rate. Each
    `push_every` steps it pushes the sum, an update of its own on the servers by the wrapped optimizer; Adagrad
    tolerates many workers. Each `fetch_every` steps it fetches the servers' values, and repeats its unpushed steps on
    them. With `model` given, it waits for the values when the next forward begins, else in `step`.

    Args:
        push_every: 1 or more steps.
        fetch_every: 1 or more steps.
        warm_start_steps: steps that worker 0 takes alone, from the initial values; meanwhile the others wait in
            `paceline.distributed`, and finish these clocks with it. Each of the waits has the deadline of the job.
        local_lr: of a worker's steps on its own copy; by default the rate of the optimizer's group.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
        >>> optimizer = paceline.distributed(adagrad, strategy=paceline.strategies.downpour(push_every=2), name="pour")
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
    """
    return Downpour(push_every, fetch_every, warm_start_steps, local_lr)


class DownpourOptimizer(Distributed):
    """Optimizer used like the one it wraps, whose update and state are on the servers.

    Attributes:
        num_refused: steps that were not added, because a gradient was not finite, and pushes that were not applied.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None,
        settings: Settings,
        how: Downpour,
        job: TrainingJob,
    ) -> None:
        rule = from_optimizer(optimizer)
        require_fresh(optimizer)
        super().__init__(optimizer, "downpour", settings, job)
        self._how = how
        self._rate_share = 1.0 / settings.num_replicas(job) if settings.divide_lr else 1.0
        if settings.divide_lr:
            require_rate(rule, settings.name)
        self._num_steps = 0
        self._counted = CountedSteps(how.push_every, f"every {how.push_every} steps of its own")
        job.counted_steps[settings.name] = self._counted
        named, segments = segments_of(optimizer, model)
        require_own_memory(named, settings.name)
        self._flat = FlatParameters.over(named)
        self._accrual = Accrual(self._flat)
        scale, nonfinite = settings.scale, settings.nonfinite
        self._spec = TableSpec(settings.name, segments, self._flat.dtype, rule, str(_POLICY), scale, nonfinite)
        self._table = open_flat(job, settings, self._spec, self._flat)
        self._weights = Weights(self._flat, self._table)
        job.detach_at_close(self._weights)
        self._buffers = open_buffers(model, settings, _POLICY, job, read_my_writes=False)
        self._asked: PendingRead | None = None
        self._waits_in_forward = self._wait_in_forward(model)
        if how.warm_start_steps:
            self._start_after_first(how.warm_start_steps)
        self._ask()
        self.wait_for_values()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def send(self, samples: float | None) -> float:
        """Add the gradients to the accrued sum, step the local copy with them, and push if it is time.

        Raises:
            UsageError: a gradient is sparse, or is not finite under nonfinite="halt".
        """
        self.wait_for_values()  # for parameters that were used without the forward of the model
        weight = self._weight_of_step(samples)
        where = f"worker {self._job.rank}, step of '{self._settings.name}'"
        gradients = None if self.overflowed else gradients_of(self._flat, self._settings.nonfinite, where)
        if gradients is None:
            gradients = {}
            if self.overflowed:
                self.num_refused += 1
            else:
                self._note_refused(refusal_of(self._flat.named))
        descend(self._flat, gradients, self._rates())
        self._accrual.add(gradients, weight)
        if self._accrual.num_steps == self._how.push_every:
            self._push()
        self._counted.num_made += 1
        self._counted.num_unpushed = self._accrual.num_steps
        return weight

    def receive(self) -> None:
        """Request the servers' values, if it is time."""
        self._num_steps += 1
        if self._num_steps % self._how.fetch_every == 0:
            self._ask()
            if not self._waits_in_forward:
                self.wait_for_values()

    def step_without_batch(self) -> None:
        """Request the servers' values, if it is time, for a clock that was finished without a gradient."""
        self._counted.num_without_batch += 1
        self.receive()

    def wait_for_values(self) -> None:
        """Wait until the parameters have the values requested last, with this worker's unpushed steps on top."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        with self._job.metrics.communicating():
            self._table.finish_read(asked, self._weights.set_from)
            self._accrual.descend(self._rates())
            if self._buffers is not None:
                self._buffers.push()
                self._buffers.fetch(refresh=True)

    def detach(self) -> None:
        """Detach the parameters from the servers' memory."""
        self._weights.detach()

    def accumulate(self) -> AbstractContextManager[None]:
        """Do nothing: gradients are used in `step`, with all that was added to them until then."""
        return nullcontext()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Put the servers' values into the model for the length of a `with` block: all updates that have arrived.

        Embeddings read the same state. Gradients are off inside the block. Training continues afterwards with the
        worker's own copy.
        """
        with ExitStack() as held:
            held.enter_context(torch.no_grad())
            held.enter_context(self._job.lookups.exactly())
            self.wait_for_values()
            held.enter_context(self._weights.newest())
            if self._buffers is not None:
                held.enter_context(self._buffers.weights.newest())
            yield

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state on the servers in the form of the wrapped optimizer's own `state_dict`; blocks."""
        return {**super().state_dict(), "state": fetch_state(self._table, self._flat)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the servers, with the parameters and buffers of worker 0.

        Accrued gradients are dropped. Every worker must call it, with the same state; blocks until all have.

        Raises:
            UsageError: the state belongs to another optimizer or model; nothing is changed then.
            Refused: another worker raised UsageError, or worker 0 failed to send the state or is gone.
        """
        with checked_by_all(self._job):
            checked = check_state(self._spec, state_dict, self.param_groups)
        self.wait_for_values()
        self._accrual.clear()
        with loaded_by_first(self._job, self._settings.first):
            if self._job.rank == self._settings.first:
                send_state(self._table, checked["state"], self._flat)
                if self._buffers is not None:
                    send_state(self._buffers.table, {}, self._buffers.flat)
        for own, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update(hyperparameters(given))
        self._ask()
        self.wait_for_values()

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _wait_in_forward(self, model: nn.Module | None) -> bool:
        """Make the model wait for values before its forward and `state_dict`, if it has all the parameters."""
        if model is None or self._settings.part is not None:  # stages of a pipeline run without a forward of it
            return False
        if not set(map(id, model.parameters())).issuperset(map(id, self._flat.tensors)):
            return False
        wait = _calling(WeakMethod(self.wait_for_values))
        model.register_forward_pre_hook(wait)
        model.register_state_dict_pre_hook(wait)
        return True

    def _start_after_first(self, num_steps: int) -> None:
        """Let the first worker take its first steps alone, while the others finish these clocks without a batch.

        A table under bsp keeps their clocks in step with its own.
        """
        segments = (Segment("clock", (1,)),)
        spec = TableSpec(f"{self._settings.name}.start", segments, "float32", Add(), "bsp", "sum", "reject")
        first = self._settings.first
        shown = self._job.tables.open_dense(spec, (1,), Tensor.zero_, read_my_writes=False, live=False, first=first)
        for _ in range(num_steps if self._job.rank != first else 0):
            self._job.clock(samples=None)
            shown.pull()

    def _ask(self) -> None:
        self.wait_for_values()
        self._asked = self._table.start_read()

    def _push(self) -> None:
        accrual = self._accrual
        hyper = with_share_of_rate(pushed_hyper(self.param_groups, self._spec.rule), self._rate_share)
        pushed = self._table.push(accrual.total, samples=accrual.num_samples, absent=accrual.absent(), hyper=hyper)
        pushed.add_done_callback(self._count_done)
        accrual.clear()

    def _count_done(self, pushed: Future[PushOutcome]) -> None:
        if pushed.exception() is None and not pushed.result().applied:  # a failed worker raises in its next call
            self._count_refusal(pushed.result())

    def _rates(self) -> list[float]:
        """Return the rate of each parameter for steps on the local copy; negative where the optimizer maximizes."""
        rates: list[float] = []
        for group in self.param_groups:
            rate = float(group["lr"]) * self._rate_share if self._how.local_lr is None else self._how.local_lr
            rates += [-rate if group.get("maximize") else rate] * len(group["params"])
        return rates


def _calling(act: WeakMethod[Callable[[], None]]) -> Callable[..., None]:
    """Return a hook that modules call; it keeps no object alive."""

    def call(*_: object) -> None:
        method = act()
        if method is not None:
            method()

    return call
