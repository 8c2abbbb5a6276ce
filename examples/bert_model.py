"""BERT with a classifier on top, in layers that a pipeline can cut and tensor ranks can split."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model is.

    Attributes:
        num_pieces: rows of the vocabulary.
        num_places: pieces of the longest sentence.
        inner: width of the perceptrons.
        num_kinds: of sentences; of one sentence alone the first is used.
        padding: the number of the piece that is none.
    """

    num_pieces: int
    num_classes: int
    num_places: int
    width: int
    num_blocks: int
    num_heads: int
    inner: int
    num_kinds: int = 2
    padding: int = 0


class Bert(nn.Module):
    """Classifies sentences: (batch, length) numbers of pieces to (batch, num_classes) scores.

    What goes from layer to layer is one tensor, (batch, length, width + 1): the last feature of a place is 1 where a
    piece stands, and 0 where there is padding, which is not attended to.
    """

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "*.query": "column",
        "*.key": "column",
        "*.value": "column",
        "*.out": "row",
        "*.widen": "column",
        "*.narrow": "row",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.classifier = Classifier(shape)
        self.apply(_start)

    def layers(self) -> list[nn.Module]:
        """Return the layers whose composition is the forward."""
        return [self.embedding, *self.blocks, self.classifier]

    def forward(self, pieces: Tensor) -> Tensor:
        """Return the scores of each class."""
        passed = pieces
        for layer in self.layers():
            passed = layer(passed)
        return passed


class Embedding(nn.Module):
    """A row for each piece, its place and its kind of sentence, added up and normalized."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.padding = shape.padding
        self.pieces = nn.Embedding(shape.num_pieces, shape.width)
        self.places = nn.Embedding(shape.num_places, shape.width)
        self.kinds = nn.Embedding(shape.num_kinds, shape.width)
        self.norm = nn.LayerNorm(shape.width, NORM_EPSILON)

    def forward(self, pieces: Tensor) -> Tensor:
        """Return (batch, length, width + 1)."""
        places = torch.arange(pieces.shape[1], device=pieces.device)
        added = self.pieces(pieces) + self.places(places) + self.kinds.weight[0]
        return pack(self.norm(added), pieces != self.padding)


class Block(nn.Module):
    """Attention to the whole sentence, then a perceptron, each added to what comes in and normalized."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.attention_norm = nn.LayerNorm(shape.width, NORM_EPSILON)
        self.widen = nn.Linear(shape.width, shape.inner)
        self.narrow = nn.Linear(shape.inner, shape.width)
        self.perceptron_norm = nn.LayerNorm(shape.width, NORM_EPSILON)

    def forward(self, packed: Tensor) -> Tensor:
        """Return (batch, length, width + 1)."""
        inputs, is_piece = unpack(packed)
        mixed = functional.scaled_dot_product_attention(
            *(self._heads(layer(inputs)) for layer in (self.query, self.key, self.value)),
            attn_mask=is_piece[:, None, None, :],
        )
        attended = self.attention_norm(inputs + self.out(mixed.transpose(1, 2).flatten(2)))
        inner = functional.gelu(self.widen(attended))
        return pack(self.perceptron_norm(attended + self.narrow(inner)), is_piece)

    def _heads(self, projected: Tensor) -> Tensor:
        """Return (batch, heads, length, head_width): all heads, or those that this rank has."""
        return projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Classifier(nn.Module):
    """Scores of the classes, from the first place of a sentence."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.pooler = nn.Linear(shape.width, shape.width)
        self.scores = nn.Linear(shape.width, shape.num_classes)

    def forward(self, packed: Tensor) -> Tensor:
        """Return (batch, num_classes)."""
        inputs, _ = unpack(packed)
        return self.scores(torch.tanh(self.pooler(inputs[:, 0])))


def pack(features: Tensor, is_piece: Tensor) -> Tensor:
    """Put what layers need into one tensor: (batch, length, width) and (batch, length) bool."""
    return torch.cat([features, is_piece.unsqueeze(-1).to(features.dtype)], dim=-1)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Take it apart again."""
    return packed[..., :-1], packed[..., -1] > 0


def _start(module: nn.Module) -> None:
    """Give a layer the first values that BERT has: narrow normal ones, and no bias."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
