"""Parameter-server strategy: `step()` pushes gradients, finishes a clock and pulls values; servers update."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from paceline.collective.collectives import Collectives
from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.model_parallel.arrangement import Arrangement
from paceline.training.bucket import BUCKET_BYTES, Bucket, Overlap, bucket_ranges
from paceline.training.buffers import Buffers, buffers_spec, floating_buffers
from paceline.training.device_copies import DeviceCopies
from paceline.training.embedding_gradients import EmbeddingLookups
from paceline.training.flat import FlatParameters, segments_of
from paceline.training.gradients import Gradients
from paceline.training.state import StateOf, check_state, checked_by_all, fetch_state, loaded_by_first, send_state
from paceline.training.strategy import Distributed
from paceline.training.weights import Weights
from paceline.update.table import Hyper, NonFinite, Scale, TableSpec
from paceline.update.torch_rule import from_optimizer, pushed_hyper
from paceline.worker.metrics import StepMetrics
from paceline.worker.pushes import PushOutcome
from paceline.worker.table import Table


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a distributed optimizer; see `paceline.distributed`."""

    consistency: Consistency
    scale: Scale
    fetch_every: int | None
    nonfinite: NonFinite
    name: str
    views: bool | None = None
    overlap: bool = False
    average_buffers: bool = True  # of the model; False where another part of the same model averages them

    @property
    def no_slices(self) -> str:
        """Reason why gradients of several slices of a clock cannot be added up; empty where they can."""
        if self.overlap:
            return "overlap=True, which sends gradients while backward runs: leave one of the two out."
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
    def meter(self) -> StepMetrics:
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

    def open_table(
        self,
        spec: TableSpec,
        shape: tuple[int, ...],
        write_first: Callable[[Tensor], object],
        *,
        read_my_writes: bool,
        live: bool,
    ) -> Table:
        """Declare a table and wait for its initial values, which one worker writes."""
        ...

    def communicating(self) -> AbstractContextManager[None]:
        """Count the time inside the block as communication on the critical path of the loop."""
        ...

    def keep(self, weights: Weights) -> None:
        """Detach these weights from the servers' memory when this worker leaves."""
        ...

    def clock(self, *, samples: float | None) -> int:
        """Push embedding gradients, which stand for `samples` samples, and finish the current clock."""
        ...

    def heed(self) -> None:
        """End this process if it was told to leave; called when a step is over."""
        ...

    def meet(self, place: str, problem: str = "", *, needs_first: bool = False) -> None:
        """Wait until all workers reach the same place; raise Refused on all of them if one has a problem."""
        ...


