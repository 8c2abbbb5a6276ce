"""Which strategy a script or a launcher means."""

from __future__ import annotations

from paceline.core.strategies import PARAMETER_SERVER, Distribution
from paceline.errors import UsageError
from paceline.training.all_reduce import AllReduce
from paceline.training.optimizer import ParameterServer
from paceline.training.strategy import Strategy


def choose_strategy(given: Strategy | str | None, launched: Distribution) -> Strategy:
    """Return the strategy that the script gives, else the one the launcher was told, else the parameter server.

    Raises:
        UsageError: there is none of this name.

    Example:
        >>> choose_strategy(None, Distribution.parse("all-reduce"))
        AllReduce(unused=False, bucket_mb=25.0)
    """
    if given is not None and not isinstance(given, str):
        return given
    wanted = launched if given is None else Distribution.parse(given)
    match wanted.data or PARAMETER_SERVER:
        case "parameter-server":
            return ParameterServer(wanted.consistency)
        case "all-reduce":
            return AllReduce()
        case name:
            raise UsageError(f"there is no strategy {name!r} for an optimizer")
