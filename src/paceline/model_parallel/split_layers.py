"""Layers of which each rank holds a part: linear by columns or rows, attention by heads, embeddings by words.

Their parameters are ordinary ones with this rank's part: code that steps, sends or saves parameters works with them.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.model_parallel.traces import unchanged_buffers
from paceline.torch_private import tree_flatten, tree_map_only

_ADDED_AS: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # rounded once, after all additions
_DROPOUTS: Final[tuple[Callable[..., Tensor], ...]] = (
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout),
)


class RankShare(msgspec.Struct, frozen=True):
    """Position of this rank in a 1-D mesh of ranks that split layers, with their sums and gathers."""

    mesh: DeviceMesh
    rank: int
    size: int

    @staticmethod
    def of(mesh: DeviceMesh) -> RankShare:
        """Return the position of this rank in a mesh."""
        return RankShare(mesh, mesh.get_local_rank(), mesh.size())

    @property
    def group(self) -> ProcessGroup:
        """The connections to the other ranks."""
        return self.mesh.get_group()

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank; blocks until all ranks call it."""
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, 0), group=self.group)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, the same bits on each; blocks until all call it."""
        total = tensor.to(_ADDED_AS.get(tensor.dtype, tensor.dtype), copy=True).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.dtype)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape; blocks until all call it."""
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return found


