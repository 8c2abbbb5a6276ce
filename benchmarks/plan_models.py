"""Three models of which different things are large: parameters, both, and activations.

Each returns its loss, so that the whole of a step is in the module. `paceline plan` takes them from this file:

    paceline plan benchmarks/plan_models.py:transformer --input 128:ids --batch 4
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

NUM_CLASSES: Final = 16
VOCABULARY: Final = 4096
LENGTH: Final = 128


class Perceptron(nn.Module):
    """Five wide layers: (n, 2048) float32 -> loss."""

    def __init__(self, width: int = 2048, depth: int = 4) -> None:
        super().__init__()
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, NUM_CLASSES))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the mean square of the outputs."""
        return self.layers(numbers).square().mean()


class Convolution(nn.Module):
    """Six convolutions over whole pictures: (n, 3, 64, 64) float32 -> loss."""

    def __init__(self, channels: int = 64, depth: int = 6) -> None:
        super().__init__()
        sizes = [3] + [channels] * depth
        layers = [
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise(sizes)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, NUM_CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the mean square of the outputs."""
        return self.head(self.layers(pictures).mean((2, 3))).square().mean()


class Block(nn.Module):
    """Attention and a perceptron, each around a norm: (n, LENGTH, width) -> the same."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.together = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        """Add to the values what attention and perceptron find."""
        count, length, width = values.shape
        asked = self.attention(self.norms[0](values)).view(count, length, 3, self.num_heads, -1)
        found = scaled_dot_product_attention(*asked.permute(2, 0, 3, 1, 4), is_causal=True)
        values = values + self.together(found.transpose(1, 2).reshape(count, length, width))
        return values + self.perceptron(self.norms[1](values))


class Transformer(nn.Module):
    """Three blocks over tokens that predict the token itself: (n, LENGTH) int64 -> loss."""

    def __init__(self, width: int = 512, depth: int = 3, num_heads: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of the tokens."""
        values = self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            values = block(values)
        return cross_entropy(self.head(self.norm(values)).flatten(0, 1), tokens.flatten())


@dataclass(frozen=True, slots=True)
class Work:
    """A model with its input: how it is made, one sample as `paceline plan --input` takes it, and how many."""

    make: Callable[[], nn.Module]
    sample: str
    batch: int


WORK: Final = {
    "perceptron": Work(Perceptron, "2048", 256),
    "transformer": Work(Transformer, f"{LENGTH}:ids", 4),
    "convolution": Work(Convolution, "3,64,64", 8),
}
# The same operations on next to nothing: what a process takes for itself, and for the libraries that they need.
TINY: Final = {
    "perceptron": Work(partial(Perceptron, width=16), "16", 1),
    "transformer": Work(partial(Transformer, width=16), f"{LENGTH}:ids", 1),
    "convolution": Work(partial(Convolution, channels=4), "3,64,64", 1),
}


def perceptron() -> nn.Module:
    """Five layers of 17 million parameters, and small activations."""
    return Perceptron()


def transformer() -> nn.Module:
    """14 million parameters, and activations of about their size."""
    return Transformer()


def convolution() -> nn.Module:
    """0.2 million parameters, and all the rest activations."""
    return Convolution()
