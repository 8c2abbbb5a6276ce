"""Pipeline of stages, one on each worker, run by torch's schedules of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from paceline.collective.signature import CallSignature
from paceline.errors import UsageError
from paceline.job.mesh import MeshPosition
from paceline.model_parallel.losses import (
    BatchLoss,
    Joining,
    Loss,
    PieceLoss,
    Taking,
    batch_dims,
    cut_targets,
    require_joining,
)
from paceline.model_parallel.mesh import Mesh
from paceline.model_parallel.passing import letters_of, receive_tensors, send_tensors, text_of
from paceline.model_parallel.stage import PipelineStage, joined, parts

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

Schedule = Literal["1f1b", "gpipe"]

SCHEDULES: Final[tuple[Schedule, ...]] = ("1f1b", "gpipe")
MICRO_BATCHES_PER_STAGE: Final = 4
_MAX_ENGINES: Final = 4  # kept, each with receive buffers; an epoch may end with a smaller batch

_Engine: TypeAlias = "ScheduleGPipe | Schedule1F1B"
_Key: TypeAlias = tuple[int, tuple[tuple[torch.Size, torch.dtype], ...], tuple[float, ...]]


@dataclass(slots=True)
class _Made:
    """Schedule for batches of one shape.

    Args:
        dims: of each output leaf, the dimension along which micro-batches are concatenated.
        outputs: of a micro-batch, until the loss has been checked.
    """

    engine: _Engine
    dims: Sequence[int | None]
    outputs: object


@dataclass(slots=True)
class Pipeline:
    """One stage of a pipeline, and its connections to the neighbours.

    Args:
        loss: of the outputs of the last stage and targets.
        joining: how the losses of micro-batches become that of a batch; None where the loss needs the whole batch, for
            which all forwards run first.
        micro_batches: number of micro-batches in a batch; None for four a stage, or the next lower divisor.
        min_size: least number of samples in a micro-batch, where `micro_batches` is None.
    """

    mesh: Mesh
    stage: PipelineStage
    loss: Loss
    joining: Joining | None
    schedule: Schedule
    micro_batches: int | None
    min_size: int = 1
    _engines: dict[_Key, _Made] = field(default_factory=dict[_Key, _Made])
    # Number of each set of parameters that require gradients, in the order in which they were seen.
    _frozen: dict[tuple[bool, ...], int] = field(default_factory=dict[tuple[bool, ...], int])

    def forward(self, inputs: object) -> Any:  # noqa: ANN401 - whatever the last stage gives
        """Return the outputs of the last stage for a batch, on all stages; all must call it."""
        given = parts(inputs, "the batch")
        self.mesh.agree(CallSignature.over(given[0], "forward"), "forward")
        with self.mesh.explained("forward"), torch.no_grad():
            _, outputs = self._relay(given)
            return self._shared(outputs)

    def forward_backward(self, inputs: object, targets: object) -> float:
        """Add the gradients of a batch to those of the parameters; return its loss, on all stages. All must call it.

        Raises:
            UsageError: a batch that does not divide into micro-batches, or differs from that of the other workers.
            PeerError: a worker is gone.
        """
        given = parts(inputs, "the batch")
        size = len(given[0])
        num = self._num_micro_batches(size)
        pieces = cut_targets(targets, size, num) if self.joining is not None else []
        learns = tuple(parameter.requires_grad for parameter in self.stage.parameters())
        call = replace(
            CallSignature.over(given[0], "step", root=num), weight=self._frozen.setdefault(learns, len(self._frozen))
        )
        calls = self.mesh.agree(call, "forward_backward")
        made = self._engine(given, num, tuple(call.weight for call in calls))
        with self.mesh.explained("forward_backward"):
            if not self._is_last:
                made.engine.step(*given if self._is_first else ())
                return float(self._shared(None))
            self.stage.taking = taking = self._taking(made, targets, pieces, num)
            try:
                made.engine.step(target=torch.zeros(num), losses=[])  # torch needs a target to split
            finally:
                self.stage.taking = None
            return float(self._shared(taking.total))

    def _taking(self, made: _Made, targets: object, pieces: Sequence[object], num: int) -> Taking:
        """Return the recorder of this batch's loss; for the first batch it also checks how losses are joined."""
        if self.joining is None:
            return BatchLoss(self.loss, targets, num, made.dims)
        if made.outputs is not None:
            require_joining(self.loss, self.joining, made.outputs, made.dims, targets, pieces)
            made.outputs = None
        return PieceLoss(self.loss, self.joining, pieces)

    # -- shapes ------------------------------------------------------------------------------------------------------

    def _num_micro_batches(self, batch_size: int) -> int:
        if self.micro_batches is None:
            most = MICRO_BATCHES_PER_STAGE * self.mesh.grid.pipeline
            found = [num for num in range(1, most + 1) if batch_size % num == 0 and batch_size // num >= self.min_size]
            return max(found, default=1)
        if batch_size % self.micro_batches:
            raise UsageError(
                f"a batch of {batch_size} samples does not divide into {self.micro_batches} micro-batches: choose "
                "sizes that do, and drop_last=True in the loader if only the last batch of an epoch does not."
            )
        return self.micro_batches

    def _engine(self, given: tuple[Tensor, ...], num: int, learns: tuple[float, ...]) -> _Made:
        """Return the schedule for batches of this shape; the first time, shapes are exchanged through all stages."""
        key = (num, tuple((tensor.shape, tensor.dtype) for tensor in given), learns)
        if key not in self._engines:
            with self.mesh.explained("the first micro-batch"):
                made = self._made(given, num)
            while len(self._engines) >= _MAX_ENGINES:
                self._engines.pop(next(iter(self._engines)))
            self._engines[key] = made
        return self._engines[key]

    def _made(self, given: tuple[Tensor, ...], num: int) -> _Made:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # takes a second

        size = len(given[0]) // num
        inputs, outputs = self._tried(tuple(tensor[:size] for tensor in given))
        dims: list[int | None] = [None] * len(tree_leaves(outputs))
        is_said = self.joining is not None and not self.joining.is_known
        if num > 1 and (self.joining is None or is_said):
            _, twice = self._tried(tuple(tensor[: 2 * size] for tensor in given))
            dims = batch_dims(outputs, twice, is_said) if self._is_last else dims
        if self._is_last and not any(one.requires_grad for one in tree_leaves(outputs) if isinstance(one, Tensor)):
            raise UsageError("nothing in the model learns: the parameters of all stages are frozen (requires_grad).")
        sent = (torch.empty(1, requires_grad=True),) if self._is_last else _blank(parts(outputs, "a stage"))
        stage = PipelineStage(
            self.stage,
            self.mesh.position.stage,
            self.mesh.grid.pipeline,
            torch.device("cpu"),
            input_args=_blank(inputs),
            output_args=sent,
            group=self.mesh.group("pipeline"),
        )
        # With fewer micro-batches than stages the two schedules are the same, and torch supports only GPipe.
        gpipe = self.schedule == "gpipe" or num < self.mesh.grid.pipeline or self.joining is None
        kind = ScheduleGPipe if gpipe else Schedule1F1B
        engine = kind(stage, num, loss_fn=_as_it_is, scale_grads=False)
        told = tree_map_only(Tensor, Tensor.detach, outputs) if self._is_last and is_said and num > 1 else None
        return _Made(engine, dims, told)

    def _tried(self, micro_batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], object]:
        """Return inputs and outputs of this stage for a micro-batch, without side effects on the model."""
        buffers = {buffer: buffer.clone() for buffer in self.stage.buffers()}
        with torch.random.fork_rng(devices=[]):
            try:
                inputs, outputs = self._relay(micro_batch)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise UsageError(
                    f"stage {self.mesh.position.stage} has a BatchNorm, which cannot learn from a micro-batch of "
                    f"{len(micro_batch[0])} sample: take fewer micro_batches, or larger batches. ({error})"
                ) from error
        for buffer, before in buffers.items():
            buffer.copy_(before)
        return inputs, outputs

    # -- from stage to stage -----------------------------------------------------------------------------------------

    def _relay(self, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
        """Run a batch through all stages once; return the inputs and outputs of this one."""
        group = self.mesh.group("pipeline")
        inputs = given if self._is_first else receive_tensors(partial(dist.recv, src=self._rank(-1), group=group))
        outputs = self.stage.run(joined(inputs))
        if not self._is_last:
            outputs = parts(outputs, f"stage {self.mesh.position.stage}")
            send_tensors(outputs, partial(dist.send, dst=self._rank(+1), group=group))
        return inputs, outputs

    def _shared(self, values: object) -> Any:  # noqa: ANN401
        """Broadcast the values of the last stage to all stages: tensors in any structure of torch's pytrees."""
        last = self.mesh.grid.pipeline - 1 - self.mesh.position.stage
        carry = partial(dist.broadcast, src=self._rank(last), group=self.mesh.group("pipeline"))
        if not self._is_last:
            structure, *leaves = receive_tensors(carry)
            return tree_unflatten(leaves, treespec_loads(text_of(structure)))
        leaves, spec = tree_flatten(values)
        if not all(isinstance(one, Tensor) for one in leaves):
            kinds = ", ".join(sorted({type(one).__name__ for one in leaves if not isinstance(one, Tensor)}))
            raise UsageError(f"the model gives {kinds}, but only tensors can be handed to all stages.")
        send_tensors((letters_of(treespec_dumps(spec)), *leaves), carry)
        return values

    def _rank(self, distance: int) -> int:
        position = self.mesh.position
        return self.mesh.grid.rank(MeshPosition(position.stage + distance, position.replica, position.tensor))

    @property
    def _is_first(self) -> bool:
        return self.mesh.position.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.mesh.position.stage == self.mesh.grid.pipeline - 1


def _as_it_is(loss: Tensor, _: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss already."""
    return loss


def _blank(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return empty tensors of the same shapes, which require gradients where these do."""
    return tuple(torch.empty(one.shape, dtype=one.dtype, requires_grad=one.requires_grad) for one in tensors)
