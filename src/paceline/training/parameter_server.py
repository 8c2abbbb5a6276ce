"""Parameter-server strategy: `step()` pushes gradients, finishes a clock and pulls values; servers update."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.core.consistency import Consistency
from paceline.training.bucket import BUCKET_BYTES, Bucket, Overlap, bucket_ranges
from paceline.training.buffers import open_buffers
from paceline.training.device_copies import DeviceCopies
from paceline.training.flat import FlatParameters, segments_of
from paceline.training.gradients import Gradients
from paceline.training.state import (
    StateOf,
    check_state,
    checked_by_all,
    fetch_state,
    hyperparameters,
    loaded_by_first,
    send_state,
)
from paceline.training.strategy import Distributed, Settings, TrainingJob, open_flat, require_fresh
from paceline.training.weights import Weights
from paceline.update.table import TableSpec
from paceline.update.torch_rule import PushedHyper, from_optimizer


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
        super().__init__(optimizer, str(settings.consistency), settings, job)
        self.no_slices = settings.no_slices
        if settings.overlap:
            self.no_scaling = "overlap=True, which sends gradients before it unscales them: leave one of the two out."
        self._num_steps = 0
        self._lockstep = settings.consistency.lockstep
        # Each how many steps servers are asked for values that this worker has not been sent; 0 for never.
        self._fetch_every = (settings.fetch_every or 0) if settings.consistency.deliver == "on_pull" else 0
        named, segments = segments_of(optimizer, model)
        dtype = FlatParameters.over(named).dtype
        policy = str(settings.consistency)
        self._spec = TableSpec(settings.name, segments, dtype, rule, policy, settings.scale, settings.nonfinite)
        self._hyper = PushedHyper(rule)
        self._buckets = self._open_buckets(named)
        self._buffers = open_buffers(model, settings, settings.consistency, job, read_my_writes=True)
        self._overlap = Overlap(self._buckets, model, self._send) if settings.overlap else None
        self._fetch(refresh=True)
        self.wait_for_values()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def send(self, samples: float | None) -> float:
        """Push the gradients.

        Raises:
            UsageError: a gradient is sparse, or is not finite under nonfinite="halt".
        """
        with self._job.metrics.communication:
            weight = self._weight_of_step(samples)
            hyper = self._hyper.of(self.param_groups)  # without what schedulers keep beside them
            expected = self.expected if self._lockstep else 0.0
            self.num_refused += self.overflowed
            buckets = [] if self.overflowed else self._buckets
            every = self._fetch_every
            ends_clock = len(buckets) == 1 and every > 0 and (self._num_steps + 1) % every == 0
            for bucket in reversed(buckets):  # backward reached the last first, so devices finish it first
                pushed = bucket.push(weight, hyper, expected, ends_clock=ends_clock)
                pushed.add_done_callback(self._count_refusal)
            if self._buffers is not None:
                self._buffers.push(ends_clock=ends_clock)
            if self._overlap is not None:
                self._overlap.begin_step()
        return weight

    def receive(self) -> None:
        """Fetch values when `fetch_every` and the consistency require it."""
        self._num_steps += 1
        every = self._fetch_every
        with self._job.metrics.communication:
            self._fetch(refresh=every > 0 and self._num_steps % every == 0)

    def step_without_batch(self) -> None:
        """Fetch values as `step` would, for a clock that this worker finished without a gradient.

        `shard` calls this at the end of an epoch that has one more batch for other workers than for this one.
        """
        self.receive()

    def wait_for_values(self) -> None:
        """Wait until the parameters have the values requested by the last step; with `overlap` some may be late."""
        for bucket in self._buckets:
            bucket.wait_for_values()

    def freeze_values(self) -> None:
        """Freeze the parameters while a clock ends between a backward that sent gradients and their step."""
        if self._overlap is not None and any(bucket.is_sent for bucket in self._buckets):
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
                bucket.wait_for_values()
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
        self.wait_for_values()  # with `overlap` values of the last step may be under way
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
            own.update(hyperparameters(given))
        with loaded_by_first(self._job, self._settings.first):
            if self._job.rank == self._settings.first:
                for bucket in self._buckets:
                    bucket.wait_for_values()
                    send_state(bucket.table, bucket.own(state_dict["state"]), bucket.flat)
                if self._buffers is not None:
                    send_state(self._buffers.table, {}, self._buffers.flat)
        self._fetch(refresh=True)
        self.wait_for_values()

    def detach(self) -> None:
        """Move gradients and parameters to memory of this process, and send nothing from backward."""
        self._overlap = None
        for bucket in self._buckets:
            bucket.gradients.detach()
            bucket.weights.detach()
        if self._buffers is not None:
            self._buffers.weights.detach()

    # -- behind the scenes -------------------------------------------------------------------------------------------

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
        views = lockstep if self._settings.views is None else bool(self._settings.views)
        spec = replace(self._spec, name=name, segments=self._spec.segments[run.start : run.stop])
        # In-place writes are safe where `step` waits for every push to be applied: no server reads during backward.
        gradients = Gradients(flat, lockstep and not self._settings.overlap, device_copies)
        # Devices cannot map the servers' memory, and copy fastest from pinned memory, which shared memory must not be.
        live = views and not gradients.are_on_device
        table = open_flat(self._job, self._settings, spec, flat, read_my_writes=True, live=live)
        weights = Weights(flat, table, device_copies)
        self._job.detach_at_close(weights)
        bucket = Bucket(run.start, flat, table, weights, gradients)
        bucket.reserve()
        return bucket

    def _send(self, bucket: Bucket) -> None:
        """Send a bucket while backward runs; samples and hyperparameters of the step must be final."""
        with self._job.metrics.communicating():
            weight = self._job.num_samples - self._num_samples or 1
            bucket.push_in_backward(weight, self._hyper.of(self.param_groups))

    def _fetch(self, *, refresh: bool) -> None:
        for bucket in self._buckets:
            bucket.request_values(refresh=refresh, more=self._buffers is not None)
        if self._buffers is not None:
            self._buffers.fetch(refresh=refresh)
        if self._overlap is None or not self._overlap.can_wait:
            for bucket in self._buckets:
                bucket.wait_for_values()


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
