"""One worker's copy of a model whose gradients DistributedDataParallel hands over while backward runs.

Forward goes through hooks on the user's own module, so neither the module nor the names of its parameters change.
Torch makes the buckets and says when each is ready; a lane of ours combines them, agreed upon and within the deadline.
"""

# Annotations are evaluated here: torch looks at those of the hook.
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from paceline.collective.call import Call
from paceline.collective.lane import Turn
from paceline.collective.patterns import reduce_in_place
from paceline.errors import PeerError, UsageError
from paceline.tensors.summing import num_nonfinite
from paceline.tensors.table import NonFinite, Scale
from paceline.training.buffers import floating_buffers
from paceline.training.flat import Flat
from paceline.training.optimizer import Job
from paceline.training.together import NOT_FINITE, require_weighed

_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"  # torch's name for what it is to leave alone


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How gradients are combined; see `paceline.distributed` and `paceline.all_reduce`."""

    name: str
    scale: Scale
    nonfinite: NonFinite
    unused: bool
    bucket_mb: float
    average_buffers: bool


@dataclass(slots=True)
class Round:
    """One backward: what all workers said of it, and the buckets under way.

    Args:
        weight: of this worker's gradients.
        agreed: ends when all workers have begun this backward.
    """

    weight: float
    agreed: Future[Turn]
    buckets: list[Tensor] = field(default_factory=list[Tensor])
    under_way: list[Future[None]] = field(default_factory=list[Future[None]])
    is_whole: bool = False


class Replica:
    """A model attached to those of the other workers, with the same values from the start.

    Attributes:
        weight: of the gradients of this step, where the script has said it.
        problem: why the combined gradients may not be used, or nothing.
    """

    def __init__(self, model: nn.Module, named: dict[str, Tensor], settings: ReplicaSettings, job: Job) -> None:
        self.weight: float | None = None
        self.problem = ""
        self._settings = settings
        self._job = job
        self._model = model
        self._named = named
        self._num_samples = job.num_samples
        self._flat_buffers = _flat_buffers(model) if settings.average_buffers else None
        self._round: Round | None = None  # of the backward under way
        self._done: float | None = None  # what the last backward weighed, until its step
        self._weights: list[float] = []  # of all workers in that step
        _require_combinable(model, named, settings.name)
        self._lane = job.exchange.open_lane(settings.name)
        self._group = job.exchange.meet(f"{settings.name}, its model")
        self._ddp = self._attached(model)
        self._ddp.register_comm_hook(WeakMethod(self._on_bucket), _hand_over)
        before, after = WeakMethod(self._before), WeakMethod(self._after)
        self._handles = [
            model.register_forward_pre_hook(lambda _, args, kwargs: _call(before, args, kwargs), with_kwargs=True),
            model.register_forward_hook(lambda _, args, output: _call(after, output)),
        ]

    # -- what the optimizer asks for ---------------------------------------------------------------------------------

    def take_round(self, samples: float | None) -> float:
        """Return the weight of the gradients that the last backward has combined: they are about to be used.

        Raises:
            UsageError: there are none, or they were weighed by another number of samples.
        """
        done, self._done = self._done, None
        where = f"worker {self._job.rank}, step of '{self._settings.name}'"
        if done is None:
            raise UsageError(
                f"{where}: no backward has combined the gradients since the last step; "
                f"{self._without_gradient()}Call the model itself (not a part of it, not its .forward), run the last "
                "backward of a step outside of `accumulate`, and give strategy=paceline.all_reduce(unused=True) if "
                "some parameters do not take part in every forward."
            )
        weight = require_weighed(where, self._settings.scale, samples, done)
        self.weight, self._num_samples = None, self._job.num_samples
        return weight

    def backward_of_nothing(self) -> None:
        """Run a backward whose gradients are zeros and weigh nothing, while the others run theirs."""
        self.weight = 0.0
        trained = [tensor for tensor in self._named.values() if tensor.requires_grad]
        trained = trained[:1] if self._settings.unused else trained  # what nobody uses stays unused
        with torch.enable_grad():
            self._before((), {})
            outputs = self._after([tensor.view_as(tensor) for tensor in trained])
            torch.autograd.backward(outputs, [torch.zeros_like(tensor) for tensor in trained])

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Combine nothing in the passes inside."""
        with self._ddp.no_sync():
            yield

    def average_buffers(self) -> None:
        """Set floating-point buffers to the mean over the workers that had a batch."""
        if self._flat_buffers is None:
            return
        flat, own = self._flat_buffers.empty(), self._weights[self._job.rank] > 0
        self._flat_buffers.pack_values(flat)
        flat.mul_(float(own))

        def act(turn: Turn) -> None:
            reduce_in_place(turn, flat)

        with self._job.communicating():
            call = Call(0, "buffers", "sum", shape=(flat.numel(),), dtype=flat.dtype)
            self._lane.wait(self._lane.ask(call, act), f"the buffers of '{self._settings.name}'")
        self._flat_buffers.unpack(flat.div_(max(1, sum(weight > 0 for weight in self._weights))))

    def copy_from_first(self) -> None:
        """Set parameters and buffers to what they are on worker 0; blocks until all workers have called this."""
        exchange = self._job.exchange
        for tensor in (*self._named.values(), *self._model.buffers()):
            future = exchange.broadcast(tensor, 0, None)
            with torch.no_grad():
                tensor.copy_(exchange.finish(future, f"the values of '{self._settings.name}'", None))

    def close(self, _politely: bool) -> None:
        """Detach from the others; the model stays as it is, and can be used as any other."""
        while self._handles:
            self._handles.pop().remove()
        self._round = self._done = None
        del self._ddp

    # -- around forward and backward ---------------------------------------------------------------------------------

    def _attached(self, model: nn.Module) -> DistributedDataParallel:
        """Give the model the values of worker 0, and have torch watch its backward."""
        ours = set(map(id, self._named.values()))
        ignored = [name for name, _ in model.named_buffers()]
        ignored += [name for name, tensor in model.named_parameters() if id(tensor) not in ours]
        setattr(model, _IGNORED, [*ignored, *(f".{name}" for name in ignored)])
        try:
            made = DistributedDataParallel(
                model,
                process_group=self._group.process_group,
                bucket_cap_mb=self._settings.bucket_mb,
                gradient_as_bucket_view=True,  # else each gradient is there twice
                find_unused_parameters=self._settings.unused,
            )
        except RuntimeError as error:
            raise self._lost(f"model of '{self._settings.name}'", error) from error
        finally:
            delattr(model, _IGNORED)
        for buffer in model.buffers():
            with torch.no_grad():
                future = self._job.exchange.broadcast(buffer, 0, None)
                buffer.copy_(self._job.exchange.finish(future, "the buffers of worker 0", None))
        return made

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not torch.is_grad_enabled():
            return None
        try:
            return self._ddp._pre_forward(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        except RuntimeError as error:
            where = f"forward of '{self._settings.name}'"
            if "finished reduction in the prior iteration" not in str(error):
                raise self._lost(where, error) from error
            raise UsageError(
                f"worker {self._job.rank}, {where}: {self._without_gradient()}The backward before is not over: give "
                "strategy=paceline.all_reduce(unused=True) if some parameters do not take part in every forward."
            ) from error

    def _after(self, output: object) -> Any:  # noqa: ANN401 - whatever the module returns
        # What DistributedDataParallel.forward does around the module; this way the module is called as itself.
        return self._ddp._post_forward(output) if torch.is_grad_enabled() else None  # pyright: ignore[reportPrivateUsage]

    def _on_bucket(self, bucket: GradBucket) -> Tensor:
        """Send a bucket that is ready, behind the agreement on this backward; return where the mean will be."""
        if self._round is None:
            self._round = self._begun()
            Variable._execution_engine.queue_callback(self._finish)  # pyright: ignore[reportPrivateUsage]
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

        round_.under_way.append(self._lane.follow_up(send))
        return buffer

    def _begun(self) -> Round:
        """Begin to agree on a backward with the others."""
        weight = self.weight
        if weight is None:
            handed_out = self._job.num_samples - self._num_samples or 1
            weight = float(handed_out) if self._settings.scale == "samples" else 1.0
        call = Call(0, "backward", "sum", weight=weight)
        return Round(weight, self._lane.ask(call, lambda turn: turn))

    def _finish(self) -> None:
        """Wait until all buckets are combined, before torch gives them to the parameters."""
        round_, self._round = self._round, None
        assert round_ is not None, "this was called for"
        what = f"backward of '{self._settings.name}'"
        if not round_.is_whole:
            raise UsageError(
                f"worker {self._job.rank}, {what}: {self._without_gradient()}give "
                "strategy=paceline.all_reduce(unused=True) if some parameters do not take part in every forward."
            )
        with self._job.communicating():
            meter, began_s = self._job.meter, self._job.meter.now()
            turn = self._lane.wait(round_.agreed, what)
            meter.wait_s += meter.now() - began_s
            for future in round_.under_way:
                self._lane.wait(future, what)
        self._weights = [call.weight for call in turn.calls]
        total = 1.0 if self._settings.scale == "sum" else sum(self._weights) or 1.0
        for buffer in round_.buckets:
            buffer.div_(total)
        self.problem = self._objection(round_.buckets)
        self._done = round_.weight

    def _lost(self, where: str, error: RuntimeError) -> PeerError:
        """Say which worker is gone, after torch has failed in a collective of its own."""
        return self._group.accounts.explain(where, self._job.exchange.company.others, None, str(error))

    def _objection(self, buckets: list[Tensor]) -> str:
        if self._settings.nonfinite in ("ignore", "zero") or not any(map(num_nonfinite, buckets)):
            return ""
        return NOT_FINITE

    def _without_gradient(self) -> str:
        """Name parameters that have no gradient, for a message."""
        absent = [name for name, tensor in self._named.items() if tensor.requires_grad and tensor.grad is None]
        return f"no gradient came to {', '.join(absent[:5])}{', ...' if len(absent) > 5 else ''}. " if absent else ""


def _hand_over(act: WeakMethod[Any], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return a bucket at once: `Replica` waits for its values before torch looks at them."""
    devices: list[int | str | torch.device] = [bucket.buffer().device] if bucket.buffer().is_cuda else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    call = act()
    future.set_result(bucket.buffer() if call is None else call(bucket))
    return future


def _call(method: WeakMethod[Any], *args: object) -> Any:  # noqa: ANN401 - whatever the method returns
    """Call a method unless its owner is gone."""
    act = method()
    return None if act is None else act(*args)


def _flat_buffers(model: nn.Module) -> Flat | None:
    named = floating_buffers(model)
    return Flat.over(named) if named else None


def _require_combinable(model: nn.Module, named: dict[str, Tensor], name: str) -> None:
    """Refuse what DistributedDataParallel does not see, or sees as something else."""
    known = set(map(id, model.parameters()))
    strange = [own for own, tensor in named.items() if id(tensor) not in known]
    if strange:
        raise UsageError(f"'{name}': the optimizer has parameters that the model has not: {', '.join(strange[:5])}.")
    if not any(tensor.requires_grad for tensor in named.values()):
        raise UsageError(f"'{name}': none of the parameters requires a gradient, so there is nothing to combine.")
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"'{name}': the layer '{path}' makes sparse gradients: build it with sparse=False, or as "
                "paceline.Embedding, whose rows live on the servers."
            )
