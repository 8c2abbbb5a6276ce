"""Conversion of a model into one that several workers hold together, each a part of it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, SupportsIndex
from weakref import WeakMethod

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn

from paceline.collective.collectives import Collectives
from paceline.collective.signature import CallSignature, Pattern
from paceline.errors import PacelineError, UsageError
from paceline.job.strategy import Distribution
from paceline.model_parallel.arrangement import Arrangement, ModelPart, whole
from paceline.model_parallel.layers import (
    Placement,
    drop,
    ends_of,
    layers_of,
    materialise,
    require_apart,
    shared_buffers,
    tree_of,
)
from paceline.model_parallel.losses import Loss, Reduction, joining_of, one_number
from paceline.model_parallel.mesh import Mesh, digest_of
from paceline.model_parallel.pipeline import (
    SCHEDULES,
    Pipeline,
    PipelineStage,
    Schedule,
    letters_of,
    parts,
    receive_tensors,
    send_tensors,
    text_of,
)
from paceline.torch_private import AnyBatchNorm, submodules
from paceline.worker.validation import as_number, brief

_Run = Callable[[Any], Any]


class Parallel(nn.Module):
    """A model of which each worker of a replica holds a part. All of them call its methods, with the same batch.

    Its parameters, buffers and their names are those of this worker's part, named as in the model it is part of.
    """

    def __init__(self, held: nn.Module, run: _Run | Pipeline, loss: Loss, part: ModelPart) -> None:
        super().__init__()
        self.training = held.training
        for name, child in submodules(held).items():  # under each of its names, as in the state of the model
            self.add_module(name, child)
        for name, parameter in held.named_parameters(recurse=False, remove_duplicate=False):
            self.register_parameter(name, parameter)
        lasting = held.state_dict().keys()
        for name, buffer in held.named_buffers(recurse=False, remove_duplicate=False):
            self.register_buffer(name, buffer, persistent=name in lasting)
        self._held: tuple[nn.Module, _Run | Pipeline] = (held, run)  # in a tuple, where torch sees no child
        if isinstance(loss, nn.Module) and next(loss.parameters(), None) is None:
            object.__setattr__(self, "_loss", loss)  # no child: its buffers are not of the model
        else:
            self._loss = loss
        self._part = part
        self._followers: list[WeakMethod[Callable[[], None]]] = []

    @property
    def held(self) -> nn.Module:
        """The layers that this worker holds, in the shape that the model had."""
        return self._held[0]

    def forward(self, inputs: Any) -> Any:  # noqa: ANN401 - whatever the model takes and gives
        """Return the outputs of the whole model, on all workers of this replica. For evaluation: without gradients.

        Blocks until all workers of the replica call it.

        Raises:
            UsageError: workers were given different batches.
            PeerError: a worker has died or left.
        """
        run = self._held[1]
        with _given("forward", inputs=inputs), self._connected("forward", inputs):
            return run.forward(inputs) if isinstance(run, Pipeline) else run(inputs)

    def forward_backward(self, inputs: Any, targets: Any) -> float:  # noqa: ANN401
        """Add the gradients of a batch to `.grad` of this worker's parameters; return the loss of the batch.

        Loss and gradients are those of the whole batch of this replica, as one process would compute them. Under
        all-reduce the gradients are combined with those of the other replicas before this returns, except for calls
        inside `optimizer.accumulate()`. Blocks until all workers of the replica call it.

        Args:
            inputs: (batch, ...) a tensor, or a tuple of tensors for a model that takes one.
            targets: (batch, ...) second argument of the loss.

        Raises:
            UsageError: the batch does not divide into micro-batches, or differs from that of the other workers.
            PeerError: a worker has died or left, or is too late; the message names it.
        """
        run = self._held[1]
        if not torch.is_grad_enabled():
            raise UsageError(
                "forward_backward was called under torch.no_grad() or inference_mode(), where there are no gradients: "
                "call it outside, or the model itself for its outputs."
            )
        if self._part.mesh is None:
            outputs = self(inputs)  # through hooks, as of an optimizer that combines gradients
            with _given("forward_backward", targets=targets):
                loss = one_number(self._loss(outputs, targets))
            loss.backward()
            return float(loss.detach())
        taken = _given("forward_backward", inputs=inputs, targets=targets)
        with taken, self._connected("step", inputs, targets), _split_loss(self._part):
            if isinstance(run, Pipeline):
                found = run.forward_backward(inputs, targets)
            else:
                loss = one_number(self._loss(run(inputs), targets))
                loss.backward()
                found = float(loss.detach())
        for follower in self._followers:
            act = follower()
            if act is not None:
                act()
        return found

    def when_backward(self, act: WeakMethod[Callable[[], None]]) -> None:
        """Call `act` at the end of each `forward_backward` of layers that several workers hold."""
        self._followers.append(act)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients of this replica to a norm of at most `max_norm`; return the norm before.

        As `torch.nn.utils.clip_grad_norm_` for one process. Blocks until all workers of the replica call it.

        Raises:
            UsageError: the norm is not a number above 0.
        """
        limit = as_number(max_norm, "clip_gradients", "max_norm")
        if not limit > 0:
            raise UsageError(f"clip_gradients: max_norm is {limit:g}, expected a norm above 0 (inf clips nothing).")
        total = _squared_norm(self, self._part)
        mesh = self._part.mesh
        if mesh is not None:
            with mesh.explained("clip_gradients"):
                dist.all_reduce(total, group=mesh.group("pipeline"))
        norm = float(total.sqrt())
        for parameter in self.parameters():
            if parameter.grad is not None and norm > limit:
                parameter.grad.mul_(limit / (norm + 1e-6))
        return norm

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Parallel:
        """Convert the buffers of the loss, too."""
        if isinstance(self._loss, nn.Module) and "_loss" not in self._modules:
            self._loss._apply(fn)
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Refuse to be copied or pickled where others hold parts; a whole model is copied as any module is."""
        if self._part.mesh is not None:
            raise UsageError(
                "a model of which several workers hold parts cannot be copied or pickled: keep whole_state_dict(), "
                "which a whole model loads, or state_dict(), which has this worker's part."
            )
        return super().__reduce_ex__(protocol)

    def train(self, mode: bool = True) -> Parallel:
        """Set the mode of this worker's layers."""
        self._held[0].train(mode)
        return super().train(mode)

    def whole_state_dict(self) -> dict[str, Tensor] | None:
        """Return a copy of the state of the whole model on the first worker of the replica, None on the others.

        Blocks until all workers of the replica call it.
        """
        grid, position, mesh = self._part.grid, self._part.position, self._part.mesh
        if mesh is None:
            return {name: whole(tensor).clone() for name, tensor in self.state_dict().items()}
        with mesh.explained("whole_state_dict"):
            own = _whole_state(self, mesh)
            group = mesh.group("pipeline")
            if position.stage > 0:
                named = (letters_of("\n".join(own)), *own.values())
                send_tensors(named, partial(dist.send, dst=grid.rank(replace(position, stage=0)), group=group))
                return None
            for stage in range(1, grid.pipeline):
                source = grid.rank(replace(position, stage=stage))
                names, *values = receive_tensors(partial(dist.recv, src=source, group=group))
                own.update(zip(text_of(names).split("\n"), values, strict=True))
        return own if position.tensor == 0 else None

    @contextmanager
    def _connected(self, pattern: Pattern, inputs: object, targets: object = None) -> Generator[None]:
        """Check that the ranks of split layers are given the same batch, and explain failed connections."""
        mesh = self._part.mesh
        if mesh is None or mesh.grid.pipeline > 1:  # a pipeline does both
            yield
            return
        call = CallSignature.over(parts(inputs, "the batch is")[0], pattern, root=1)
        mesh.agree(replace(call, digest=digest_of(inputs, targets)), pattern)
        with mesh.explained(pattern):
            yield


