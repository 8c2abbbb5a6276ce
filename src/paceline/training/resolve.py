"""Choice of the training strategy from what a script or a launcher names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from paceline.errors import UsageError
from paceline.job.strategy import PARAMETER_SERVER, Distribution
from paceline.training.all_reduce import AllReduce
from paceline.training.downpour import Downpour
from paceline.training.fsdp import FullySharded
from paceline.training.groups import Groups
from paceline.training.local_sgd import diloco, local_sgd
from paceline.training.optimizer import ParameterServer
from paceline.training.strategy import Strategy

Policy: TypeAlias = Strategy | str


def choose_strategy(given: Policy | Mapping[str, Policy] | None, launched: Distribution) -> Strategy:
    """Return the strategy of the script, else that of the launcher, else the parameter server.

    Args:
        given: a strategy or its name, or a mapping of patterns of parameter names to these.
        launched: the choice of the launcher.

    Raises:
        UsageError: the name is not a strategy.

    Example:
        >>> choose_strategy(None, Distribution.parse("all-reduce"))
        AllReduce(unused=False, bucket_mb=25.0)
    """
    if isinstance(given, Mapping):
        return Groups(tuple((pattern, choose_strategy(policy, launched)) for pattern, policy in given.items()))
    if given is not None and not isinstance(given, str):
        return given
    wanted = launched if given is None else Distribution.parse(given)
    match wanted.data or PARAMETER_SERVER:
        case "parameter-server":
            return ParameterServer(wanted.consistency)
        case "all-reduce":
            return AllReduce()
        case "fsdp":
            return FullySharded()
        case "local-sgd":
            return local_sgd(wanted.steps)
        case "diloco":
            return diloco(wanted.steps)
        case "downpour":
            return Downpour(push_every=wanted.steps, fetch_every=wanted.steps)
        case name:
            raise UsageError(f"there is no strategy {name!r} for an optimizer")
