"""One worker's replica of a model, whose gradients DistributedDataParallel combines while backward runs.

Forward goes through hooks on the user's own module, so neither the module nor the names of its parameters change.
Torch makes the buckets and reports when each is ready; a call queue combines them, in an order that all workers agree
on and within the deadline.
"""

# Annotations are evaluated here: torch inspects those of the communication hook.
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast
from weakref import WeakMethod

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle, unserializable_hook

from paceline.collective.call_queue import QueuedCall
from paceline.collective.operations import broadcast_bytes, broadcast_tensor, reduce_in_place
from paceline.collective.signature import CallSignature
from paceline.errors import PeerError, UsageError
from paceline.torch_private import (
    GradBucket,
    after_forward,
    before_forward,
    call_after_backward,
    remove_backward_hooks,
    tree_leaves,
)
from paceline.training.buffers import floating_buffers
from paceline.training.collective_optimizer import (
    NOT_FINITE,
    are_compared,
    digest_of,
    digest_of_values,
    require_equal_values,
    require_weighed,
)
from paceline.training.flat import FlatParameters, laid_out_like
from paceline.training.hooks import call_if_alive
from paceline.training.model_checks import require_dense_gradients
from paceline.training.same_batches import SameBatches, digest_of_batch
from paceline.training.strategy import TrainingJob
from paceline.update.summing import num_nonfinite
from paceline.update.table import NonFinite, Scale
from paceline.worker.node import HAS_LEFT

T = TypeVar("T")

_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"  # torch's attribute for tensors that it leaves alone


class DDPSettings(msgspec.Struct, frozen=True):
    """Settings of gradient combination; see `paceline.distributed` and `paceline.strategies.all_reduce`."""

    name: str
    scale: Scale
    nonfinite: NonFinite
    unused: bool
    bucket_mb: float
    average_buffers: bool


@dataclass(slots=True)
class StepRound:
    """One backward: the agreement on it, and its buckets under way.

    Args:
        weight: of this worker's gradients.
        agreed: resolved when all workers have started this backward.
    """

    weight: float
    agreed: Future[QueuedCall]
    buckets: list[Tensor] = field(default_factory=list[Tensor])
    under_way: list[Future[None]] = field(default_factory=list[Future[None]])
    is_whole: bool = False


class _Reduced(nn.Module):
    """What torch's reducer is given: a model, and a parameter that no forward of it uses, where there is one."""

    def __init__(self, model: nn.Module, spare: nn.Parameter | None) -> None:
        super().__init__()
        self.model = model
        self.register_parameter("spare", spare)


