"""Model to plan for: a sequence of layers, each with its cost for one sample; well-known transformers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from paceline.errors import UsageError

Precision = Literal["mixed", "fp32"]
OptimizerName = Literal["sgd", "momentum", "adagrad", "adam", "adamw"]

NUM_MOMENTS: Final[dict[OptimizerName, int]] = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2}
_FULL: Final = 4  # bytes of a float32
_HALF: Final = 2  # of a float16 or bfloat16
_ID_BYTES: Final = 8  # of a token on its way in
_LOGIT_BYTES: Final = 4  # the loss is computed in float32 whatever the rest is

assert set(NUM_MOMENTS) == set(get_args(OptimizerName))


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """How numbers are kept while a model is trained.

    "mixed" computes on half-precision weights and gradients, and the optimizer keeps a float32 master copy of the
    weights and its moments; "fp32" has float32 everywhere and no second copy.

    Example:
        >>> recipe = TrainingRecipe("mixed", "adam")
        >>> recipe.weight_bytes, recipe.gradient_bytes, recipe.optimizer_bytes, recipe.state_bytes
        (2, 2, 12, 16)
        >>> TrainingRecipe("fp32", "momentum").state_bytes
        12
    """

    precision: Precision = "mixed"
    optimizer: OptimizerName = "adam"

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is computed on; also of a number among the activations."""
        return _HALF if self.precision == "mixed" else _FULL

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return self.weight_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of the weight that the optimizer keeps for itself, 0 where it updates the one that is computed on."""
        return _FULL if self.precision == "mixed" else 0

    @property
    def moment_bytes(self) -> int:
        """Bytes of a parameter's moments."""
        return _FULL * NUM_MOMENTS[self.optimizer]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer keeps for a parameter."""
        return self.master_bytes + self.moment_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a parameter in all."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """One layer, or a block of layers that stays together. Bytes and operations are those of one sample.

    Args:
        name: of the layer.
        num_parameters: all of them.
        flops: operations of the forward pass; a multiplication and its addition are two.
        split_parameters: how many of the parameters tensor parallelism splits.
        kept_bytes: activations kept for the backward pass that every rank of tensor parallelism holds whole.
        split_bytes: activations kept for the backward pass of which it holds its part.
        output_bytes: what goes on to the next layer, and has to be sent where a pipeline is cut behind it.
        working_bytes: what the backward pass needs for a moment, beside what was kept.
        largest_parameters: how many of the parameters are in its largest tensor.
        tied_parameters: those of another layer, which has them in `num_parameters`, that are used here too.
        buffer_bytes: of the layer itself, whatever the number of samples.
        num_all_reduces: how many of its output tensor parallelism needs in the forward pass, and again in the backward.
    """

    name: str
    num_parameters: float
    flops: float = 0.0
    split_parameters: float = 0.0
    kept_bytes: float = 0.0
    split_bytes: float = 0.0
    output_bytes: float = 0.0
    working_bytes: float = 0.0
    largest_parameters: float = 0.0
    buffer_bytes: float = 0.0
    num_all_reduces: int = 0
    tied_parameters: float = 0.0

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism does anything to it."""
        return self.split_parameters > 0 or self.split_bytes > 0

    def parameters_of(self, num_ranks: int) -> float:
        """Return how many parameters each rank of tensor parallelism holds."""
        return self.num_parameters - self.split_parameters + self.split_parameters / num_ranks

    def largest_of(self, num_ranks: int) -> float:
        """Return how many parameters each rank of tensor parallelism holds of the largest tensor."""
        return self.largest_parameters / num_ranks if self.is_split else self.largest_parameters

    def kept_by(self, num_ranks: int) -> float:
        """Return the bytes of activations that each rank of tensor parallelism keeps."""
        return self.kept_bytes + self.split_bytes / num_ranks

    def working_of(self, num_ranks: int) -> float:
        """Return the bytes that each rank of tensor parallelism needs for a moment."""
        return self.working_bytes / num_ranks if self.is_split else self.working_bytes

    def flops_of(self, num_ranks: int) -> float:
        """Return the operations of each rank of tensor parallelism in the forward pass."""
        return self.flops / num_ranks if self.is_split else self.flops


def _any(_: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a module can be cut into, by the rules of `paceline.parallelize`.

    Args:
        starts: the layers that a stage after the first may begin with; None where any may.
        no_row: why its layers cannot be called one after the other; empty where they can.
        no_split: says why layers cannot be split over so many ranks; nothing where they can.
    """

    starts: tuple[int, ...] | None = None
    no_row: str = ""
    no_split: Callable[[int], str] = field(default=_any, compare=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A row of layers in the order in which they run.

    `num_heads` is what tensor parallelism must divide, None where nothing is known of it. `input_bytes` is one
    sample's. `rules` are those of a module that is at hand; a model known by its shape has none.
    """

    name: str
    layers: tuple[PlannedLayer, ...]
    num_heads: int | None = None
    input_bytes: float = 0.0
    rules: Rules = Rules()

    @property
    def max_stages(self) -> int:
        """How many stages there can be."""
        return len(self.layers) if self.rules.starts is None else 1 + len(self.rules.starts)

    @property
    def num_parameters(self) -> float:
        """All parameters of all layers."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Operations of the forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def knows_activations(self) -> bool:
        """Whether it is known what the layers keep for the backward pass."""
        return any(layer.kept_bytes or layer.split_bytes for layer in self.layers)

    def untied(self) -> Model:
        """Return the model for a pipeline, whose stages cannot share parameters: each layer has all that it uses."""
        layers = [
            replace(
                layer,
                num_parameters=layer.num_parameters + layer.tied_parameters,
                split_parameters=layer.split_parameters + layer.tied_parameters,
                largest_parameters=max(layer.largest_parameters, layer.tied_parameters),
                tied_parameters=0.0,
            )
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))

    def scaled_to(self, num_parameters: float) -> Model:
        """Return the same layers with this many parameters in all, each with its share of them.

        A published count and what follows from a shape differ by some percent (GPT-2: 1.5 and 1.56 billion).
        """
        factor = num_parameters / self.num_parameters
        layers = [
            replace(
                layer,
                num_parameters=layer.num_parameters * factor,
                split_parameters=layer.split_parameters * factor,
                largest_parameters=layer.largest_parameters * factor,
                tied_parameters=layer.tied_parameters * factor,
            )
            for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))


def plain_model(name: str, num_parameters: float, num_layers: int, num_tokens: int) -> Model:
    """Return a model of which only numbers are known: equal layers, 2 operations a parameter and token.

    Raises:
        UsageError: there is no layer or no token.
    """
    if num_layers < 1 or num_tokens < 1:
        raise UsageError(f"--layers is {num_layers} and --sequence is {num_tokens}, expected 1 or more.")
    each = num_parameters / num_layers
    layers = [PlannedLayer(f"layer {index}", each, flops=2 * each * num_tokens) for index in range(num_layers)]
    return Model(name, tuple(layers))


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
