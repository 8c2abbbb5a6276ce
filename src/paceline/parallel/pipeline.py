"""A pipeline of stages, one a worker, by the schedules of torch: which micro-batch runs when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collective.call import Call
from paceline.core.grid import Spot
from paceline.errors import UsageError
from paceline.parallel.mesh import Mesh
from paceline.parallel.passing import give, take
from paceline.parallel.stage import Stage, Values, joined, parts

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

Schedule = Literal["1f1b", "gpipe"]

SCHEDULES: Final[tuple[Schedule, ...]] = ("1f1b", "gpipe")
MICRO_BATCHES_PER_STAGE: Final = 4
_MAX_ENGINES: Final = 4  # kept, each with memory for what comes in; for an epoch whose last batch is smaller

_Engine: TypeAlias = "ScheduleGPipe | Schedule1F1B"
_Key: TypeAlias = tuple[int, tuple[tuple[torch.Size, torch.dtype], ...]]


@dataclass(slots=True)
class Pipeline:
    """One stage of a pipeline, and the way to its neighbours.

    Args:
        micro_batches: that a batch is cut into; None for four a stage, or the next lower number that divides it.
    """

    mesh: Mesh
    stage: Stage
    schedule: Schedule
    micro_batches: int | None
    _engines: dict[_Key, _Engine] = field(default_factory=dict[_Key, _Engine])

    def forward(self, inputs: object) -> Values:
        """Return what the last stage gives for a batch, to all; all must call it."""
        given = parts(inputs, "the batch")
        self.mesh.agree(Call.over(given[0], "forward"), "forward")
        with self.mesh.explained("forward"), torch.no_grad():
            _, outputs = self._relay(given, self.stage.run)
            return joined(self._shared(outputs))

    def forward_backward(self, inputs: object, targets: object) -> float:
        """Add the gradients of a batch to those of the parameters; return its loss, to all. All must call it.

        Raises:
            UsageError: a batch that does not divide, or is another than that of the others.
            PeerError: a worker is gone.
        """
        given = parts(inputs, "the batch")
        num = self._num_micro_batches(len(given[0]))
        if isinstance(targets, Tensor) and len(targets) != len(given[0]):
            raise UsageError(f"the batch has {len(given[0])} samples and {len(targets)} targets, expected as many.")
        self.mesh.agree(Call.over(given[0], "step", root=num), "forward_backward")
        engine = self._engine(given, num)
        losses: list[Tensor] = []
        with self.mesh.explained("forward_backward"):
            if self._is_first:
                engine.step(*given)
            elif self._is_last:
                numbers = torch.zeros(num)  # torch wants a target to cut; the loss takes the real ones with the stage
                engine.step(target=numbers, losses=losses, targets=targets)
            else:
                engine.step()
            own = torch.stack(losses).detach().double().sum() if losses else None
            return float(self._shared(() if own is None else (own,))[0])

    # -- shapes ------------------------------------------------------------------------------------------------------

    def _num_micro_batches(self, batch_size: int) -> int:
        if self.micro_batches is None:
            most = MICRO_BATCHES_PER_STAGE * self.mesh.grid.pipeline
            return max((num for num in range(1, most + 1) if batch_size % num == 0), default=1)
        if batch_size % self.micro_batches:
            raise UsageError(
                f"a batch of {batch_size} samples does not divide into {self.micro_batches} micro-batches: choose "
                "sizes that do, and drop_last=True in the loader if only the last batch of an epoch does not."
            )
        return self.micro_batches

    def _engine(self, given: tuple[Tensor, ...], num: int) -> _Engine:
        """Return the schedule of batches of this shape; the first time the shapes go through all stages."""
        key = (num, tuple((tensor.shape, tensor.dtype) for tensor in given))
        if key not in self._engines:
            with self.mesh.explained("the first micro-batch"):
                made = self._made(tuple(tensor[: len(tensor) // num] for tensor in given), num)
            while len(self._engines) >= _MAX_ENGINES:
                self._engines.pop(next(iter(self._engines)))
            self._engines[key] = made
        return self._engines[key]

    def _made(self, micro_batch: tuple[Tensor, ...], num: int) -> _Engine:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # takes a second

        inputs, outputs = self._tried(micro_batch)
        outputs = (torch.empty(1, requires_grad=True),) if self._is_last else outputs
        stage = PipelineStage(
            self.stage,
            self.mesh.spot.stage,
            self.mesh.grid.pipeline,
            torch.device("cpu"),
            input_args=inputs,
            output_args=outputs,
            group=self.mesh.group("pipeline"),
        )
        # With fewer micro-batches than stages the two are the same, and torch has only this one.
        gpipe = self.schedule == "gpipe" or num < self.mesh.grid.pipeline
        kind = ScheduleGPipe if gpipe else Schedule1F1B

        def share(loss: Tensor, _: Tensor) -> Tensor:
            return loss.sum() / num

        return kind(stage, num, loss_fn=share, scale_grads=False)

    def _tried(self, micro_batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return what comes into this stage and what goes out, for a micro-batch that leaves no trace."""
        buffers = {buffer: buffer.clone() for buffer in self.stage.buffers()}
        with torch.random.fork_rng(devices=[]):
            inputs, outputs = self._relay(micro_batch, self.stage.run)
        for buffer, before in buffers.items():
            buffer.copy_(before)
        blank = [tuple(torch.empty_like(one, requires_grad=one.requires_grad) for one in inputs)]
        blank += [tuple(torch.empty(one.shape, dtype=one.dtype, requires_grad=one.requires_grad) for one in outputs)]
        return blank[0], blank[1]

    # -- from stage to stage -----------------------------------------------------------------------------------------

    def _relay(
        self, given: tuple[Tensor, ...], run: Callable[[Values], Any]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run a batch through all stages once; return what came into this one and what goes out of it."""
        group = self.mesh.group("pipeline")
        inputs = given if self._is_first else take(partial(dist.recv, src=self._rank(-1), group=group))
        outputs = parts(run(joined(inputs)), f"stage {self.mesh.spot.stage}")
        if not self._is_last:
            give(outputs, partial(dist.send, dst=self._rank(+1), group=group))
        return inputs, outputs

    def _shared(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what the last stage has, to all stages."""
        last = self.mesh.grid.pipeline - 1 - self.mesh.spot.stage
        carry = partial(dist.broadcast, src=self._rank(last), group=self.mesh.group("pipeline"))
        if not self._is_last:
            return take(carry)
        give(values, carry)
        return values

    def _rank(self, distance: int) -> int:
        spot = self.mesh.spot
        return self.mesh.grid.rank(Spot(spot.stage + distance, spot.replica, spot.tensor))

    @property
    def _is_first(self) -> bool:
        return self.mesh.spot.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.mesh.spot.stage == self.mesh.grid.pipeline - 1