@contextmanager
def _given(call: str, **values: object) -> Generator[None]:
    """Say in errors of the layers and of the loss what they were given; UsageError if it is of no type that fits."""
    try:
        yield
    except (TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, PacelineError | torch.OutOfMemoryError):
            raise
        shown = "; ".join(f"{name} is {brief(value)}" for name, value in values.items())
        tensors = [value for given in values.values() for value in (given if isinstance(given, tuple) else (given,))]
        if not all(isinstance(value, Tensor) for value in tensors):
            raise UsageError(f"{call}: {shown}, expected tensors, or tuples of tensors ({error}).") from error
        error.add_note(f"{call}: {shown}. See whether the model and the loss take these shapes and types.")
        raise


def _split_loss(part: ModelPart) -> AbstractContextManager[object]:
    """Return the context in which the loss accepts scores that are split over tensor ranks."""
    if part.grid.tensor == 1:
        return nullcontext()
    from paceline.model_parallel.tensor import split_loss  # takes half a second

    return split_loss()


def _squared_norm(module: nn.Module, part: ModelPart) -> Tensor:
    """Return the sum of the squares of the gradients of this stage."""
    if part.mesh is not None and part.grid.tensor > 1:
        from paceline.model_parallel.tensor import squared_norm

        return squared_norm(module, part.mesh.axis("tensor"))
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    squares = (whole(one.detach().double().square().sum()).cpu() for one in gradients)
    return sum(squares, torch.zeros((), dtype=torch.float64))


def _whole_state(module: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """Return the state of this stage with whole layers."""
    if mesh.grid.tensor == 1:
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}
    from paceline.model_parallel.tensor import whole_state

    return whole_state(module, mesh.axis("tensor"))


