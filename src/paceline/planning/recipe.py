"""What training holds for each parameter: by the precision of the numbers, and by the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

Precision = Literal["mixed", "fp32"]
OptimizerName = Literal["sgd", "momentum", "adagrad", "adam", "adamw"]

NUM_MOMENTS: Final[dict[OptimizerName, int]] = {"sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2}
_FULL: Final = 4  # bytes of a float32
_HALF: Final = 2  # of a float16 or bfloat16

assert set(NUM_MOMENTS) == set(get_args(OptimizerName))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How numbers are kept while a model is trained.

    "mixed" computes on half-precision weights and gradients, and the optimizer keeps a float32 master copy of the
    weights and its moments; "fp32" has float32 everywhere and no second copy.

    Example:
        >>> recipe = Recipe("mixed", "adam")
        >>> recipe.weight_bytes, recipe.gradient_bytes, recipe.optimizer_bytes, recipe.state_bytes
        (2, 2, 12, 16)
        >>> Recipe("fp32", "momentum").state_bytes
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