class DistributedOptimizer(Distributed):
    """Optimizer used like the one it wraps; its state lives on the servers.

    `param_groups` are those of the wrapped optimizer, so schedulers work unchanged: a new learning rate travels with
    the next push. Gradient accumulation needs no extra call: a clock is a call of `step()`.

    Attributes:
        num_refused: pushes of this worker that were not applied (not finite, or late under backup).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> None:
        rule = from_optimizer(optimizer)
        require_fresh(optimizer)
        super().__init__(optimizer, settings.name, str(settings.consistency), job)
        self._settings = settings
        self.no_slices = settings.no_slices
        if settings.overlap:
            self.no_scaling = "overlap=True, which sends gradients before it unscales them: leave one of the two out."
        self._num_steps = 0
        self._num_samples = job.num_samples  # at the last step
        named, segments = segments_of(optimizer, model)
        dtype = FlatParameters.over(named).dtype
        policy = str(settings.consistency)
        self._spec = TableSpec(settings.name, segments, dtype, rule, policy, settings.scale, settings.nonfinite)
        self._buckets = self._open_buckets(named)
        self._buffers = self._open_buffers(model)
        self._overlap = Overlap(self._buckets, model, self._send) if settings.overlap else None
        self._fetch(refresh=True)
        self.arrive()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def send(self, samples: float | None) -> float:
        """Push the gradients.

        Raises:
            UsageError: a gradient is sparse, or is not finite under nonfinite="halt".
        """
        with self._job.communicating():
            weight = samples if samples is not None else self._num_new_samples or 1
            self._num_samples = self._job.num_samples
            hyper = self._hyper()
            expected = self.expected if self._settings.consistency.lockstep else 0.0
            self.num_refused += self.overflowed
            buckets = [] if self.overflowed else self._buckets
            for bucket in reversed(buckets):  # backward reached the last first, so devices finish it first
                bucket.push(weight, hyper, expected).add_done_callback(self._count_refusal)
            if self._buffers is not None:
                self._buffers.push()
            if self._overlap is not None:
                self._overlap.begin_step()
        return weight

    def receive(self) -> None:
        """Fetch values when `fetch_every` and the consistency require it."""
        self._num_steps += 1
        every = self._settings.fetch_every
        eager = self._settings.consistency.deliver == "on_clock"
        with self._job.communicating():
            self._fetch(refresh=not eager and every is not None and self._num_steps % every == 0)

    def follow(self) -> None:
        """Fetch values as `step` would, for a clock that this worker finished without a gradient.

        `shard` calls this at the end of an epoch that has one more batch for other workers than for this one.
        """
        self.receive()

    def arrive(self) -> None:
        """Wait until the parameters have the values requested by the last step; with `overlap` some may be late."""
        for bucket in self._buckets:
            bucket.check_views()
            bucket.arrive()

    def hold_still(self) -> None:
        """Freeze the parameters while a clock ends between a backward that sent gradients and their step."""
        if any(bucket.is_sent for bucket in self._buckets):
            for bucket in self._buckets:
                bucket.weights.hold()

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Keep the gradients of the backward passes in the block local, because more are added before the step.

        Needed only with `overlap`, where the last backward of a step sends its gradients while it runs.
        """
        with self._overlap.accumulate() if self._overlap else nullcontext():
            yield

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Put one consistent state into the model for the length of a `with` block, for evaluation or saving.

        The state contains every update of all clocks below this worker's own (under asynchronous: all updates that have
        arrived); blocks until they are in. Embeddings read the same state. Gradients are off inside the block. Training
        continues afterwards from the values before it.
        """
        node = self._buckets[0].table.node
        clock = node.clock
        with ExitStack() as held:
            held.enter_context(torch.no_grad())
            held.enter_context(self._job.lookups.exactly())
            for bucket in self._buckets:
                bucket.arrive()
                held.enter_context(bucket.weights.newest())
            if self._buffers is not None:
                held.enter_context(self._buffers.weights.newest())
            yield
        if node.clock != clock:  # a quorum finished clocks without this worker: its gradients of old values are late
            self._fetch(refresh=False)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state on the servers in the form of the wrapped optimizer's own `state_dict`.

        A plain `torch.optim` optimizer can load it, and vice versa. Blocks. Call it at a barrier, while no pushes are
        under way; otherwise its parts may be of different clocks.
        """
        self.arrive()  # with `overlap` values of the last step may be under way
        state: StateOf = {}
        for bucket in self._buckets:
            found = fetch_state(bucket.table)
            state.update({bucket.first + index: values for index, values in found.items()})
        return {**super().state_dict(), "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the servers, with the parameters and buffers of worker 0.

        Every worker must call it, with the same state; blocks until all have.

        Raises:
            UsageError: the state belongs to another optimizer or model; nothing is changed then.
            Refused: another worker raised UsageError, or worker 0 failed to send the state or is gone.
        """
        with checked_by_all(self._job):
            check_state(self._spec, state_dict)
        groups = cast("list[dict[str, Any]]", state_dict["param_groups"])
        for own, given in zip(self.param_groups, groups, strict=True):
            own.update({key: value for key, value in given.items() if key not in ("params", "param_names")})
        with loaded_by_first(self._job):
            if self._job.rank == 0:
                for bucket in self._buckets:
                    bucket.arrive()
                    send_state(bucket.table, bucket.own(state_dict["state"]), bucket.flat)
                if self._buffers is not None:
                    send_state(self._buffers.table, {}, self._buffers.flat)
        self._fetch(refresh=True)
        self.arrive()

    def detach(self) -> None:
        """Move gradients and parameters to memory of this process, and send nothing from backward."""
        self._overlap = None
        for bucket in self._buckets:
            bucket.gradients.detach()
            bucket.weights.detach()
        if self._buffers is not None:
            self._buffers.weights.detach()

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _open(self, spec: TableSpec, flat: FlatParameters, *, live: bool = False) -> Table:
        return self._job.open_table(spec, (flat.numel,), flat.pack_values, read_my_writes=True, live=live)

    def _open_buckets(self, named: dict[str, Tensor]) -> list[Bucket]:
        """Open the tables of the parameters: one, or with `overlap` one for each bucket, so that pushes can overlap."""
        settings, names = self._settings, list(named)
        device_copies = DeviceCopies.serving(named.values())
        runs = bucket_ranges(list(named.values()), BUCKET_BYTES) if settings.overlap else [range(len(names))]
        return [
            self._open_bucket(
                f"{settings.name}.{number}" if settings.overlap else settings.name,
                run,
                FlatParameters.over({name: named[name] for name in names[run.start : run.stop]}),
                device_copies,
            )
            for number, run in enumerate(runs)
        ]

    def _open_bucket(self, name: str, run: range, flat: FlatParameters, device_copies: DeviceCopies) -> Bucket:
        lockstep = self._settings.consistency.lockstep
        views = lockstep if self._settings.views is None else self._settings.views
        spec = replace(self._spec, name=name, segments=self._spec.segments[run.start : run.stop])
        # In-place writes are safe where `step` waits for every push to be applied: no server reads during backward.
        gradients = Gradients(flat, lockstep and not self._settings.overlap, device_copies)
        # Devices cannot map the servers' memory, and copy fastest from pinned memory, which shared memory must not be.
        table = self._open(spec, flat, live=views and not gradients.are_on_device)
        weights = Weights(flat, table, device_copies)
        self._job.keep(weights)
        bucket = Bucket(run.start, flat, table, weights, gradients)
        bucket.reserve()
        return bucket

    def _send(self, bucket: Bucket) -> None:
        """Send a bucket while backward runs; samples and hyperparameters of the step must be final."""
        with self._job.communicating():
            bucket.send(self._num_new_samples or 1, self._hyper())

    def _open_buffers(self, model: nn.Module | None) -> Buffers | None:
        named = floating_buffers(model) if model is not None and self._settings.average_buffers else {}
        if not named:
            return None
        flat = FlatParameters.over(named)
        spec = buffers_spec(f"{self._settings.name}.buffers", named, flat, self._settings.consistency)
        return Buffers(flat, self._open(spec, flat), self._job.size)

    def _fetch(self, *, refresh: bool) -> None:
        for bucket in self._buckets:
            bucket.request_values(refresh=refresh)
        if self._buffers is not None:
            self._buffers.fetch(refresh=refresh)
        if self._overlap is None or not self._overlap.can_wait:
            self.arrive()

    def _hyper(self) -> tuple[Hyper, ...]:
        """Return the hyperparameters of each group that the rule uses, without what schedulers keep beside them."""
        return pushed_hyper(self.param_groups, self._spec.rule)

    @property
    def _num_new_samples(self) -> int:
        """The number of samples handed out since the last step."""
        return self._job.num_samples - self._num_samples

    def _count_refusal(self, pushed: Future[PushOutcome]) -> None:
        if pushed.exception() is None:  # a failed worker raises in its next call
            self.num_refused += not pushed.result().applied


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


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """Parameter-server strategy: servers hold the parameters and apply the updates, under any consistency.

    Args:
        consistency: "ssp:3" for example; by default that of `paceline.distributed` or the launcher, else bsp.
    """

    consistency: str | None = None

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> DistributedOptimizer:
        """Make an optimizer whose update runs on the servers."""
        if self.consistency is not None:
            settings = replace(settings, consistency=Consistency.parse(self.consistency))
        return DistributedOptimizer(optimizer, model, settings, job)
