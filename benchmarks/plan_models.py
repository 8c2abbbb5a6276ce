"""Three models of which different things are large: parameters, both, and activations.

Each is a row of layers, so that every strategy can distribute it. `paceline plan` takes them with their loss:

    paceline plan benchmarks/plan_models.py:transformer --input 128:ids --batch 4
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

NUM_CLASSES: Final = 16
VOCABULARY: Final = 4096
LENGTH: Final = 128


class Row(nn.Sequential):
    """Layers one after the other, and what their outputs are worth."""

    def layers(self) -> list[nn.Module]:
        """Return the layers whose composition is the forward."""
        return list(self)

    def loss(self, outputs: Tensor, _given: Tensor) -> Tensor:
        """Return the mean square of the outputs."""
        return outputs.square().mean()


class Pair(nn.Module):
    """Two wide layers: (n, width) float32 -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return what both make of the numbers."""
        return self.narrow(self.widen(numbers).relu()).relu()


class Perceptron(Row):
    """Five wide layers: (n, 2048) float32 -> (n, NUM_CLASSES)."""

    tensor_plan: ClassVar[Mapping[str, str]] = {"*.widen": "column", "*.narrow": "row"}

    def __init__(self, width: int = 2048, num_pairs: int = 2) -> None:
        super().__init__(*(Pair(width) for _ in range(num_pairs)), nn.Linear(width, NUM_CLASSES))


class Means(nn.Module):
    """The mean of each channel, then classes: (n, channels, height, width) -> (n, NUM_CLASSES)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.classes = nn.Linear(channels, NUM_CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return scores of the classes."""
        return self.classes(pictures.mean((2, 3)))


class Convolution(Row):
    """Six convolutions over whole pictures: (n, 3, 64, 64) float32 -> (n, NUM_CLASSES)."""

    def __init__(self, channels: int = 64, depth: int = 6) -> None:
        layers = [
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise([3] + [channels] * depth)
        ]
        super().__init__(*layers, Means(channels))


class Tokens(nn.Module):
    """Words and their places: (n, LENGTH) int64 -> (n, LENGTH, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.words(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))


class Block(nn.Module):
    """Attention and a perceptron, each around a norm: (n, LENGTH, width) -> the same."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.together = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """Add to the values what attention and perceptron find."""
        count, length, _ = values.shape
        asked = self.attention(self.norms[0](values)).view(count, length, 3, -1, self.head_width)
        found = scaled_dot_product_attention(*asked.permute(2, 0, 3, 1, 4), is_causal=True)
        values = values + self.together(found.transpose(1, 2).reshape(count, length, -1))
        return values + self.narrow(nn.functional.gelu(self.widen(self.norms[1](values))))


class Transformer(Row):
    """Three blocks over tokens that predict the token itself: (n, LENGTH) int64 -> (n, LENGTH, VOCABULARY)."""

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "*.attention": "column:3",
        "*.together": "row",
        "*.widen": "column",
        "*.narrow": "row",
    }

    def __init__(self, width: int = 512, depth: int = 3, num_heads: int = 8) -> None:
        blocks = (Block(width, num_heads) for _ in range(depth))
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
        super().__init__(Tokens(width), *blocks, head)

    def loss(self, outputs: Tensor, given: Tensor) -> Tensor:
        """Return the mean loss of the tokens."""
        return cross_entropy(outputs.flatten(0, 1), given.flatten())


class WithLoss(nn.Module):
    """A model and its loss, so that the whole of a step is in the module."""

    def __init__(self, model: Row) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Tensor) -> Tensor:
        """Return the loss."""
        return self.model.loss(self.model(given), given)


@dataclass(frozen=True, slots=True)
class Work:
    """A model with its input: how it is made, one sample as `paceline plan --input` takes it, and how many."""

    make: Callable[[], Row]
    sample: str
    batch: int


WORK: Final = {
    "perceptron": Work(Perceptron, "2048", 256),
    "transformer": Work(Transformer, f"{LENGTH}:ids", 4),
    "convolution": Work(Convolution, "3,64,64", 32),
}
# The same operations on next to nothing: what a process takes for itself, and for the libraries that they need.
TINY: Final = {
    "perceptron": Work(partial(Perceptron, width=16), "16", 4),
    "transformer": Work(partial(Transformer, width=16), f"{LENGTH}:ids", 4),
    "convolution": Work(partial(Convolution, channels=4), "3,64,64", 4),
}


def perceptron() -> nn.Module:
    """Five layers of 17 million parameters, and small activations."""
    return WithLoss(Perceptron())


def transformer() -> nn.Module:
    """14 million parameters, and activations of about their size."""
    return WithLoss(Transformer())


def convolution() -> nn.Module:
    """0.2 million parameters, and all the rest activations."""
    return WithLoss(Convolution())
