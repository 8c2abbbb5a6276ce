"""Update rules: the specification that travels (a name and numbers), and the interface of the rule on a server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Number: TypeAlias = float | int | bool | None
Hyper: TypeAlias = dict[str, Number | tuple[Number, ...]]
Granularity: TypeAlias = Literal["element", "tensor"]


class Quorum(msgspec.Struct, frozen=True):
    """When pushes that a server keeps become one update.

    Args:
        num_pushes: the least number of pushes.
        grace_s: how long to wait for more pushes after that.
        num_workers: once this many workers have pushed, the wait ends.
    """

    num_pushes: int
    grace_s: float
    num_workers: int


_SHOWN: Final = 100  # characters of hyperparameters in a message


class RuleSpec(msgspec.Struct, frozen=True):
    """An update rule as data: never code, so a server runs only what it already has.

    Args:
        name: "add", "torch.optim.<class>", or "package.module:Rule" for a rule of your own.
        groups: the hyperparameters of each parameter group; at least one group.
        quorum: keep pushes until they are merged into one update; None makes an update whenever the consistency does.
    """

    name: str
    groups: tuple[Hyper, ...]
    quorum: Quorum | None = None

    def __repr__(self) -> str:
        text = ", ".join(f"{name}={value!r}" for name, value in (self.groups[0] if self.groups else {}).items())
        more = f", {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return f"RuleSpec({self.name[:60]}, {text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}{more})"


def require_finite(spec: RuleSpec) -> None:
    """Raise UsageError for a hyperparameter that is NaN or infinite."""
    for key, value in (item for group in spec.groups for item in group.items()):
        each = value if isinstance(value, tuple) else (value,)
        if any(isinstance(one, float) and not math.isfinite(one) for one in each):
            raise UsageError(f"The update rule {spec.name}: {key} is {value}, expected a finite number.")


@runtime_checkable
class UpdateRule(Protocol):
    """Turns gradients into new values; lives on one server and owns the optimizer state of one shard.

    A class given as "package.module:Rule" is built without arguments and must have these four members.
    """

    @property
    def granularity(self) -> Granularity:
        """Return "element" when a tensor may be cut anywhere, "tensor" when the rule needs it whole."""
        ...

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        hyper: Sequence[Hyper],
        groups: Sequence[int],
    ) -> None:
        """Change `values` in place; called without autograd.

        Args:
            values: the pieces of the shard, the same views of the same memory at every call.
            gradients: one a piece, of its shape and dtype. Never write to them: they may be a worker's memory. None
                means absent, and then the piece and its state stay untouched; zeros are a gradient like any other.
            hyper: the hyperparameters of each group, as of this update.
            groups: the group of each piece, an index into `hyper`.
        """
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Return the live state, each name "<index of the piece>.<name of the state>"; empty before any update.

        A state with the shape of its piece belongs to the elements; one of shape `()` to the piece as a whole.
        """
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of what `state` returned earlier, before the first update or between two."""
        ...
