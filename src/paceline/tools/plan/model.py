"""Model to plan for: a sequence of layers, each with its cost for one sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from paceline.errors import UsageError

Precision = Literal["mixed", "fp32"]
OptimizerName = Literal["sgd", "momentum", "adagrad", "adam", "adamw"]

NUM_MOMENTS: Final[dict[OptimizerName, int]] = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2}
_FULL: Final = 4  # bytes of a float32
_HALF: Final = 2  # of a float16 or bfloat16

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
