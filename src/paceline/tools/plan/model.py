"""Model to plan for: a sequence of layers, each with its cost for one sample; well-known transformers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import msgspec
from msgspec.structs import replace

from paceline.errors import UsageError

Precision = Literal["mixed", "fp32"]
OptimizerName = Literal["sgd", "momentum", "adagrad", "adam", "adamw"]

NUM_MOMENTS: Final[dict[OptimizerName, int]] = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2}
_FULL: Final = 4  # bytes of a float32
_HALF: Final = 2  # of a float16 or bfloat16
_ID_BYTES: Final = 8  # of an input token
_LOGIT_BYTES: Final = 4  # the loss is always computed in float32
_MOST_LAYERS: Final = 2_000  # as stages are cut by looking at all pairs of layers

assert set(NUM_MOMENTS) == set(get_args(OptimizerName))


class TrainingRecipe(msgspec.Struct, frozen=True):
    """Precision and optimizer of training.

    "mixed" has half-precision weights and gradients, and the optimizer keeps a float32 master copy of the weights and
    its moments. "fp32" has float32 everywhere and no master copy.

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
        """Bytes of a weight in the computation, and of a number of the activations."""
        return _HALF if self.precision == "mixed" else _FULL

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return self.weight_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight; 0 if the optimizer updates the weights of the computation."""
        return _FULL if self.precision == "mixed" else 0

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments of a parameter."""
        return _FULL * NUM_MOMENTS[self.optimizer]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of a parameter in the optimizer."""
        return self.master_bytes + self.moment_bytes

    @property
    def state_bytes(self) -> int:
        """All bytes of a parameter."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


class PlannedLayer(msgspec.Struct, frozen=True):
    """One layer, or a block of layers that is not cut. Bytes and operations are those of one sample.

    Args:
        name: of the layer.
        num_parameters: number of parameters.
        flops: operations of the forward pass; a multiplication with its addition counts as two.
        input_flops: those of them on the model's input, of which the backward pass computes no gradient.
        split_parameters: number of parameters that tensor parallelism splits.
        kept_bytes: activations kept for the backward pass, whole on every rank of tensor parallelism.
        split_bytes: activations kept for the backward pass, split over the ranks of tensor parallelism.
        output_bytes: output, which is sent where a pipeline is cut behind the layer.
        working_bytes: temporary memory of the backward pass, beside kept activations.
        largest_parameters: number of parameters in the largest tensor.
        tied_parameters: number of parameters that this layer shares with another, whose `num_parameters` counts them.
        buffer_bytes: buffers of the layer, for any number of samples.
        num_all_reduces: all-reduces of the output under tensor parallelism, in forward and again in backward.
    """

    name: str
    num_parameters: float
    flops: float = 0.0
    input_flops: float = 0.0
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
        """Whether tensor parallelism splits it."""
        return self.split_parameters > 0 or self.split_bytes > 0

    def parameters_of(self, num_ranks: int) -> float:
        """Return the number of parameters on each rank of tensor parallelism."""
        return self.num_parameters - self.split_parameters + self.split_parameters / num_ranks

    def largest_of(self, num_ranks: int) -> float:
        """Return the number of parameters of the largest tensor on each rank of tensor parallelism."""
        return self.largest_parameters / num_ranks if self.is_split else self.largest_parameters

    def kept_by(self, num_ranks: int) -> float:
        """Return the bytes of kept activations on each rank of tensor parallelism."""
        return self.kept_bytes + self.split_bytes / num_ranks

    def working_of(self, num_ranks: int) -> float:
        """Return the temporary bytes on each rank of tensor parallelism."""
        return self.working_bytes / num_ranks if self.is_split else self.working_bytes

    def flops_of(self, num_ranks: int) -> float:
        """Return the operations of the forward pass on each rank of tensor parallelism."""
        return self.flops / num_ranks if self.is_split else self.flops

    def step_flops(self, num_passes: int, num_ranks: int = 1) -> float:
        """Return the operations of a whole step on each rank of tensor parallelism; backward counts as two passes."""
        whole = num_passes * self.flops - self.input_flops
        return whole / num_ranks if self.is_split else whole