class ParallelizeOptions(msgspec.Struct, frozen=True):
    """Arguments of `paceline.parallelize`, which documents them; None leaves one to the launcher."""

    pipeline: int | None = None
    tensor: int | None = None
    data: str | None = None
    micro_batches: int | None = None
    schedule: Schedule = "1f1b"
    recompute: bool = False
    balance: Any = None
    placement: Placement | None = None
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        """Validate the numbers and the schedule."""
        for name, number in (
            ("pipeline", self.pipeline),
            ("tensor", self.tensor),
            ("micro_batches", self.micro_batches),
        ):
            if number is not None and not (isinstance(number, int) and number >= 1):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"parallelize: {name} is {brief(number)}, expected a whole number of 1 or more.")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"parallelize: schedule is {self.schedule!r}, expected {' or '.join(SCHEDULES)}.")

    def over(self, launched: Distribution) -> Distribution:
        """Return the distribution: that of the script, completed by that of the launcher.

        >>> str(ParallelizeOptions(pipeline=2, data="ssp:3").over(Distribution.parse("all-reduce+tensor:2")))
        'ssp:3+pipeline:2+tensor:2'
        """
        if self.data is not None:
            said = Distribution.parse(self.data)
            if said.data is None or said.ranks_per_replica > 1:
                raise UsageError(
                    f"parallelize: data is '{self.data}', expected how replicas become one model, as 'ssp:3' or "
                    "'all-reduce'. Stages and ranks are pipeline=... and tensor=..."
                )
            launched = replace(said, pipeline=launched.pipeline, tensor=launched.tensor)
        return replace(launched, pipeline=self.pipeline or launched.pipeline, tensor=self.tensor or launched.tensor)


def keep_part(
    model: nn.Module, loss: Loss, asked: ParallelizeOptions, exchange: Collectives, arrangement: Arrangement
) -> Parallel:
    """Keep this worker's part of a model, and connect it to the others; see `paceline.parallelize`."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"parallelize: the model is {brief(model)}, expected a torch.nn.Module.")
    if isinstance(loss, type) or not callable(loss):
        raise UsageError(
            f"parallelize: loss is {brief(loss)}, expected a function of outputs and targets, "
            "such as torch.nn.functional.cross_entropy, or an instance of a loss module."
        )
    wanted = asked.over(arrangement.distribution)
    stages, count = wanted.pipeline, asked.micro_batches
    if stages > 1 and count is not None and count < stages and asked.schedule == "1f1b":
        raise UsageError(
            f"parallelize: {count} micro-batches cannot keep {stages} stages busy in turn, as 1f1b does: give at least "
            f"{stages}, or schedule='gpipe'."
        )
    grid = arrangement.settle(wanted)
    part = ModelPart(grid, exchange.worker_set.rank, arrangement.mesh(exchange) if grid.is_split else None)
    made = _cut(model, loss, asked, part)
    arrangement.enter(made, part)
    return made


def _cut(model: nn.Module, loss: Loss, asked: ParallelizeOptions, part: ModelPart) -> Parallel:
    """Return this worker's part of a model; the layers of other workers lose their values."""
    mesh, stage = part.mesh, part.position.stage
    joining = joining_of(loss, asked.reduction)
    # A BatchNorm mostly cannot learn from one sample.
    min_size = 2 if any(isinstance(one, AnyBatchNorm) for one in model.modules()) else 1
    if mesh is not None:
        _require_cpu(model)
    ends = _ends(model, asked, mesh) if mesh is not None and mesh.grid.pipeline > 1 else None
    if mesh is not None and mesh.grid.tensor > 1:
        loss = _split(model, loss, mesh, in_row=ends is not None or asked.recompute)
    if ends is None or mesh is None:
        materialise(model)
        run = (
            PipelineStage([layer.module for layer in layers_of(model)], recompute=True).run
            if asked.recompute
            else model
        )
        return Parallel(model, run, loss, part)
    layers = layers_of(model)
    own = layers[ends[stage - 1] if stage else 0 : ends[stage]]
    shared = shared_buffers(layers, ends, stage)
    drop([layer for layer in layers if layer not in own], own)
    held = tree_of(own, training=model.training)
    materialise(held)
    run = PipelineStage([layer.module for layer in own], recompute=asked.recompute)
    pipeline = Pipeline(mesh, run, loss, joining, asked.schedule, asked.micro_batches, min_size, shared)
    return Parallel(held, pipeline, loss, part)


def _require_cpu(model: nn.Module) -> None:
    away = [name for name, parameter in model.named_parameters() if parameter.device.type not in ("cpu", "meta")]
    if away:
        raise UsageError(
            f"parallelize: '{away[0]}' is on an accelerator, but stages and ranks communicate over Gloo, on "
            "the CPU: leave the model there."
        )


def _ends(model: nn.Module, asked: ParallelizeOptions, mesh: Mesh) -> list[int]:
    """Return the ends of the stages."""
    layers = layers_of(model)
    ends = ends_of(layers, asked.placement, asked.balance, mesh)
    require_apart(layers, ends)
    return ends


def _split(model: nn.Module, loss: Loss, mesh: Mesh, *, in_row: bool) -> Loss:
    """Split the layers of a model over tensor ranks, in place; return a loss that accepts its outputs.

    Args:
        model: the whole model.
        loss: loss of its outputs.
        mesh: mesh of all workers.
        in_row: whether its layers are called one after the other, in place of its own forward.
    """
    from paceline.model_parallel.tensor import loss_of_split, split_over  # takes half a second

    materialise(model)
    with mesh.explained("splitting layers"):
        split_over(
            model, mesh.axis("tensor"), row=[(one.name, one.module) for one in layers_of(model)] if in_row else ()
        )
    return partial(loss_of_split, loss)
