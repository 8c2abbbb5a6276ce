"""A small GPT over the characters of a text, in layers that a pipeline can cut and tensor ranks can split."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model is: characters it knows, and reads at once; its width, blocks, and heads of attention."""

    num_characters: int
    length: int
    width: int
    num_blocks: int
    num_heads: int


class GPT(nn.Module):
    """Predicts the next character: (batch, length) numbers of characters to (batch, length, num_characters) scores."""

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "*.qkv": "column:3",
        "*.out": "row",
        "*.widen": "column",
        "*.narrow": "row",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_blocks))
        self.head = nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.num_characters))

    def layers(self) -> list[nn.Module]:
        """Return the layers whose composition is the forward."""
        return [self.embedding, *self.blocks, self.head]

    def forward(self, characters: Tensor) -> Tensor:
        """Return the scores of each next character."""
        passed = characters
        for layer in self.layers():
            passed = layer(passed)
        return passed


class Embedding(nn.Module):
    """A row for each character, and one for each place: (batch, length) to (batch, length, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(shape.num_characters, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)

    def forward(self, characters: Tensor) -> Tensor:
        """Return what each character is in its place."""
        places = torch.arange(characters.shape[1], device=characters.device)
        return self.characters(characters) + self.places(places)


class Block(nn.Module):
    """Attention to what came before, then a perceptron, each added to what comes in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.before_perceptron = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (batch, length, width), as it came in and changed a little."""
        attended = inputs + self.attention(self.before_attention(inputs))
        return attended + self.narrow(functional.gelu(self.widen(self.before_perceptron(attended))))


class Attention(nn.Module):
    """Every place looks at itself and those before it. A rank that has some of the heads computes those."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (batch, length, width), each place a mixture of those up to it."""
        query, key, value = (  # each (batch, heads, length, head_width)
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in self.qkv(inputs).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the characters that came: (batch, length, num_characters), (batch, length)."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