def _any(_: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a module can be cut, by the rules of `paceline.parallelize`.

    Args:
        starts: layers that a stage after the first may begin with; None for all.
        no_row: why its layers do not form a sequence; empty if they do.
        no_split: returns why layers cannot be split over a number of ranks; empty if they can.
    """

    starts: tuple[int, ...] | None = None
    no_row: str = ""
    no_split: Callable[[int], str] = field(default=_any, compare=False)


class Model(msgspec.Struct, frozen=True):
    """A sequence of layers, in the order in which they run.

    The ranks of tensor parallelism must divide `num_heads`; None if unknown. `input_bytes` is of one sample. `rules`
    are those of a module; a model that is known by its shape has none.
    """

    name: str
    layers: tuple[PlannedLayer, ...]
    num_heads: int | None = None
    input_bytes: float = 0.0
    rules: Rules = Rules()

    @property
    def max_stages(self) -> int:
        """Largest number of stages."""
        return len(self.layers) if self.rules.starts is None else 1 + len(self.rules.starts)

    @property
    def num_parameters(self) -> float:
        """Number of parameters of all layers."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Operations of the forward pass of one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def knows_activations(self) -> bool:
        """Whether the kept activations are known."""
        return any(layer.kept_bytes or layer.split_bytes for layer in self.layers)

    def untied(self) -> Model:
        """Return the model for a pipeline: each layer has all its parameters, as stages cannot share them."""
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
        """Return the same layers, scaled to a total number of parameters.

        Published numbers differ from those of a shape by some percent (GPT-2: 1.5 and 1.56 billion).
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


def _check_depth(num_layers: int) -> None:
    """Raise UsageError for more layers than are planned one by one in a moment."""
    if num_layers > _MOST_LAYERS:
        raise UsageError(f"--layers is {num_layers}, expected at most {_MOST_LAYERS}.")


def plain_model(name: str, num_parameters: float, num_layers: int, num_tokens: int) -> Model:
    """Return a model of equal layers, with 2 operations for each parameter and token.

    Raises:
        UsageError: no layer or no token.
    """
    if num_layers < 1 or num_tokens < 1:
        raise UsageError(f"--layers is {num_layers} and --sequence is {num_tokens}, expected 1 or more.")
    _check_depth(num_layers)
    each = num_parameters / num_layers
    layers = [PlannedLayer(f"layer {index}", each, flops=2 * each * num_tokens) for index in range(num_layers)]
    return Model(name, tuple(layers))


class Transformer(msgspec.Struct, frozen=True):
    """Shape of a transformer whose blocks are attention and a perceptron of four times the width.

    Args:
        num_layers: number of blocks.
        hidden: width.
        num_heads: number of attention heads, which divide the width.
        vocabulary: rows of the embedding, which the last layer shares.
        sequence: tokens of a sample.
        keeps_scores: whether attention keeps its matrix of scores; fused kernels compute it again.

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
        """Validate the shape."""
        named = {"--layers": self.num_layers, "--hidden": self.hidden, "--heads": self.num_heads}
        named |= {"--vocabulary": self.vocabulary, "--sequence": self.sequence}
        for name, number in named.items():
            if number < 1:
                raise UsageError(f"{name} is {number}, expected 1 or more.")
        _check_depth(self.num_layers)
        if self.hidden % self.num_heads:
            raise UsageError(
                f"--heads {self.num_heads} does not divide --hidden {self.hidden}; each head has the same share of it."
            )

    def without_scores(self) -> Transformer:
        """Return the same shape with fused attention."""
        return replace(self, keeps_scores=False)

    def model(self, name: str, number_bytes: int) -> Model:
        """Return the layers: embedding, blocks, head. `number_bytes` is the size of an activation, 2 or 4."""
        blocks = [self._block(f"block {index}", number_bytes) for index in range(self.num_layers)]
        layers = (self._embedding(number_bytes), *blocks, self._head(number_bytes))
        return Model(name, layers, num_heads=self.num_heads, input_bytes=_ID_BYTES * self.sequence)

    def _embedding(self, number_bytes: int) -> PlannedLayer:
        """Return the embedding of words, which can be split, and of positions, which cannot."""
        words, output = self.vocabulary * self.hidden, self.sequence * self.hidden
        return PlannedLayer(
            "embedding",
            words + output,
            split_parameters=words,
            largest_parameters=words,
            kept_bytes=_ID_BYTES * self.sequence + output,  # the ids, and dropout's mask of a byte for each number
            output_bytes=number_bytes * output,
            num_all_reduces=1,  # one forward here, and one backward for the head that shares the matrix
        )

    def _block(self, name: str, number_bytes: int) -> PlannedLayer:
        """Return a block of attention and perceptron.

        In half precision it keeps s·h·(34 + 5·a·s/h) bytes, and each of t ranks s·h·(10 + 24/t + 5·a·s/(h·t)).
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
            # Split: queries, keys, values, the output of attention, and the perceptron's inside twice.
            split_bytes=12 * number_bytes * numbers + (2 * number_bytes + 1) * scores,
            output_bytes=number_bytes * numbers,
            working_bytes=2 * number_bytes * max(4 * numbers, scores),
            num_all_reduces=2,
        )

    def _head(self, number_bytes: int) -> PlannedLayer:
        """Return the last norm and the loss over the vocabulary; the matrix is that of the embedding."""
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


class Recurrent(msgspec.Struct, frozen=True):
    """Shape of a recurrent network, of which only the number of parameters is estimated."""

    num_layers: int
    hidden: int
    sequence: int


class KnownModel(msgspec.Struct, frozen=True):
    """A well-known model: its title, its published number of parameters, and its shape.

    Example:
        >>> round(KNOWN_MODELS["gpt-3"].flops_per_token / KNOWN_MODELS["bert-base"].flops_per_token)
        1523
    """

    title: str
    num_parameters: float
    shape: Transformer | Recurrent

    def model(self, number_bytes: int, *, fused_attention: bool = False) -> Model:
        """Return its layers, with the published number of parameters; an activation takes `number_bytes`."""
        if isinstance(self.shape, Recurrent):
            return plain_model(self.title, self.num_parameters, self.shape.num_layers, self.shape.sequence)
        shape = self.shape.without_scores() if fused_attention else self.shape
        return shape.model(self.title, number_bytes).scaled_to(self.num_parameters)

    @property
    def flops_per_token(self) -> float:
        """Operations of the forward pass for one token of its longest sample."""
        return self.model(2).flops / self.shape.sequence


KNOWN_MODELS: Final[Mapping[str, KnownModel]] = {
    "elmo": KnownModel("ELMo", 93.6e6, Recurrent(2, 4096, 512)),
    "gpt": KnownModel("GPT", 117e6, Transformer(12, 768, 12, 40478, 512)),
    "bert-tiny": KnownModel("BERT-Tiny", 4.4e6, Transformer(2, 128, 2, 30522, 512)),
    "bert-base": KnownModel("BERT-Base", 0.11e9, Transformer(12, 768, 12, 30522, 512)),
    "bert-large": KnownModel("BERT-Large", 0.32e9, Transformer(24, 1024, 16, 30522, 512)),
    "gpt-2": KnownModel("GPT-2", 1.5e9, Transformer(48, 1600, 25, 50257, 1024)),
    "megatron-lm": KnownModel("Megatron-LM", 8.3e9, Transformer(72, 3072, 32, 50257, 1024)),
    "turing-nlg": KnownModel("Turing-NLG", 17.2e9, Transformer(78, 4256, 28, 50257, 1024)),
    "gpt-3": KnownModel("GPT-3", 175e9, Transformer(96, 12288, 96, 50257, 2048)),
}
REFERENCE_MODEL: Final = "bert-base"  # whose computation others are compared with
COMPARED_DEVICES: Final = ("v100-16", "v100-32", "a100-40", "a100-80")
