"""Pipeline of stages, one on each worker, run by torch's schedules of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.collective.signature import NUM_WORDS, CallSignature
from paceline.errors import UsageError
from paceline.job.mesh import MeshPosition
from paceline.model_parallel.layers import SharedBuffer, only_read
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
from paceline.model_parallel.mesh import Mesh, digest_of
from paceline.model_parallel.traces import changeable, unchanged_buffers
from paceline.torch_private import (
    gpipe,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

if TYPE_CHECKING:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

Carry = Callable[[Tensor], object]  # send or receive of a contiguous tensor


def send_tensors(tensors: Sequence[Tensor], carry: Carry) -> None:
    """Send tensors to another worker, each after its shape, its dtype and whether it requires a gradient."""
    for tensor in tensors:
        told = CallSignature.over(tensor, "forward")
        carry(_numbered(told, len(tensors), tensor.requires_grad).words())
        if tensor.numel():
            carry(_bytes(tensor.detach().contiguous()))


def receive_tensors(carry: Carry) -> tuple[Tensor, ...]:
    """Receive the tensors that another worker sends."""
    found: list[Tensor] = []
    while True:
        words = torch.zeros(NUM_WORDS, dtype=torch.int64)
        carry(words)
        told = CallSignature.read(words)
        tensor = torch.empty(told.shape, dtype=told.dtype)
        if tensor.numel():
            carry(_bytes(tensor))
        found.append(tensor.requires_grad_(bool(told.weight)))
        if len(found) == told.number:
            return tuple(found)


def letters_of(text: str) -> Tensor:
    """Return a text as a tensor, for `send_tensors`.

    >>> text_of(letters_of("0.weight"))
    '0.weight'
    """
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def text_of(letters: Tensor) -> str:
    """Return the text of a tensor of `letters_of`."""
    return bytes(letters.tolist()).decode()


def _numbered(told: CallSignature, num_tensors: int, takes_gradient: bool) -> CallSignature:
    return CallSignature(num_tensors, told.pattern, dtype=told.dtype, shape=told.shape, weight=float(takes_gradient))


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, because the transport does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


Values: TypeAlias = Tensor | tuple[Tensor, ...]


class PipelineStage(nn.Module):
    """Sequence of layers. A layer gets the output of the one before as one argument: a tensor or a tuple of tensors.

    Args:
        layers: of this worker.
        recompute: keep only the input of each layer, and run the layer again for backward, with equal random numbers
            and buffers. The second run does not change buffers.

    Attributes:
        taking: on the last stage, computes the loss of its output in the current step.
        takes_tuple: whether its first layer gets a tuple where there is only one tensor.
    """

    def __init__(self, layers: Sequence[nn.Module], *, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute
        self.taking: Taking | None = None
        self.takes_tuple = False

    def given(self, values: tuple[Tensor, ...]) -> Values:
        """Return the input of the first layer, which may change it in place."""
        own = tuple(map(changeable, values))
        return own[0] if len(own) == 1 and not self.takes_tuple else own

    def run(self, values: Any) -> Any:  # noqa: ANN401 - whatever the layers take and give
        """Run the layers."""
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                again = _Again(layer)
                run = partial(_on_copies, layer)
                values = checkpoint(run, values, use_reentrant=False, context_fn=again.contexts)
            else:
                values = layer(values)
        return values

    def forward(self, *values: Tensor) -> Any:  # noqa: ANN401 - a tensor, or several
        """Return the input of the next stage; on the last stage the (1,) root of a micro-batch's backward."""
        found = self.run(self.given(values))
        if self.taking is None:
            return tuple(value.contiguous() for value in parts(found, "a stage gives"))
        return self.taking(found)


def _on_copies(layer: nn.Module, values: Any) -> Any:  # noqa: ANN401 - whatever the layer takes and gives
    """Run a layer that may change its input in place, which is kept for the second run as it was."""
    return layer(tree_map_only(Tensor, torch.clone, values))


