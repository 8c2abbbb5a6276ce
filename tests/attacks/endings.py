"""Rules and functions of a user's own that try to end the process in which they run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch import Tensor


class Boom(Exception):
    """An exception of the user's own kind."""


class OnCall:
    """A dense rule that ends in its update."""

    granularity = "element"

    def update(self, values: Sequence[Tensor], gradients: object, hyper: Sequence[dict], groups: object) -> None:
        if hyper[0]["how"] == 0:
            sys.exit(3)
        raise KeyboardInterrupt if hyper[0]["how"] == 1 else Boom

    def state(self) -> Mapping[str, Tensor]:
        sys.exit(3)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        sys.exit(3)


class OnMaking(OnCall):
    """A rule that ends as it is made."""

    def __init__(self) -> None:
        sys.exit(3)


class OnLooking(OnCall):
    """A rule that ends as it is looked at."""

    @property
    def granularity(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        sys.exit(3)


class OnRows:
    """A rule for rows that ends in its update."""

    columns = ()
    echo = ""

    def update(self, values: Tensor, gradient: Tensor, state: object, hyper: Mapping[str, int], echo: object) -> None:
        if hyper["how"] == 0:
            sys.exit(3)
        raise KeyboardInterrupt if hyper["how"] == 1 else Boom


def function(*_: object) -> None:
    """End, as a table function."""
    raise KeyboardInterrupt