class LayerCut(msgspec.Struct, frozen=True):
    """How a parameter is divided: evenly along a dimension.

    Args:
        num_stacked: number of matrices that are concatenated along it, each of which is divided.

    Example:
        >>> LayerCut(0, num_stacked=2).part(torch.arange(8), rank=1, size=2)
        tensor([2, 3, 6, 7])
    """

    dim: int
    num_stacked: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a rank's part, in memory of its own."""
        stacked = whole.chunk(self.num_stacked, self.dim)
        return torch.cat([one.chunk(size, self.dim)[rank] for one in stacked], self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter, given the parts of all ranks."""
        stacked = zip(*(part.chunk(self.num_stacked, self.dim) for part in parts), strict=True)
        return torch.cat([one for pieces in stacked for one in pieces], self.dim)


class SplitRegion:
    """Computation of each rank's own part: from the layers split by columns to the one split by rows.

    Inputs are the same on all ranks; their gradient is summed over the ranks, once for all layers that they enter.
    Inside, dropout draws from a random stream of each rank, seeded by the common one: different parts are dropped
    inside, the same outside, and a recomputation repeats both.
    """

    def __init__(self, share: RankShare) -> None:
        self._share = share
        self._entered: tuple[Tensor, Tensor] | None = None  # the latest input, and what the layers inside get for it
        self._common: tuple[torch.Generator, Tensor] | None = None  # the state of the common stream, while inside

    def enter(self, tensor: Tensor) -> Tensor:
        """Return an input for the layers inside."""
        if self._entered is None or self._entered[0] is not tensor:
            self._entered = (tensor, enter(tensor, self._share))
        return self._entered[1]

    def draw_alone(self, device: torch.device) -> None:
        """Draw random numbers of this rank's own from here on."""
        if self._common is None:
            generator = generator_of(device)
            seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
            self._common = (generator, generator.get_state())
            generator.manual_seed(seed + self._share.rank)

    def draw_together(self) -> None:
        """Draw the same random numbers on all ranks again."""
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None

    def end_with(self, module: nn.Module) -> None:
        """End the region with a module's forward, also when it raises."""

        def close(module: nn.Module, inputs: object, outputs: object) -> None:
            del module, inputs, outputs
            self.draw_together()
            self._entered = None

        module.register_forward_hook(close, always_call=True)

    def surround(self, dropout: nn.Module) -> None:
        """Make one dropout layer a region, which draws from this rank's stream."""

        def begin(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module.training:
                self.draw_alone(inputs[0].device)

        dropout.register_forward_pre_hook(begin)
        self.end_with(dropout)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that layers on a device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def enter(tensor: Tensor, share: RankShare) -> Tensor:
    """Return the same values; their gradient is the sum of the gradients of all ranks."""
    return _Enter.apply(tensor, share) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def leave(tensor: Tensor, share: RankShare) -> Tensor:
    """Return the sum of the tensors of all ranks; each of them has the gradient of the sum. Blocks."""
    return _Leave.apply(tensor, share)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: RankShare) -> Tensor:  # noqa: ANN401 - torch's own
        ctx.share = share
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.share.add_up(gradients[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: RankShare) -> Tensor:  # noqa: ANN401
        del ctx
        return share.add_up(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        del ctx
        return gradients[0], None


Made = dict[nn.Parameter, nn.Parameter]  # a whole parameter, and this rank's part of it


class SplitLayer(nn.Module, ABC):
    """A layer that this rank has a part of.

    Attributes:
        cuts: how each parameter is divided, by name; other parameters are whole and the same on all ranks.
        name: name of the layer in the model.
        trial: the trial run in which it gives stand-in outputs; None in training and evaluation.
        is_proven: whether the module around it computes the same as around the whole layer.
    """

    cuts: Mapping[str, LayerCut]
    trial: EquivalenceTrial | None
    is_proven: bool
    kept: ClassVar[tuple[str, ...]] = ("weight", "bias")  # the parameters of the whole layer

    def __init__(self, whole: nn.Module, cuts: Mapping[str, LayerCut], share: RankShare, made: Made, name: str) -> None:
        super().__init__()
        self.cuts, self.share, self.name, self.trial, self.is_proven = cuts, share, name, None, True
        for name in self.kept:
            parameter: nn.Parameter | None = getattr(whole, name)
            cut = cuts.get(name)
            if parameter is not None and cut is not None and parameter not in made:  # shared by layers, as before
                part = cut.part(parameter.detach(), share.rank, share.size)
                made[parameter] = nn.Parameter(part, parameter.requires_grad)
            self.register_parameter(name, None if parameter is None else made.get(parameter, parameter))
        self.train(whole.training)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as torch has it
        """Return a parameter; in a trial a stand-in for it, whole or this rank's part."""
        value: Any = super().__getattr__(name)
        trial = self.__dict__.get("trial")
        if trial is None or name not in self.kept or value is None:
            return value
        cut = self.cuts.get(name)
        shape = [*value.shape]
        if cut is not None:
            shape[cut.dim] *= trial.size
        return trial.stand_in(shape, value.dtype, value.device, cut)

    def require_proven(self) -> None:
        """Raise UsageError when the module around this layer has not been checked."""
        if not self.is_proven:
            raise UsageError(
                f"layer '{self.name}' is split together with others, but was called without the module around: call "
                "that module, not its .forward or a layer of it, or leave the layer out of tensor_plan."
            )


class ColumnLinear(SplitLayer):
    """A linear layer with a part of its outputs on each rank: (..., in) to (..., out / ranks).

    Args:
        num_stacked: number of layers that are concatenated in its outputs, such as query, key and value.
        region: region that this layer opens, with others of the same inputs; None for a layer in a row of layers.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        whole: nn.Linear,
        share: RankShare,
        made: Made,
        region: SplitRegion | None,
        name: str,
        num_stacked: int = 1,
    ) -> None:
        cut = LayerCut(0, num_stacked)
        super().__init__(whole, {"weight": cut, "bias": cut}, share, made, name)
        self.in_features, self.out_features = whole.in_features, whole.out_features // share.size
        self._region, self._given, self.is_proven = region, (whole.out_features, LayerCut(-1, num_stacked)), False

    def forward(self, inputs: Tensor) -> Tensor:
        """Return this rank's outputs."""
        if self.trial is not None:
            self.trial.check_inputs(self, inputs)
            return self.trial.stand_in_outputs(self, inputs.shape[:-1], *self._given)
        self.require_proven()
        if self._region is None:
            return functional.linear(enter(inputs, self.share), self.weight, self.bias)
        outputs = functional.linear(self._region.enter(inputs), self.weight, self.bias)
        if self.training:
            self._region.draw_alone(inputs.device)
        return outputs


class RowLinear(SplitLayer):
    """A linear layer with a part of its inputs on each rank: (..., in / ranks) to (..., out), the same on all."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, whole: nn.Linear, share: RankShare, made: Made, region: SplitRegion | None, name: str = ""
    ) -> None:
        super().__init__(whole, {"weight": LayerCut(1)}, share, made, name)
        self.in_features, self.out_features = whole.in_features // share.size, whole.out_features
        self._region, self.is_proven = region, False

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs; blocks until all ranks call it."""
        if self.trial is not None and self.trial.rank is None:
            self.trial.check_inputs(self, inputs)
            return self.trial.stand_in_outputs(self, inputs.shape[:-1], self.out_features)
        if inputs.shape[-1] != self.in_features:
            raise UsageError(
                f"layer '{self.name}' is split by rows: expected {self.in_features} features, this rank's part, got "
                f"{inputs.shape[-1]}. The layer before it has to be split by columns."
            )
        if self.trial is not None:
            self.trial.check_inputs(self, inputs, LayerCut(-1))
            return self.trial.stand_in_outputs(self, inputs.shape[:-1], self.out_features)
        self.require_proven()
        if self._region is not None:
            self._region.draw_together()
        outputs = leave(functional.linear(inputs, self.weight), self.share)
        return outputs if self.bias is None else outputs + self.bias  # once, not once a rank


class SplitAttention(SplitLayer):
    """Torch's `MultiheadAttention` with a part of the heads on each rank; called like it, with need_weights=False."""

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    kept = ("in_proj_weight", "in_proj_bias")

    def __init__(self, whole: nn.MultiheadAttention, share: RankShare, made: Made, name: str) -> None:
        thirds = LayerCut(0, num_stacked=3)
        super().__init__(whole, {"in_proj_weight": thirds, "in_proj_bias": thirds}, share, made, name)
        self.embed_dim, self.num_heads = whole.embed_dim, whole.num_heads // share.size
        self.batch_first, self.dropout = whole.batch_first, whole.dropout
        self._qkv_same_embed_dim = False  # makes torch's layers call this instead of their fused path
        self._region = SplitRegion(share)
        self.out_proj = RowLinear(whole.out_proj, share, made, self._region, f"{name}.out_proj")
        self.out_proj.is_proven = True  # only this layer is around it
        self._region.end_with(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Return what attention gives, in the shape of the query, and no weights; blocks until all ranks call it."""
        del average_attn_weights, is_causal  # the mask says it
        if need_weights or query.ndim != 3 or (attn_mask is not None and attn_mask.ndim != 2):
            raise UsageError(
                f"attention '{self.name}' is split: call it on batches, with need_weights=False, and with masks that "
                "are the same for all heads."
            )
        if self.trial is not None:
            for one in (query, key, value):
                self.trial.check_inputs(self, one)
            return self.trial.stand_in_outputs(self, query.shape[:-1], self.embed_dim), None
        q, k, v = self._heads(query, key, value)
        if self.training:
            self._region.draw_alone(query.device)
        mask = _combined(attn_mask, key_padding_mask, query.dtype)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.out_proj(mixed if self.batch_first else mixed.transpose(0, 1)), None

    def _heads(self, *inputs: Tensor) -> list[Tensor]:
        """Return query, key and value as (batch, heads, length, features of a head)."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        heads: list[Tensor] = []
        for tensor, weight, bias in zip(inputs, weights, biases, strict=True):
            projected = functional.linear(self._region.enter(tensor), weight, bias)
            batched = projected if self.batch_first else projected.transpose(0, 1)
            heads.append(batched.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        return heads


def _combined(mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what two masks add to the scores, (length, length) and (batch, length), for all heads."""
    if padding is None:
        return None if mask is None else _additive(mask, dtype)
    added = _additive(padding, dtype)[:, None, None, :]
    return added if mask is None else added + _additive(mask, dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the scores: torch's masks may also be boolean, True where attention is not allowed."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


_REFUSED: Final = ("max_norm", "scale_grad_by_freq", "sparse")


class SplitEmbedding(SplitLayer):
    """An embedding with the rows of a part of the words on each rank: ids (...) to (..., features), the same on all."""

    weight: Tensor
    kept = ("weight",)

    def __init__(self, whole: nn.Embedding, share: RankShare, made: Made, name: str) -> None:
        asked = [option for option in _REFUSED if getattr(whole, option)]
        if asked:
            raise UsageError(f"layer '{name}' cannot be split with {' and '.join(asked)}: build it without them.")
        super().__init__(whole, {"weight": LayerCut(0)}, share, made, name)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self._num_own = whole.num_embeddings // share.size
        self._first = self._num_own * share.rank
        padding = -1 if whole.padding_idx is None else whole.padding_idx - self._first
        self._padding = padding if 0 <= padding < self._num_own else None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these words; blocks until all ranks call it."""
        if bool(((ids < 0) | (ids >= self.num_embeddings)).any()):
            raise IndexError(f"layer '{self.name}' has rows 0 to {self.num_embeddings - 1}, got an id beyond them")
        if self.trial is not None:
            self.trial.check_inputs(self, ids)
            return self.trial.stand_in_outputs(self, ids.shape, self.embedding_dim)
        own = ids - self._first
        elsewhere = (own < 0) | (own >= self._num_own)
        rows = functional.embedding(own.masked_fill(elsewhere, 0), self.weight, self._padding)
        return leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.share)


class VocabularyLinear(SplitLayer):
    """The linear layer that scores words, each rank a part of them: (..., in) to (..., words).

    With gradients enabled the scores are a `DTensor`, sharded over the words; inside `split_loss`, `cross_entropy`
    computes the loss without gathering them. With gradients disabled they are gathered.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, whole: nn.Linear, share: RankShare, made: Made, name: str) -> None:
        super().__init__(whole, {"weight": LayerCut(0), "bias": LayerCut(0)}, share, made, name)
        self.in_features, self.out_features = whole.in_features, whole.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores."""
        if self.trial is not None:
            self.trial.check_inputs(self, inputs)
            return self.trial.stand_in_outputs(self, inputs.shape[:-1], self.out_features)
        scores = functional.linear(enter(inputs, self.share), self.weight, self.bias)
        if torch.is_grad_enabled():
            return DTensor.from_local(scores, self.share.mesh, [Shard(scores.ndim - 1)], run_check=False)
        return torch.cat(self.share.gather(scores), -1)


class _Different(Exception):
    """A value differs from that with whole layers."""


@dataclass(slots=True)
class EquivalenceTrial:
    """One run of a module with stand-ins for its split layers, to check that they compute what whole layers would.

    Names and shapes do not show what a forward does between two layers: a softmax over all features would see those of
    one rank only. So the module runs on its first inputs once with whole layers, and once for each rank with parts.
    Layers return the same random features in all runs, cut for a rank, so nothing is sent; dropout is disabled.

    Args:
        size: number of ranks.
        rank: rank whose part is computed; None for whole layers.
        seen: inputs of the layers in the run with whole layers.
    """

    size: int
    rank: int | None
    seen: list[Tensor] = field(default_factory=list[Tensor])
    called: set[SplitLayer] = field(default_factory=set[SplitLayer])
    _num_seen: int = 0

    def check_inputs(self, layer: SplitLayer, inputs: Tensor, cut: LayerCut | None = None) -> None:
        """Record the inputs of a whole layer, or compare those of a split one with them.

        Args:
            layer: the layer that is called.
            inputs: (...,) of the layer.
            cut: how inputs are divided among ranks; None where each rank has all of them.
        """
        self.called.add(layer)
        if self.rank is None:
            self.seen.append(inputs.detach().clone())
            return
        if self._num_seen == len(self.seen):
            raise _Different
        expected = self.seen[self._num_seen]
        self._num_seen += 1
        require_same(inputs, expected if cut is None else cut.part(expected, self.rank, self.size))

    def end(self) -> None:
        """Raise unless as many layers were called as in the run with whole layers."""
        if self._num_seen != len(self.seen):
            raise _Different

    def stand_in_outputs(
        self, layer: SplitLayer, shape: Sequence[int], width: int, cut: LayerCut | None = None
    ) -> Tensor:
        """Return stand-ins for the outputs of a layer, (*shape, width), cut for a rank."""
        parameter = next(layer.parameters())
        return self.stand_in((*shape, width), _dtype(parameter), parameter.device, cut)

    def stand_in(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, cut: LayerCut | None = None
    ) -> Tensor:
        """Return random numbers that grow with the feature, the same in every run; cut for a rank."""
        generator = torch.Generator().manual_seed(len(self.seen) if self.rank is None else self._num_seen)
        drawn = torch.rand(*shape, generator=generator) + torch.linspace(0.5, 3.0, shape[-1])
        drawn = drawn.to(dtype).to(device)
        return drawn if cut is None or self.rank is None else cut.part(drawn, self.rank, self.size)


class WholeCheck:
    """Checks a module at its first call, and again while some of its layers have not been called."""

    def __init__(self, unit: nn.Module, name: str, size: int, heads: Sequence[tuple[nn.Module, str]]) -> None:
        self._unit, self._name, self._size, self._heads = unit, name, size, heads
        self._running = False
        self._handle: RemovableHandle = unit.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._running or any(layer.trial is not None for layer in self._layers()):  # inside of another trial
            return
        self._running = True
        try:
            self._check(args, kwargs)
        finally:
            self._running = False
        if all(layer.is_proven for layer in self._layers()):
            self._handle.remove()

    def _layers(self) -> list[SplitLayer]:
        return [one for one in self._unit.modules() if isinstance(one, SplitLayer)]

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UsageError on every rank unless the outputs of all ranks equal those of whole layers."""
        whole = EquivalenceTrial(self._size, None)
        expected = self._run(whole, args, kwargs)
        for rank in range(self._size):
            part = EquivalenceTrial(self._size, rank, whole.seen)
            try:
                found = self._run(part, args, kwargs)
                part.end()
                require_same(found, expected)
            except UsageError:
                raise
            except Exception as error:  # whatever the script's forward raises on a part
                why = "" if isinstance(error, _Different) else f" It fails on a part: {type(error).__name__}: {error}."
                raise UsageError(self._told(why)) from error
        for layer in whole.called:
            layer.is_proven = True

    def _told(self, why: str) -> str:
        names = [name for name, one in self._unit.named_modules() if isinstance(one, SplitLayer)]
        return (
            f"'{self._name}', a {type(self._unit).__name__}, cannot be split by its layers {', '.join(names[:6])}: "
            "what stands between them needs the features of all ranks, as a softmax or a norm over them does, so "
            f"parts give something else than the whole.{why} Leave these layers out: name those to split in a "
            "tensor_plan."
        )

    def _run(self, trial: EquivalenceTrial, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Return the outputs of the module in a trial, which does not change it."""
        held = [*self._unit.parameters(), *self._unit.buffers()]
        devices = sorted({one.device.index or 0 for one in held if one.is_cuda})
        given = tree_map_only(Tensor, torch.clone, (args, kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices), self._standing_in(trial), _WithoutDropout():
            return self._unit.forward(*given[0], **given[1])

    @contextmanager
    def _standing_in(self, trial: EquivalenceTrial) -> Generator[None]:
        layers = self._layers()
        numbers = [*self._heads, *((one, "out_features") for one in layers if isinstance(one, ColumnLinear))]
        numbers += [(one, "in_features") for one in layers if isinstance(one, RowLinear)]
        own = [(owner, name, getattr(owner, name)) for owner, name in numbers]
        for layer in layers:
            layer.trial = trial
        for owner, name, number in own if trial.rank is None else ():
            setattr(owner, name, number * trial.size)
        try:
            with unchanged_buffers(self._unit):
                yield
        finally:
            for owner, name, number in own:
                setattr(owner, name, number)
            for layer in layers:
                layer.trial = None


class _WithoutDropout(TorchFunctionMode):
    """Disables dropout, which would drop other features of parts than of the whole."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever the function gives
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is functional.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is functional.scaled_dot_product_attention:
            named["dropout_p"] = 0.0
        return func(*args, **named)


def require_same(found: object, expected: object) -> None:
    """Raise unless two results have the same structure and, except for rounding, the same values."""
    leaves, spec = tree_flatten(found)
    others, other_spec = tree_flatten(expected)
    if spec != other_spec:
        raise _Different
    for one, other in zip(leaves, others, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            raise _Different
        close = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() or one.is_complex() else 0.0
        if not torch.allclose(one, other, rtol=close, atol=close, equal_nan=True):
            raise _Different


def _dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of the outputs of a linear layer with this weight, under autocast too."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
