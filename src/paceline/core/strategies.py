"""The ways to distribute training that can be chosen by their name."""

from typing import Final

from paceline.errors import UsageError

ALL_REDUCE: Final = "all-reduce"
PARAMETER_SERVER: Final = "parameter-server"
STRATEGIES: Final = (PARAMETER_SERVER, ALL_REDUCE)


def check_strategy(text: str) -> None:
    """Raise UsageError when the text names no strategy.

    >>> check_strategy("all-reduce")
    """
    if text not in STRATEGIES:
        raise UsageError(f"there is no strategy {text!r}; expected one of {', '.join(STRATEGIES)}")