class _Again:
    """Runs a layer again with the buffers of its first run, and restores its current buffers afterwards.

    Otherwise BatchNorm would update its statistics twice, and layers that read a changed buffer would compute other
    values.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._before: list[tuple[nn.Module, str, Tensor]] = []  # of buffers that the first run has changed

    def contexts(self) -> tuple[Any, Any]:
        """Return the contexts of the first and of the second run."""
        return self._first(), self._second()

    @contextmanager
    def _first(self) -> Generator[None]:
        before = [(owner, name, buffer.clone()) for owner, name, buffer in _buffers(self._layer)]
        yield
        self._before = [
            (owner, name, one) for owner, name, one in before if not torch.equal(owner.get_buffer(name), one)
        ]

    @contextmanager
    def _second(self) -> Generator[None]:
        now = [(owner, name, owner.get_buffer(name)) for owner, name, _ in self._before]
        for owner, name, before in self._before:
            setattr(owner, name, before.clone())  # a new tensor, because autograd has kept the old one
        try:
            yield
        finally:
            for owner, name, buffer in now:
                setattr(owner, name, buffer)


def _buffers(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in layer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


def parts(values: object, what: str) -> tuple[Tensor, ...]:
    """Return the tensors of a value.

    Raises:
        UsageError: the value is neither a tensor nor a tuple of tensors.
    """
    found: tuple[object, ...] = values if isinstance(values, tuple) else (values,)
    tensors = tuple(value for value in found if isinstance(value, Tensor))
    if not found or len(tensors) != len(found):
        kinds = ", ".join(type(value).__name__ for value in found)
        raise UsageError(f"{what} {kinds or 'nothing'}, expected a tensor or a tuple of tensors.")
    return tensors


Schedule = Literal["1f1b", "gpipe"]

SCHEDULES: Final[tuple[Schedule, ...]] = ("1f1b", "gpipe")
MICRO_BATCHES_PER_STAGE: Final = 4
_MAX_ENGINES: Final = 4  # schedules kept, each with receive buffers; the last batch of an epoch may be smaller

_Engine: TypeAlias = "ScheduleGPipe | Schedule1F1B"
_Key: TypeAlias = tuple[int, tuple[tuple[torch.Size, torch.dtype], ...], tuple[float, ...]]


@dataclass(slots=True)
class _Made:
    """Schedule for batches of one shape.

    Args:
        dims: for each output leaf, the dimension along which micro-batches are concatenated.
        outputs: output of a micro-batch, until the loss has been checked.
    """

    engine: _Engine
    dims: Sequence[int | None]
    outputs: object


@dataclass(slots=True)
class Pipeline:
    """One stage of a pipeline, and its connections to the neighbours.

    Args:
        loss: function of the outputs of the last stage and the targets.
        joining: how the losses of micro-batches are combined; None for a loss of the whole batch, which needs all
            forwards first.
        micro_batches: number of micro-batches in a batch; None for four for each stage, or the next lower divisor.
        min_size: least number of samples in a micro-batch, if `micro_batches` is None.
        shared: buffers that other stages have, too; training may not change them.
    """

    mesh: Mesh
    stage: PipelineStage
    loss: Loss
    joining: Joining | None
    schedule: Schedule
    micro_batches: int | None
    min_size: int = 1
    shared: Sequence[SharedBuffer] = ()
    _engines: dict[_Key, _Made] = field(default_factory=dict[_Key, _Made])
    # A number for each state of the stage that its outputs depend on, in the order of first use.
    _states: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])

    def forward(self, inputs: object) -> Any:  # noqa: ANN401 - whatever the last stage gives
        """Return the outputs of the last stage for a batch, on all stages. All must call it."""
        given = self._taken(inputs)
        self.mesh.agree(CallSignature.over(given[0], "forward"), "forward")
        with self.mesh.explained("forward", apart=True), torch.no_grad():
            _, outputs = self._relay(given)
            return self._shared(outputs)

    def forward_backward(self, inputs: object, targets: object) -> float:
        """Add the gradients of a batch to the parameters' gradients; return the loss, on all stages. All must call it.

        Raises:
            UsageError: the batch does not divide into micro-batches, or differs from that of other workers.
            PeerError: a worker has ended.
        """
        given = self._taken(inputs)
        size = num_samples(given)
        num = self._num_micro_batches(size)
        pieces = cut_targets(targets, size, num) if self.joining is not None else []
        state = self._states.setdefault(self._state(), len(self._states))
        call = CallSignature.over(given[0], "step", root=num)
        call = replace(call, weight=state, digest=digest_of(given, targets))
        calls = self.mesh.agree(call, "forward_backward")
        made = self._engine(given, num, tuple(call.weight for call in calls))
        with self.mesh.explained("forward_backward", apart=True):
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
        """Return the recorder of this batch's loss; the first batch also checks how losses are combined."""
        if self.joining is None:
            return BatchLoss(self.loss, targets, num, made.dims)
        if made.outputs is not None:
            require_joining(self.loss, self.joining, made.outputs, made.dims, targets, pieces)
            made.outputs = None
        return PieceLoss(self.loss, self.joining, pieces)

    def _taken(self, inputs: object) -> tuple[Tensor, ...]:
        if self._is_first:
            self.stage.takes_tuple = isinstance(inputs, tuple)
        return parts(inputs, "the batch is")

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

    def _state(self) -> tuple[object, ...]:
        """Return what shapes, dtypes and gradients of the outputs of this stage depend on, besides the batch."""
        learned = tuple((parameter.requires_grad, parameter.dtype) for parameter in self.stage.parameters())
        return (*learned, torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)

    def _engine(self, given: tuple[Tensor, ...], num: int, states: tuple[float, ...]) -> _Made:
        """Return the schedule for batches of this shape; a new shape is sent through all stages."""
        key = (num, tuple((tensor.shape, tensor.dtype) for tensor in given), states)
        if key not in self._engines:
            with self.mesh.explained("the first micro-batch", apart=True):
                made = self._made(given, num)
            while len(self._engines) >= _MAX_ENGINES:
                self._engines.pop(next(iter(self._engines)))
            self._engines[key] = made
        return self._engines[key]

    def _made(self, given: tuple[Tensor, ...], num: int) -> _Made:
        from torch.distributed.pipelining import PipelineStage as TorchStage  # takes a second
        from torch.distributed.pipelining import Schedule1F1B

        size = len(given[0]) // num
        inputs, outputs = self._tried(tuple(tensor[:size] for tensor in given))
        dims: list[int | None] = [None] * len(tree_leaves(outputs))
        is_said = self.joining is not None and not self.joining.is_known
        if num > 1 and (self.joining is None or is_said):
            _, twice = self._tried(tuple(tensor[: 2 * size] for tensor in given))
            dims = batch_dims(outputs, twice, is_said) if self._is_last else dims
        if self._is_last and not any(one.requires_grad for one in tree_leaves(outputs) if isinstance(one, Tensor)):
            raise UsageError("nothing in the model learns: the parameters of all stages are frozen (requires_grad).")
        sent = (torch.empty(1, requires_grad=True),) if self._is_last else _blank(parts(outputs, "a stage gives"))
        stage = TorchStage(
            self.stage,
            self.mesh.position.stage,
            self.mesh.grid.pipeline,
            torch.device("cpu"),
            input_args=_blank(inputs),
            output_args=sent,
            group=self.mesh.group("pipeline"),
        )
        # With fewer micro-batches than stages the two schedules are the same, and torch supports only GPipe.
        if self.schedule == "gpipe" or num < self.mesh.grid.pipeline or self.joining is None:
            engine = gpipe(stage, num, _as_it_is)
        else:
            engine = Schedule1F1B(stage, num, loss_fn=_as_it_is, scale_grads=False)
        told = tree_map_only(Tensor, Tensor.detach, outputs) if self._is_last and is_said and num > 1 else None
        return _Made(engine, dims, told)

    def _tried(self, micro_batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], object]:
        """Return inputs and outputs of this stage for a micro-batch, without side effects on the model."""
        own = tuple(tensor.clone().requires_grad_(tensor.requires_grad) for tensor in micro_batch)
        with torch.random.fork_rng(devices=[]), unchanged_buffers(self.stage), only_read(self.shared):
            try:
                return self._relay(own)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise UsageError(
                    f"stage {self.mesh.position.stage} has a BatchNorm, which cannot learn from a micro-batch of "
                    f"{len(micro_batch[0])} sample: take fewer micro_batches, or larger batches. ({error})"
                ) from error

    # -- from stage to stage -----------------------------------------------------------------------------------------

    def _relay(self, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Any]:
        """Run a batch through all stages once; return the inputs and outputs of this one."""
        group = self.mesh.group("pipeline")
        if not self._is_first:
            is_tuple, *received = receive_tensors(partial(dist.recv, src=self._rank(-1), group=group))
            self.stage.takes_tuple, given = bool(is_tuple), tuple(received)
        outputs = self.stage.run(self.stage.given(given))
        if not self._is_last:
            told = (torch.tensor(isinstance(outputs, tuple)),)
            outputs = parts(outputs, f"stage {self.mesh.position.stage} gives")
            send_tensors((*told, *outputs), partial(dist.send, dst=self._rank(+1), group=group))
        return given, outputs

    def _shared(self, values: object) -> Any:  # noqa: ANN401
        """Broadcast the values of the last stage to all stages: a pytree of tensors."""
        last = self.mesh.grid.pipeline - 1 - self.mesh.position.stage
        carry = partial(dist.broadcast, src=self._rank(last), group=self.mesh.group("pipeline"))
        if not self._is_last:
            structure, *leaves = receive_tensors(carry)
            return tree_unflatten(leaves, treespec_loads(text_of(structure)))
        leaves, spec = tree_flatten(values)
        if not all(isinstance(one, Tensor) for one in leaves):
            kinds = ", ".join(sorted({type(one).__name__ for one in leaves if not isinstance(one, Tensor)}))
            raise UsageError(f"the model gives {kinds}, but only tensors can be handed to all stages.")
        try:
            structure = letters_of(treespec_dumps(spec))
        except NotImplementedError as error:
            raise UsageError(
                f"the model gives a {type(values).__name__} that cannot be handed to all stages: expected tensors in "
                f"dicts, tuples and lists. ({error})"
            ) from error
        send_tensors((structure, *leaves), carry)
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


def num_samples(batch: tuple[Tensor, ...]) -> int:
    """Return the number of samples of a batch, which is cut along the first dimension of each tensor.

    Raises:
        UsageError: there are none, or tensors have different numbers.

    Example:
        >>> num_samples((torch.ones(4, 2), torch.ones(4)))
        4
    """
    if not all(tensor.dim() for tensor in batch):
        raise UsageError("the batch is one number, expected a tensor whose first dimension counts the samples.")
    sizes = [len(tensor) for tensor in batch]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the tensors of the batch have {', '.join(map(str, sizes))} samples, expected as many of each: a batch is "
            "cut along its first dimension. What is the same for all samples belongs into the layers, or expanded."
        )
    if not sizes[0]:
        raise UsageError("the batch has no samples, and so no loss.")
    return sizes[0]


def _as_it_is(loss: Tensor, _: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss."""
    return loss


def _blank(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return empty tensors with equal shapes and `requires_grad`."""
    return tuple(torch.empty(one.shape, dtype=one.dtype, requires_grad=one.requires_grad) for one in tensors)
