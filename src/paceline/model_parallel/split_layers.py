"""Layers of which each rank of a group holds a part: linear by columns or rows, and attention by heads.

Their parameters are plain ones that hold this rank's part, so whatever steps, sends or saves parameters works on them.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from paceline.errors import UsageError
from paceline.model_parallel.split import LayerCut, RankShare, SplitRegion, enter, leave

if TYPE_CHECKING:
    from paceline.model_parallel.trial import EquivalenceTrial

Made = dict[nn.Parameter, nn.Parameter]  # a whole parameter, and this rank's part of it


class SplitLayer(nn.Module, ABC):
    """A layer of which this rank has a part.

    Attributes:
        cuts: how each parameter is divided, by name; the others are whole and the same on all ranks.
        name: that it has in the model.
        trial: the run in which it stands in for the whole layer; None in earnest.
        is_proven: what stands around it gives what it gives around the whole layer.
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
            if parameter is not None and cut is not None and parameter not in made:  # who shared it shares its part
                part = cut.part(parameter.detach(), share.rank, share.size)
                made[parameter] = nn.Parameter(part, parameter.requires_grad)
            self.register_parameter(name, None if parameter is None else made.get(parameter, parameter))
        self.train(whole.training)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as torch has it
        """Return a parameter; in a trial one that stands in for it, whole or this rank's part."""
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
        """Raise UsageError where nothing has tried out what stands around this layer."""
        if not self.is_proven:
            raise UsageError(
                f"layer '{self.name}' is split together with others, but was called without the module around: call "
                "that module, not its .forward or a layer of it, or leave the layer out of tensor_plan."
            )


class ColumnLinear(SplitLayer):
    """A linear layer with a part of its outputs on each rank: (..., in) to (..., out / ranks).

    Args:
        num_stacked: layers that lie one after the other in its outputs, query, key and value for example.
        region: which this layer opens, together with others of the same inputs; None where it is by itself.
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
        """Return the outputs; blocks until all ranks have come."""
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
        self._qkv_same_embed_dim = False  # tells layers of torch to call this, not to compute in its stead
        self._region = SplitRegion(share)
        self.out_proj = RowLinear(whole.out_proj, share, made, self._region, f"{name}.out_proj")
        self.out_proj.is_proven = True  # nothing but this layer stands around it
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
        """Return what attention gives, in the shape of the query, and no weights; blocks until all ranks have come."""
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
    """Return a mask as what is added to the scores: torch's masks may also say True for what is left out."""
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
            raise UsageError(f"layer '{name}' cannot be split with {' and '.join(asked)}: build it without.")
        super().__init__(whole, {"weight": LayerCut(0)}, share, made, name)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self._num_own = whole.num_embeddings // share.size
        self._first = self._num_own * share.rank
        padding = -1 if whole.padding_idx is None else whole.padding_idx - self._first
        self._padding = padding if 0 <= padding < self._num_own else None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these words; blocks until all ranks have come."""
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

    While gradients are on the scores are a `DTensor`, sharded over the words, of which `cross_entropy` takes the loss
    without gathering them, inside of `split_loss`. While they are off, they are gathered.
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
