"""Well-known transformer models, by their published size and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from paceline.errors import UsageError
from paceline.tools.plan.model import Model, PlannedLayer

_ID_BYTES: Final = 8  # of a token on its way in
_LOGIT_BYTES: Final = 4  # the loss is computed in float32 whatever the rest is


@dataclass(frozen=True, slots=True)
class Transformer:
    """The shape of a transformer with blocks of attention and a perceptron of four times the width.

    Args:
        num_layers: blocks.
        hidden: the width.
        num_heads: of attention, which share the width.
        vocabulary: rows of the embedding, which the last layer uses again.
        sequence: tokens of a sample.
        keeps_scores: whether attention keeps its matrix of scores; a fused kernel computes it anew.

    Raises:
        UsageError: a number is not positive, or the heads do not divide the width.

    Example:
        >>> round(Transformer(48, 1600, 25, 50257, 1024).model("gpt-2", number_bytes=2).num_parameters / 1e9, 2)
        1.56
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int
    sequence: int
    keeps_scores: bool = True

    def __post_init__(self) -> None:
        """Refuse shapes that no transformer has."""
        named = {"--layers": self.num_layers, "--hidden": self.hidden, "--heads": self.num_heads}
        named |= {"--vocabulary": self.vocabulary, "--sequence": self.sequence}
        for name, number in named.items():
            if number < 1:
                raise UsageError(f"{name} is {number}, expected 1 or more.")
        if self.hidden % self.num_heads:
            raise UsageError(
                f"--heads {self.num_heads} does not divide --hidden {self.hidden}; each head has the same share of it."
            )

    def without_scores(self) -> Transformer:
        """Return the same with a fused kernel of attention."""
        return replace(self, keeps_scores=False)

    def model(self, name: str, number_bytes: int) -> Model:
        """Return the layers: embedding, blocks, head. `number_bytes` is the size of an activation, 2 or 4."""
        blocks = [self._block(f"block {index}", number_bytes) for index in range(self.num_layers)]
        layers = (self._embedding(number_bytes), *blocks, self._head(number_bytes))
        return Model(name, layers, num_heads=self.num_heads, input_bytes=_ID_BYTES * self.sequence)

    def _embedding(self, number_bytes: int) -> PlannedLayer:
        """Return the words, which ranks can split, with the places, which they cannot."""
        words, output = self.vocabulary * self.hidden, self.sequence * self.hidden
        return PlannedLayer(
            "embedding",
            words + output,
            split_parameters=words,
            largest_parameters=words,
            kept_bytes=_ID_BYTES * self.sequence + output,  # the ids, and a byte a number for dropout's mask
            output_bytes=number_bytes * output,
            num_all_reduces=1,  # one forward here, and one backward for the head that uses the same matrix
        )

    def _block(self, name: str, number_bytes: int) -> PlannedLayer:
        """Return a block of attention and perceptron.

        In half precision it keeps s·h·(34 + 5·a·s/h) bytes, and a rank of t of them s·h·(10 + 24/t + 5·a·s/(h·t)).
        """
        length, width = self.sequence, self.hidden
        numbers = length * width
        scores = self.num_heads * length**2 if self.keeps_scores else 0
        split = 4 * width**2 + 3 * width + 8 * width**2 + 4 * width  # of 12 h² + 13 h in all
        return PlannedLayer(
            name,
            12 * width**2 + 13 * width,
            flops=24 * length * width**2 + 4 * length**2 * width,
            split_parameters=split,
            largest_parameters=4 * width**2,
            # Whole: the inputs of two norms, of attention and of the perceptron, and the masks of two dropouts.
            kept_bytes=(4 * number_bytes + 2) * numbers,
            # Split: queries, keys, values, what attention gives, and the perceptron's inside twice.
            split_bytes=12 * number_bytes * numbers + (2 * number_bytes + 1) * scores,
            output_bytes=number_bytes * numbers,
            working_bytes=2 * number_bytes * max(4 * numbers, scores),
            num_all_reduces=2,
        )

    def _head(self, number_bytes: int) -> PlannedLayer:
        """Return the last norm, and the loss over the vocabulary; its matrix is the embedding's, where that is here."""
        numbers, logits = self.sequence * self.hidden, self.sequence * self.vocabulary
        return PlannedLayer(
            "head",
            2 * self.hidden,
            flops=2 * self.sequence * self.hidden * self.vocabulary,
            split_parameters=0,
            kept_bytes=2 * number_bytes * numbers,
            split_bytes=_LOGIT_BYTES * logits,
            output_bytes=_LOGIT_BYTES,
            working_bytes=_LOGIT_BYTES * logits,
            tied_parameters=self.vocabulary * self.hidden,
        )


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model by name: how it is written, the published number of its parameters, and its shape."""

    title: str
    num_parameters: float
    shape: Transformer


KNOWN_MODELS: Final[Mapping[str, KnownModel]] = {
    "bert-large": KnownModel("BERT-Large", 0.32e9, Transformer(24, 1024, 16, 30522, 512)),
    "gpt-2": KnownModel("GPT-2", 1.5e9, Transformer(48, 1600, 25, 50257, 1024)),
    "turing-nlg": KnownModel("Turing-NLG", 17.2e9, Transformer(78, 4256, 28, 50257, 1024)),
    "gpt-3": KnownModel("GPT-3", 175e9, Transformer(96, 12288, 96, 50257, 2048)),
}
COMPARED_DEVICES: Final = ("v100-16", "v100-32", "a100-40", "a100-80")
