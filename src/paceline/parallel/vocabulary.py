"""A vocabulary that is split: each rank has the embeddings, and computes the scores, of a part of the words."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from paceline.errors import UsageError
from paceline.parallel.split import Cut, Share, enter, leave
from paceline.parallel.split_layers import Made, SplitLayer

_REFUSED: Final = ("max_norm", "scale_grad_by_freq", "sparse")


class SplitEmbedding(SplitLayer):
    """An embedding with the rows of a part of the words on each rank: ids (...) to (..., features), the same on all."""

    weight: Tensor
    kept = ("weight",)

    def __init__(self, whole: nn.Embedding, share: Share, made: Made, name: str) -> None:
        asked = [option for option in _REFUSED if getattr(whole, option)]
        if asked:
            raise UsageError(f"layer '{name}' cannot be split with {' and '.join(asked)}: build it without.")
        super().__init__(whole, {"weight": Cut(0)}, share, made, name)
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
            self.trial.take(self, ids)
            return self.trial.give_for(self, ids.shape, self.embedding_dim)
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

    def __init__(self, whole: nn.Linear, share: Share, made: Made, name: str) -> None:
        super().__init__(whole, {"weight": Cut(0), "bias": Cut(0)}, share, made, name)
        self.in_features, self.out_features = whole.in_features, whole.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores."""
        if self.trial is not None:
            self.trial.take(self, inputs)
            return self.trial.give_for(self, inputs.shape[:-1], self.out_features)
        scores = functional.linear(enter(inputs, self.share), self.weight, self.bias)
        if torch.is_grad_enabled():
            return DTensor.from_local(scores, self.share.mesh, [Shard(scores.ndim - 1)], run_check=False)
        return torch.cat(self.share.gather(scores), -1)
