"""Which strategy a script or a launcher means."""

from __future__ import annotations

from paceline.core.strategies import ALL_REDUCE, PARAMETER_SERVER, check_strategy
from paceline.training.all_reduce import AllReduce
from paceline.training.optimizer import ParameterServer
from paceline.training.strategy import Strategy


def choose_strategy(given: Strategy | str | None, launched: str | None) -> Strategy:
    """Return the strategy that the script gives, else the one the launcher was told, else the parameter server.

    Raises:
        UsageError: there is none of this name.

    Example:
        >>> choose_strategy(None, "all-reduce")
        AllReduce(unused=False, bucket_mb=25.0)
    """
    wanted = given or launched or PARAMETER_SERVER
    if not isinstance(wanted, str):
        return wanted
    check_strategy(wanted)
    return AllReduce() if wanted == ALL_REDUCE else ParameterServer()
