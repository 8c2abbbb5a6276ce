"""Parameter-server strategy: `step()` pushes gradients, finishes a clock and pulls values; servers update.

Parameters lie in buckets of consecutive ones, each with a table and pushes of its own; with `overlap` these are sent
during backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any, cast
from weakref import WeakMethod

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.hooks import RemovableHandle

from paceline.core.consistency import Consistency
from paceline.core.server import LEAD
from paceline.errors import UsageError
from paceline.training.buffers import open_buffers
from paceline.training.device_copies import DeviceCopies
from paceline.training.factors import WeightFactors, follow_layers
from paceline.training.flat import FlatParameters, Gradients, GradientVersion, Weights, segments_of
from paceline.training.model_checks import require_own_memory, storages_of
from paceline.training.state import (
    StateOf,
    check_state,
    checked_by_all,
    fetch_state,
    hyperparameters,
    loaded_by_first,
    send_state,
)
from paceline.training.strategy import Distributed, HeldTensor, Settings, TrainingJob, held_by, open_flat, require_fresh
from paceline.update.clipping import with_clip
from paceline.update.factors import Factors
from paceline.update.rates import require_rate, with_share_of_rate
from paceline.update.rules import RuleSpec
from paceline.update.table import Hyper, TableSpec
from paceline.update.torch_rule import from_optimizer, pushed_hyper
from paceline.worker.pushes import PendingPush, PushBuffer
from paceline.worker.table import PendingRead, Table

BUCKET_BYTES = 4 << 20  # sent while backward runs: large compared to a message, small compared to a model


@dataclass(slots=True)
class Bucket:
    """Consecutive parameters with their table, and the push and the pull of them that are under way.

    Args:
        first: index of the first parameter in the optimizer.
    """

    first: int
    flat: FlatParameters
    table: Table
    weights: Weights
    gradients: Gradients
    factors: Mapping[int, WeightFactors] = field(default_factory=dict[int, WeightFactors])  # by index of the weight
    _reserved: PushBuffer | None = None  # memory of the next push, until it is sent
    # Push of the current step, once it is sent, with the values that it was made from.
    _sent: _Sent | None = None
    _requested: PendingRead | None = None
    _has_told_of_change: bool = False

    def reserve(self) -> None:
        """Reserve memory for the next gradients; blocks until there is some."""
        if self._reserved is None:
            self._reserved = self.table.client.reserve()
            if self.gradients.are_on_device:
                self.gradients.device_copies.lock(self._reserved, self._reserved.gradient)
            self.gradients.attach(self._reserved.gradient)

    def fetch(self, index: int) -> None:
        """Start to copy a final gradient from its device. Does not block."""
        if self._reserved is not None:
            self.gradients.fetch(index)

    def push(
        self, samples: float, hyper: tuple[Hyper, ...], expected: float, *, ends_clock: bool = False
    ) -> PendingPush:
        """Push the gradients of this step, unless backward has.

        `ends_clock`: see `DenseClient.push_reserved`.

        Raises:
            UsageError: gradients, samples or hyperparameters have changed since backward pushed them.
        """
        if self._sent is not None:
            self._require_unchanged(self._sent, samples, hyper)
            sent, self._sent = self._sent, None
            return sent.pushed
        if self._requested is not None:
            self.wait_for_values()  # of a module that did not run; others have waited in their forward
        lock = self.table.client.context.lock
        if lock.failure:
            lock.check()
        if self._reserved is None:  # the push before this one was not sent, as under nonfinite="halt"
            self.reserve()
        absent = self.gradients.collect()
        buffer, self._reserved = self._reserved, None
        assert buffer is not None, "it was just reserved"
        table = self.table
        pushed = table.client.push_reserved(
            buffer,
            count=samples,
            absent=absent,
            hyper=hyper,
            expected=expected,
            ends_clock=ends_clock,
            factors=self._take_factors(buffer.gradient) if self.factors else None,
        )
        pushed.when_refused(table.metrics.note_push(table.spec.name, table.spec.consistency, table.node.clock))
        return pushed

    def _take_factors(self, gradient: Tensor) -> dict[int, Factors]:
        """Return the factors of gradients in a flat vector, by index, as far as they are known."""
        found: dict[int, Factors] = {}
        for index, known in self.factors.items():
            start, stop = self.flat.bounds[index]
            factors = known.take(gradient[start:stop].view(self.flat.tensors[index].shape))
            if factors is not None:
                found[index] = factors
        return found

    def push_in_backward(self, samples: float, hyper: tuple[Hyper, ...]) -> None:
        """Push the gradients before their step; they may not change until then."""
        if self._sent is not None:
            raise UsageError(
                f"backward ran again after the gradients of '{self.table.name}' had been sent: run all but the last "
                "backward of a step inside `with optimizer.accumulate():`, or leave out overlap=True."
            )
        pushed = self.push(samples, hyper, 0.0)
        self._sent = _Sent(pushed, samples, hyper, self.gradients.found())

    def _require_unchanged(self, sent: _Sent, samples: float, hyper: tuple[Hyper, ...]) -> None:
        """Raise UsageError if the push would differ from the one that was sent."""
        name, is_reweighed = self.gradients.changed(sent.found), sent.samples != samples
        changed = [
            what
            for what, is_changed in (
                (f"the gradient of '{name}' has", bool(name)),
                ("the number of samples has", is_reweighed),
                ("hyperparameters have", sent.hyper != hyper),
            )
            if is_changed
        ]
        if changed:
            counted = "have paceline.shard(loader) count samples, in the place of step(samples=...), "
            earlier = "change them before backward (clip in a hook, say), "
            raise UsageError(
                f"{' and '.join(changed)} changed since the gradients of '{self.table.name}' were sent, while backward "
                f"ran: {counted * is_reweighed}{earlier * (len(changed) > is_reweighed)}or leave out overlap=True."
            )

    @property
    def is_sent(self) -> bool:
        """Whether the gradients of the current step were sent before it."""
        return self._sent is not None

    def request_values(self, *, refresh: bool, more: bool = False) -> None:
        """Request the values of the next step, for `wait_for_values`. `more`: see `DenseClient.start_read`."""
        if self._requested is not None:
            self.wait_for_values()
        self._requested = self.table.client.start_read(refresh=refresh, more=more)

    def wait_for_values(self) -> None:
        """Wait for the requested values, if any, and set the parameters to them."""
        if self._requested is None:
            return
        self.weights.check_views()  # while values are under way, so that it costs little
        requested, self._requested = self._requested, None
        table = self.table
        with table.metrics.communication:
            outcome = table.client.wait_read(requested, self.weights.set_from)
        table.metrics.note_read(table.spec.name, outcome)
        if self._reserved is None:
            self.reserve()
        if self.weights.changed:
            self._tell_of_change()

    def _tell_of_change(self) -> None:
        """Say once that values which the script has written are gone."""
        name, self.weights.changed = self.weights.changed, ""
        if self._has_told_of_change:
            return
        self._has_told_of_change = True
        self.table.metrics.tell(
            f"worker {self.table.node.settings.sender.worker}, '{self.table.name}': the script has changed the values "
            f"of '{name}' after a step, and those of the servers have replaced them: pushes bring gradients alone. "
            "Load values before paceline.distributed(...), or call "
            "optimizer.load_state_dict(optimizer.state_dict()) after that, on every worker, which takes them along."
        )

    def own(self, state: StateOf) -> StateOf:
        """Return the optimizer state of these parameters, with indices counted from the first of them."""
        indices = range(self.first, self.first + len(self.flat.named))
        return {index - self.first: state[index] for index in indices if index in state}


class _Sent(msgspec.Struct, frozen=True):
    """Push that was sent, and the values that it was made from."""

    pushed: PendingPush
    samples: float
    hyper: tuple[Hyper, ...]
    found: tuple[GradientVersion, ...]


def bucket_ranges(tensors: Sequence[Tensor], least_bytes: int) -> list[range]:
    """Split tensors into consecutive runs of at least `least_bytes`, in order; a smaller rest joins the last run.

    >>> import torch
    >>> bucket_ranges([torch.zeros(n) for n in (3, 1, 5, 2)], least_bytes=16)
    [range(0, 2), range(2, 4)]
    """
    runs: list[range] = []
    start, size_bytes = 0, 0
    for index, tensor in enumerate(tensors):
        size_bytes += tensor.nbytes
        if size_bytes >= least_bytes:
            runs.append(range(start, index + 1))
            start, size_bytes = index + 1, 0
    if start < len(tensors):
        first = runs.pop().start if runs else 0
        runs.append(range(first, len(tensors)))
    return runs


@dataclass(slots=True, weakref_slot=True, eq=False)
class Overlap:
    """Sends each bucket once backward has reached all of its parameters, and makes modules wait for their own values.

    Zhang et al., "Poseidon" (2017), call the first wait-free backpropagation. The second needs the model: a unit, which
    is a module that runs as a whole, waits at the start of its forward for the buckets of all parameters inside. A
    `Sequential` runs its children one after the other, so each child is a unit; other modules are units themselves, as
    only their code knows how they use their children.

    Args:
        send: sends a complete bucket.
    """

    buckets: Sequence[Bucket]
    model: nn.Module | None
    send: Callable[[Bucket], None]
    accumulating: bool = False
    # By bucket: the parameters that the current backward has reached.
    _come: list[set[int]] = field(init=False)
    # Index of the first parameter of each bucket that modules wait for.
    _awaited: set[int] = field(default_factory=set[int])
    _handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def __post_init__(self) -> None:
        """Register hooks on gradients and modules, for the lifetime of this object."""
        self._come = [set() for _ in self.buckets]
        arrived = WeakMethod(self._on_gradient)
        for number, bucket in enumerate(self.buckets):
            for index, tensor in enumerate(bucket.flat.named.values()):
                if tensor.requires_grad:
                    handle = tensor.register_post_accumulate_grad_hook(_calling(arrived, number, index))
                    self._handles.append(handle)
        if self.model is not None:
            self._wait_in_forward(self.model)

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def begin_step(self) -> None:
        """Reset the record of gradients: a backward may not have reached all parameters."""
        for come in self._come:
            come.clear()

    @property
    def can_wait(self) -> bool:
        """Return whether values may arrive during the next forward.

        Until then all parameters must be of one clock. Views of the servers' memory change too early for that, and
        reads of a parameter that no module waits for go unnoticed.
        """
        return len(self._awaited) == len(self.buckets) and not any(bucket.weights.are_views for bucket in self.buckets)

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Send nothing from the backward passes in the block, because more is added to their gradients."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    def _on_gradient(self, number: int, index: int) -> None:
        if self.accumulating:
            return
        come, bucket = self._come[number], self.buckets[number]
        if bucket.gradients.are_on_device:
            # The device has yet to compute what backward has queued. To wait for it here would leave it without work,
            # so this copy is queued as well, and `step` sends the bucket, once backward has queued everything.
            bucket.fetch(index)
            return
        come.add(index)
        if len(come) == sum(tensor.requires_grad for tensor in bucket.flat.named.values()):
            come.clear()
            self.send(bucket)

    def _wait_in_forward(self, model: nn.Module) -> None:
        """Make each unit wait for the buckets of its parameters, and `state_dict` of the model for all."""
        wait = WeakMethod(self._wait_for_values)
        inside = set(map(id, model.parameters()))
        lazy = [b for b in self.buckets if inside.issuperset(map(id, b.flat.named.values()))]
        self._awaited = {bucket.first for bucket in lazy}
        for module in _wholes(model):
            own = set(map(id, module.parameters()))
            held = [b.first for b in lazy if not own.isdisjoint(map(id, b.flat.named.values()))]
            if held:
                self._handles.append(module.register_forward_pre_hook(_waiting_hook(wait, held)))
        self._handles.append(model.register_state_dict_pre_hook(_waiting_hook(wait, list(self._awaited))))

    def _wait_for_values(self, firsts: Sequence[int]) -> None:
        for bucket in self.buckets:
            if bucket.first in firsts:
                bucket.wait_for_values()


def _wholes(module: nn.Module) -> Iterator[nn.Module]:
    """Return the modules that a model runs one after the other, as far as their types show."""
    if type(module) is nn.Sequential:
        for child in module:
            yield from _wholes(child)
    else:
        yield module


def _calling(act: WeakMethod[Callable[[int, int], None]], number: int, index: int) -> Callable[[Tensor], None]:
    """Return a hook that autograd calls after a gradient; it keeps no object alive."""

    def on_gradient(_: Tensor) -> None:
        call = act()
        if call is not None:
            call(number, index)

    return on_gradient


def _waiting_hook(act: WeakMethod[Callable[[Sequence[int]], None]], firsts: Sequence[int]) -> Callable[..., None]:
    """Return a hook that modules call before their forward; it keeps no object alive."""

    def wait(*_: object) -> None:
        call = act()
        if call is not None:
            call(firsts)

    return wait


@dataclass(slots=True)
class PushedHyper:
    """The hyperparameters of pushes; converted anew only where a group holds another object than at the last call."""

    rule: RuleSpec
    _given: list[object] = field(default_factory=list[object])
    _hyper: tuple[Hyper, ...] = ()

    def of(self, groups: Sequence[Mapping[str, object]]) -> tuple[Hyper, ...]:
        """Return `pushed_hyper` of these groups."""
        given = [group[key] for group, declared in zip(groups, self.rule.groups, strict=True) for key in declared]
        if len(given) != len(self._given) or not all(map(is_, given, self._given)):
            self._hyper = pushed_hyper(groups, self.rule)
            is_fixed = not any(isinstance(value, list) for value in given)  # a list may change in place
            self._given = given if is_fixed else []
        return self._hyper


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
        self._max_norm: float | None = None  # of the update that the next push is for
        self._has_told_of_clipping = False
        self._lockstep = self.clips_mean = settings.consistency.lockstep
        self._divides_rate = settings.divide_lr and settings.consistency.visible == "on_arrival"
        if self._divides_rate:
            require_rate(rule, settings.name)
        # Each how many steps servers are asked for values that this worker has not been sent; 0 for never.
        self._fetch_every = (settings.fetch_every or 0) if settings.consistency.deliver == "on_pull" else 0
        named, segments = segments_of(optimizer, model)
        require_own_memory(named, settings.name)
        self._storages = storages_of(model.named_buffers()) if model is not None else {}
        dtype = FlatParameters.over(named).dtype
        policy = str(settings.consistency)
        self._spec = TableSpec(settings.name, segments, dtype, rule, policy, settings.scale, settings.nonfinite)
        self._hyper = PushedHyper(rule)
        self._buckets = self._open_buckets(named)
        self._buffers = open_buffers(model, settings, settings.consistency, job, read_my_writes=True)
        self._overlap = Overlap(self._buckets, model, self._send) if settings.overlap else None
        if settings.factors:
            self._follow_layers(model)
        self._fetch(refresh=True)
        self.wait_for_values()

    def _follow_layers(self, model: nn.Module | None) -> None:
        """Record factors of gradients that leave this machine or process, while backward runs."""
        name, job = self._settings.name, self._job
        if model is None:
            raise UsageError(
                f"'{name}' was given factors=True, which follows the layers of a module: give model=... too."
            )
        for bucket in self._buckets:
            if bucket.table.client.send_factors():
                known = follow_layers(
                    model,
                    bucket.flat.named.items(),
                    lambda text: job.metrics.tell(f"worker {job.rank}, '{name}': {text}"),
                )
                bucket.factors = {index: known[w] for index, w in enumerate(bucket.flat.tensors) if w in known}

    @property
    def num_factored(self) -> int:
        """Gradients of this worker of which servers were sent factors, each counted for each server."""
        sent = [bucket.table.client.factored for bucket in self._buckets]
        return sum(each.num_matrices for each in sent if each is not None)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def send(self, samples: float | None) -> float:
        """Push the gradients.

        Raises:
            UsageError: a gradient is sparse, or is not finite under nonfinite="halt".
        """
        with self._job.metrics.communication:
            weight = self._weight_of_step(samples)
            hyper = self._hyper.of(self.param_groups)  # without what schedulers keep beside them
            if self._divides_rate:
                hyper = with_share_of_rate(hyper, self._share_of_rate(weight))
            if self._max_norm is not None:
                hyper, self._max_norm = with_clip(hyper, self._max_norm), None
            expected = self.expected if self._lockstep else 0.0
            self.num_refused += self.overflowed
            buckets = [] if self.overflowed else self._buckets
            every = self._fetch_every
            ends_clock = len(buckets) == 1 and every > 0 and (self._num_steps + 1) % every == 0
            for bucket in reversed(buckets):  # backward reached the last first, so devices finish it first
                pushed = bucket.push(weight, hyper, expected, ends_clock=ends_clock)
                pushed.when_refused(self._count_refusal)
            if self._buffers is not None:
                self._buffers.push(ends_clock=ends_clock)
            if self._overlap is not None:
                self._overlap.begin_step()
        return weight

    def clip_gradients(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Have the servers clip the mean of all workers' gradients; see `Distributed.clip_gradients`.

        They do so for a model in one table, in lockstep and with scale="samples"; several servers tell each other the
        norms of their parts. Otherwise each worker clips its own gradients, which under bsp is told once.
        """
        max_norm, norm_type = self._checked_norms(max_norm, norm_type)
        if self._job.size == 1 or not self._lockstep:
            return super().clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        holders = self._buckets[0].table.client.cache.servers
        is_led = len(holders) == 1 or LEAD in holders  # one that has all of it clips it by itself
        reason = (
            f"server {LEAD}, which leads the others, has no part of the model" * (not is_led)
            or "overlap=True sends gradients in parts" * (self._overlap is not None)
            or f"the scale is {self._settings.scale!r}" * (self._settings.scale != "samples")
            or "servers compute no norm of another type than 2" * (norm_type != 2.0)
        )
        if reason:
            if not self._has_told_of_clipping:
                self._has_told_of_clipping = True
                self._job.metrics.tell(
                    f"worker {self._job.rank}, '{self._settings.name}': each worker clips its own gradients, not their "
                    f"mean as torch's DDP, as {reason}."
                )
            return super().clip_gradients(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        gradients = [one.grad for one in self._clipped() if one.grad is not None]
        # The norm alone: to clip by it would change gradients where it overflows, or where an element is NaN.
        norm = get_total_norm(gradients, error_if_nonfinite=error_if_nonfinite)
        limit = min(max_norm, math.inf if self._max_norm is None else self._max_norm)
        self._max_norm = limit if limit < math.inf else None
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what was to be clipped of them."""
        super().zero_grad(set_to_none)
        self._max_norm = None

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
            found = fetch_state(bucket.table, bucket.flat)
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
            checked = check_state(self._spec, state_dict, self.param_groups)
        with loaded_by_first(self._job, self._settings.first):
            if self._job.rank == self._settings.first:
                for bucket in self._buckets:
                    bucket.wait_for_values()
                    send_state(bucket.table, bucket.own(checked["state"]), bucket.flat)
                if self._buffers is not None:
                    send_state(self._buffers.table, {}, self._buffers.flat)
        groups = cast("list[dict[str, Any]]", checked["param_groups"])
        for own, given in zip(self.param_groups, groups, strict=True):
            own.update(hyperparameters(given))
        for bucket in self._buckets:
            bucket.weights.note_sent()
        self._fetch(refresh=True)
        self.wait_for_values()

    def held_tensors(self) -> list[HeldTensor]:
        """Return the parameters and the averaged buffers, and where in the tables they are."""
        found = [held for bucket in self._buckets for held in held_by(bucket.flat, bucket.table)]
        return found if self._buffers is None else [*found, *held_by(self._buffers.flat, self._buffers.table)]

    def detach(self) -> None:
        """Move gradients and parameters to memory of this process, and send nothing from backward."""
        self._overlap = None
        for bucket in self._buckets:
            bucket.gradients.detach()
            bucket.weights.detach()
            for factors in bucket.factors.values():
                factors.detach()
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
        weights = Weights(flat, table, device_copies, self._storages, is_watched=True)
        self._job.detach_at_close(weights)
        bucket = Bucket(run.start, flat, table, weights, gradients)
        bucket.reserve()
        return bucket

    def _send(self, bucket: Bucket) -> None:
        """Send a bucket while backward runs; samples and hyperparameters of the step must be final."""
        with self._job.metrics.communicating():
            weight = self._job.num_samples - self._num_samples or 1
            hyper = self._hyper.of(self.param_groups)
            if self._divides_rate:
                hyper = with_share_of_rate(hyper, self._share_of_rate(weight))
            bucket.push_in_backward(weight, hyper)

    def _fetch(self, *, refresh: bool) -> None:
        for bucket in self._buckets:
            bucket.request_values(refresh=refresh, more=self._buffers is not None)
        if self._buffers is not None:
            self._buffers.fetch(refresh=refresh)
        if self._overlap is None or not self._overlap.can_wait:
            for bucket in self._buckets:
                bucket.wait_for_values()


class ParameterServer(msgspec.Struct, frozen=True):
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