class DDPReplica:
    """Replica of a model, kept equal to those of the other workers.

    Attributes:
        named: the parameters, by name.
        weight: of the gradients of this step, where the script has set it.
        problem: why the combined gradients may not be used; empty where they may.
    """

    def __init__(self, model: nn.Module, named: dict[str, Tensor], settings: DDPSettings, job: TrainingJob) -> None:
        self.weight: float | None = None
        self.problem = ""
        self._settings = settings
        self._job = job
        self._model = model
        self.named = named
        self._num_samples = job.num_samples  # at the last backward that was combined
        self._flat_buffers = _flat_buffers(model) if settings.average_buffers else None
        self._num_rounds = 0
        self._round: StepRound | None = None  # of the backward under way
        self._done: float | None = None  # weight of the backward passes since the last step
        self._weights: list[float] = []  # of all workers in the last backward
        self._same_batches = SameBatches(job.rank, settings.name)
        self._inputs = 0  # digest of those of the forward under way, while they are checked
        self._accumulates = False
        self._combines = False  # whether the next backward combines: its forward ran outside of `accumulate`
        self._alone: set[int] = set()  # parameters with gradients from a backward that was not combined
        self._watched: list[RemovableHandle] = []
        _require_combinable(model, named, settings.name)
        self._call_queue = job.exchange.open_call_queue(settings.name)
        self._group = job.exchange.connect_group(f"{settings.name}, its model")
        self._trained = _trained(named)
        # For a backward of nothing: parameters of the model that no worker has used stay unused then.
        self._spare = _spare_of(named) if settings.unused else None
        self._ddp = self._attached(first=True)
        self._copy_buffers()
        before, after = WeakMethod(self._before), WeakMethod(self._after)
        # A compiled model runs hooks as they are.
        call = cast("Callable[..., Any]", torch.compiler.disable(call_if_alive))
        self._handles = [
            model.register_forward_pre_hook(lambda _, args, kwargs: call(before, args, kwargs), with_kwargs=True),
            model.register_forward_hook(lambda _, args, output: call(after, output)),
        ]

    # -- what the optimizer asks for ---------------------------------------------------------------------------------

    def consume_round(self, samples: float | None) -> float:
        """Return the weight of the gradients that the last backward has combined, and mark them as used.

        Raises:
            UsageError: there are none, or they were weighted by another number of samples.
            PeerError: this worker has left.
        """
        done, self._done = self._done, None
        where = f"worker {self._job.rank}, step of '{self._settings.name}'"
        if not self._handles:
            raise PeerError(f"{where}: {HAS_LEFT}")
        if done is None:
            raise UsageError(
                f"{where}: no backward has combined the gradients since the last step; "
                f"{self._without_gradient()}Call the model itself (not a part of it, not its .forward), run the last "
                "backward of a step outside of `accumulate`, and give "
                "strategy=paceline.strategies.all_reduce(unused=True) if some parameters do not take part in every "
                "forward."
            )
        named = enumerate(self.named.items())
        alone = [name for index, (name, tensor) in named if index in self._alone and tensor.grad is not None]
        if alone:
            raise UsageError(
                f"{where}: a backward that combined nothing has added to the gradient of {_some(alone)}: workers "
                "would step differently. Run one backward for each forward of the model itself, and the last one of a "
                "step outside of `accumulate`."
            )
        weight = require_weighed(where, self._settings.scale, samples, done)
        self.weight = None
        return weight

    def backward_of_nothing(self) -> None:
        """Run a backward of zeros with weight 0, while the other workers run theirs."""
        self.weight = 0.0
        trained = [tensor for tensor in self.named.values() if tensor.requires_grad]
        used = trained if self._spare is None else [self._spare]
        with torch.enable_grad():
            self._before((), {})
            outputs = self._after([tensor.view_as(tensor) for tensor in used])
            torch.autograd.backward(outputs, [torch.zeros_like(tensor) for tensor in used])

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Combine no gradients of the passes in the block."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def settle(self, numbers: bytes) -> bytes | None:
        """Agree on a step: its hyperparameters are those of the first worker that had a batch.

        Workers without a batch get the combined gradients as that worker's script has left them (clipped, for example).
        Floating-point buffers become the mean over the workers with a batch. Blocks until all workers call it.

        Args:
            numbers: the hyperparameters of this worker.

        Returns:
            Those of the first worker with a batch where they differ, else None.
        """
        flat = self._flat_buffers.empty() if self._flat_buffers is not None else torch.zeros(0)
        had_batch = [weight > 0 for weight in self._weights]
        if self._flat_buffers is not None:
            self._flat_buffers.pack_values(flat)
            flat.mul_(float(had_batch[self._job.rank]))

        def act(turn: QueuedCall) -> bytes | None:
            differ = len({call.digest for call in turn.calls}) > 1
            told = broadcast_bytes(turn, numbers, had_batch.index(True) if any(had_batch) else 0) if differ else None
            reduce_in_place(turn, flat)
            if any(had_batch) and not all(had_batch):
                self._copy_gradients(turn, had_batch.index(True))
            return None if told == numbers else told

        shape, digest = (flat.numel(),), digest_of(numbers)
        call = CallSignature(0, "update", "sum", dtype=flat.dtype, shape=shape, num_values=len(numbers), digest=digest)
        told = self._call(call, act, "step")
        if self._flat_buffers is not None:
            self._flat_buffers.unpack(flat.div_(max(1, sum(had_batch))))
        return told

    def copy_from_first(self) -> None:
        """Set parameters and buffers to those of worker 0; blocks until all workers have called this."""
        for tensor in self.named.values():
            self._copy(tensor)
        self._copy_buffers()

    def close(self, _politely: bool) -> None:
        """Detach from the other workers; the model stays usable as an ordinary one. May be repeated."""
        if not self._handles:
            return
        for handle in (*self._handles, *self._watched):
            handle.remove()
        self._handles, self._watched = [], []
        self._round = self._done = None
        del self._ddp

    # -- around forward and backward ---------------------------------------------------------------------------------

    def _attached(self, *, first: bool) -> DistributedDataParallel:
        """Attach torch's reducer to the backward of the model; the first time, broadcast the values of worker 0."""
        model, ours = _Reduced(self._model, self._spare), {*map(id, self.named.values()), id(self._spare)}
        # Under each of their names: a tensor shared by two layers is found once in every layer.
        ignored = [name for name, _ in model.named_buffers(remove_duplicate=False)]
        ignored += [name for name, tensor in model.named_parameters(remove_duplicate=False) if id(tensor) not in ours]
        setattr(model, _IGNORED, ignored)
        try:
            made = DistributedDataParallel(
                model,
                process_group=self._group.process_group,
                bucket_cap_mb=self._settings.bucket_mb,
                gradient_as_bucket_view=True,  # otherwise each gradient is stored twice
                find_unused_parameters=self._settings.unused,
                init_sync=first,
            )
        except (RuntimeError, PeerError) as error:
            raise self._lost(f"model of '{self._settings.name}'", error) from error
        made.register_comm_hook(WeakMethod(self._on_bucket), _bucket_hook)
        self._watch()
        return made

    def _watch(self) -> None:
        """Register hooks on the gradients that autograd adds to."""
        look, note = WeakMethod(self._look), WeakMethod(self._note)
        for index, tensor in enumerate(self.named.values()):
            if tensor.requires_grad:
                self._watched.append(tensor.register_post_accumulate_grad_hook(partial(call_if_alive, note, index)))
                if self._settings.scale == "sum":
                    self._watched.append(tensor.register_hook(unserializable_hook(partial(call_if_alive, look, index))))

    def _look(self, index: int, _: Tensor) -> None:
        """Refuse to add to a gradient that is a sum over all workers already, and would be summed again."""
        name, tensor = list(self.named.items())[index]
        if self._done is not None and self._combines and tensor.grad is not None:
            raise UsageError(
                f"worker {self._job.rank}, backward of '{self._settings.name}': the gradient of '{name}' is the sum "
                "over all workers already, which would be added up again: run all but the last backward of a step "
                "inside `with optimizer.accumulate():`."
            )

    def _note(self, index: int, _: Tensor) -> None:
        """Record the gradients of a backward that is not combined."""
        if not self._combines:
            self._alone.add(index)

    def _follow_requires_grad(self) -> None:
        """Combine the gradients of the parameters that require them now.

        Raises:
            UsageError: workers train different parameters.
        """
        trained = _trained(self.named)
        if trained == self._trained:
            return
        what = f"forward of '{self._settings.name}'"
        if not any(trained):
            raise UsageError(
                f"worker {self._job.rank}, {what}: none of the parameters requires a gradient any more. Leave one "
                "unfrozen; where this model only passes on the gradients of another, run that backward inside of "
                "`with optimizer.accumulate()` of this one's optimizer in place of freezing it."
            )
        rank = self._job.rank

        def act(turn: QueuedCall) -> None:
            if any(call.digest != turn.call.digest for call in turn.calls):
                raise UsageError(
                    f"worker {rank}, {what}: workers train other parameters than each other: call requires_grad_ for "
                    "the same ones on all workers before the same forward."
                )

        self._call(CallSignature(0, "trained", digest=digest_of(bytes(trained))), act, "forward")
        while self._watched:
            self._watched.pop().remove()
        remove_backward_hooks(self._ddp)
        self._trained, self._ddp = trained, self._attached(first=False)

    def _copy_buffers(self) -> None:
        for buffer in self._model.buffers():
            self._copy(buffer)

    def _copy_gradients(self, turn: QueuedCall, source: int) -> None:
        """Set gradients to those of one worker."""
        parameters = [parameter for parameter in self.named.values() if parameter.requires_grad]
        own = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        for parameter, present in zip(parameters, broadcast_tensor(turn, own, source).tolist(), strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            common = broadcast_tensor(turn, gradient.detach(), source) if present else None
            parameter.grad = None if common is None else laid_out_like(parameter.detach(), common)

    def _copy(self, tensor: Tensor) -> None:
        """Set a tensor to its values on worker 0."""
        exchange = self._job.exchange
        future = exchange.broadcast(tensor, 0, None)
        with torch.no_grad():
            tensor.copy_(exchange.finish(future, f"the values of '{self._settings.name}'", None))

    def _call(self, call: CallSignature, act: Callable[[QueuedCall], T], what: str) -> T:
        """Make a call with all workers; blocks until it is over."""
        with self._job.metrics.communicating():
            return self._call_queue.wait(self._call_queue.submit(call, act), f"{what} of '{self._settings.name}'")

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not torch.is_grad_enabled():
            return None
        self._follow_requires_grad()
        self._inputs = digest_of_batch(tree_leaves((args, kwargs))) if self._same_batches.is_checking else 0
        self._ddp.require_backward_grad_sync = self._combines = not self._accumulates
        try:
            return before_forward(self._ddp, args, kwargs)
        except (RuntimeError, PeerError) as error:
            where = f"forward of '{self._settings.name}'"
            if "finished reduction in the prior iteration" not in str(error):
                raise self._lost(where, error) from error
            raise UsageError(
                f"worker {self._job.rank}, {where}: {self._without_gradient()}The backward before is not over: give "
                "strategy=paceline.strategies.all_reduce(unused=True) if some parameters do not take part in every "
                "forward."
            ) from error

    def _after(self, output: object) -> Any:  # noqa: ANN401 - whatever the module returns
        # As in DistributedDataParallel.forward, around the module; the module itself is called unchanged.
        return after_forward(self._ddp, output) if torch.is_grad_enabled() else None

    def _on_bucket(self, bucket: GradBucket) -> Tensor:
        """Queue a bucket that is ready, behind the agreement on this backward; return the tensor of its mean."""
        if self._round is None:
            self._round = self._begun()
            call_after_backward(self._finish)
        round_, buffer = self._round, bucket.buffer()
        round_.is_whole = bucket.is_last()
        round_.buckets.append(buffer)
        stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None

        def send() -> None:
            with torch.cuda.stream(stream):
                if self._settings.nonfinite == "zero":
                    buffer.nan_to_num_(0.0, 0.0, 0.0)
                host = buffer.mul_(round_.weight).cpu()
                reduce_in_place(round_.agreed.result(timeout=0), host)
                if host is not buffer:
                    buffer.copy_(host)

        round_.under_way.append(self._call_queue.follow_up(send))
        return buffer

    def _begun(self) -> StepRound:
        """Start the agreement on a backward.

        Periodically it also checks that all replicas are equal to the bit, and in the first steps that the batches are
        not the same.
        """
        compared = are_compared(self._num_rounds)
        self._num_rounds += 1
        rank = self._job.rank

        def act(turn: QueuedCall) -> QueuedCall:
            digests = [call.digest for call in turn.calls]
            if compared:
                require_equal_values(rank, [other for other, one in enumerate(digests) if one != turn.call.digest])
            else:
                self._same_batches.compare(range(len(digests)), digests)
            return turn

        weight = self._own_weight()
        digest = digest_of_values(list(self.named.values())) if compared else self._inputs
        call = CallSignature(0, "backward", "sum", weight=weight, digest=digest)
        return StepRound(weight, self._call_queue.submit(call, act))

    def _own_weight(self) -> float:
        """Return the weight of a backward: set by the script, else the new samples, else that of the one before.

        Where samples do not count it is 1, and 0 without a batch.
        """
        if self._settings.scale != "samples":
            return 0.0 if self.weight == 0 else 1.0
        if self.weight is not None:
            return self.weight
        again = self._weights[self._job.rank] if self._done is not None else 1.0
        return float(self._job.num_samples - self._num_samples or again)

    def _finish(self) -> None:
        """Wait until all buckets are combined, before torch copies them to the parameters."""
        round_, self._round = self._round, None
        assert round_ is not None, "this was called for"
        what = f"backward of '{self._settings.name}'"
        if not round_.is_whole:
            raise UsageError(
                f"worker {self._job.rank}, {what}: {self._without_gradient()}give "
                "strategy=paceline.strategies.all_reduce(unused=True) if some parameters do not take part in every "
                "forward."
            )
        with self._job.metrics.communicating():
            metrics, began_s = self._job.metrics, self._job.metrics.now()
            turn = self._call_queue.wait(round_.agreed, what)
            metrics.wait_s += metrics.now() - began_s
            for future in round_.under_way:
                self._call_queue.wait(future, what)
        self._weights = [call.weight for call in turn.calls]
        total = 1.0 if self._settings.scale == "sum" else sum(self._weights) or 1.0
        for buffer in round_.buckets:
            buffer.div_(total)
        self.problem = self._objection(round_.buckets)
        if self._done is None or self._settings.scale != "samples":
            self._done = round_.weight
        elif self.weight is None and self._num_samples < self._job.num_samples:
            self._done += round_.weight
        self._num_samples = self._job.num_samples
        self._combines = False
        self._alone.clear()

    def _lost(self, where: str, error: Exception) -> PeerError:
        """Return an error that names the lost worker, after torch has failed in a collective of its own."""
        return self._group.failure_reports.explain(where, self._job.exchange.worker_set.others, None, str(error))

    def _objection(self, buckets: list[Tensor]) -> str:
        if self._settings.nonfinite in ("ignore", "zero") or not any(map(num_nonfinite, buckets)):
            return ""
        return NOT_FINITE

    def _without_gradient(self) -> str:
        """Return a sentence that names parameters without a gradient."""
        absent = [name for name, tensor in self.named.items() if tensor.requires_grad and tensor.grad is None]
        return f"no gradient came to {_some(absent)}. " if absent else ""


def _bucket_hook(act: WeakMethod[Any], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return a bucket at once: `DDPReplica` waits for its values before torch uses them."""
    devices: list[int | str | torch.device] = [bucket.buffer().device] if bucket.buffer().is_cuda else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    call = act()
    future.set_result(bucket.buffer() if call is None else call(bucket))
    return future


def _trained(named: dict[str, Tensor]) -> tuple[bool, ...]:
    """Return which of the parameters require gradients."""
    return tuple(tensor.requires_grad for tensor in named.values())


def _spare_of(named: dict[str, Tensor]) -> nn.Parameter:
    """Return a parameter of one element, of the kind of the first one that requires a gradient."""
    return nn.Parameter(next(tensor for tensor in named.values() if tensor.requires_grad).detach().new_zeros(1))


def _some(found: list[str]) -> str:
    """List up to five names, for a message."""
    return f"{', '.join(found[:5])}{', ...' if len(found) > 5 else ''}"


def _flat_buffers(model: nn.Module) -> FlatParameters | None:
    named = floating_buffers(model)
    return FlatParameters.widened(named) if named else None


def _require_combinable(model: nn.Module, named: dict[str, Tensor], name: str) -> None:
    """Refuse models and parameters that DistributedDataParallel does not support."""
    known = set(map(id, model.parameters()))
    strange = [own for own, tensor in named.items() if id(tensor) not in known]
    if strange:
        raise UsageError(f"'{name}': the optimizer has parameters that the model has not: {', '.join(strange[:5])}.")
    if not any(tensor.requires_grad for tensor in named.values()):
        raise UsageError(f"'{name}': none of the parameters requires a gradient, so there is nothing to combine.")
    require_dense_gradients(model, name)
