"""Arguments of `paceline.distributed`: checks of their types, and the choice of the strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.job.strategy import PARAMETER_SERVER, Distribution
from paceline.training.all_reduce import AllReduce
from paceline.training.downpour import Downpour
from paceline.training.fsdp import FullySharded
from paceline.training.groups import Groups
from paceline.training.local_sgd import diloco, local_sgd
from paceline.training.parameter_server import ParameterServer
from paceline.training.strategy import Distributed, Strategy
from paceline.worker.validation import brief


def check_distributed(
    optimizer: object, model: object, strategy: object, consistency: object, fetch_every: object, name: object
) -> None:
    """Raise UsageError for the first argument that is of a wrong type, or a parameter that holds no values."""
    if not isinstance(name, str | None):
        raise UsageError(f"distributed: name is {brief(name)}, expected a text that is unique in the job.")
    here = f"distributed: '{(name or 'model')[:60]}'"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{here}: the optimizer is {brief(optimizer)}, expected one that was made, "
            "torch.optim.SGD(model.parameters(), lr=0.1) for example."
        )
    if isinstance(optimizer, Distributed):
        raise UsageError(
            f"{here}: the optimizer is {optimizer}, which paceline.distributed has returned. Go on with it, or give "
            "the call one of torch.optim; in a notebook, make that in the same cell."
        )
    if not isinstance(model, nn.Module | None):
        raise UsageError(f"{here}: model is {brief(model)}, expected the torch.nn.Module that is trained, or None.")
    for pattern in strategy if isinstance(strategy, Mapping) else ():
        if not isinstance(pattern, str):
            raise UsageError(
                f"{here}: strategy has the key {brief(pattern)}, expected a pattern of names of parameters."
            )
    strategies: Iterable[object] = strategy.values() if isinstance(strategy, Mapping) else (strategy,)
    for each in strategies:
        is_made = not isinstance(each, type) and callable(getattr(each, "distribute", None))
        if not (is_made or isinstance(each, str | None)):
            raise UsageError(
                f"{here}: strategy is {brief(each)}, expected a name such as 'ssp:3', what a function of "
                "paceline.strategies returns (all_reduce(), local_sgd(8)), or one of these for each pattern of names."
            )
    if not isinstance(consistency, Consistency | str | None):
        raise UsageError(
            f"{here}: consistency is {brief(consistency)}, expected 'ssp:3' or paceline.ssp(3), for example."
        )
    if isinstance(fetch_every, bool) or not isinstance(fetch_every, int | None):
        raise UsageError(f"{here}: fetch_every is {brief(fetch_every)}, expected 1 or more steps, or None.")
    _check_parameters(optimizer, here)
    _check_model(optimizer, model, here)


def _check_parameters(optimizer: torch.optim.Optimizer, here: str) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_lazy(parameter):
                raise UsageError(
                    f"{here}: a parameter of a lazy layer has no shape yet: run the model once on a batch, then make "
                    "the optimizer."
                )
            if parameter.device.type == "meta":
                raise UsageError(
                    f"{here}: a parameter of shape {tuple(parameter.shape)} is on device meta and has no values: "
                    "materialise the model first, model.to_empty(device='cpu') and its first values."
                )
            if parameter.layout != torch.strided:
                raise UsageError(f"{here}: a parameter of shape {tuple(parameter.shape)} is sparse: make it dense.")


def _check_model(optimizer: torch.optim.Optimizer, model: nn.Module | None, here: str) -> None:
    """Refuse another model than that of the optimizer: it would give the names, and the buffers that are averaged."""
    known = set(model.parameters()) if model is not None else set[nn.Parameter]()
    if known and not any(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"{here}: none of the optimizer's parameters is in model: give the model whose parameters it steps (a copy "
            "has others)."
        )


StrategyLike: TypeAlias = Strategy | str


def takes_consistency(strategy: Strategy) -> bool:
    """Return whether servers hold the parameters under a strategy, in the consistency that the job or a call names."""
    if isinstance(strategy, FullySharded) and strategy.workers is not None:
        return strategy.between in (None, ParameterServer())
    return strategy == ParameterServer()


def divided_by_dtype(strategy: Strategy, optimizer: torch.optim.Optimizer) -> Strategy:
    """Return a strategy for all parameters of an optimizer: where they have several dtypes, by groups of one each."""
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if len(dtypes) == 1 or isinstance(strategy, Groups | FullySharded):
        return strategy
    return Groups((("*", strategy),))


def choose_strategy(given: StrategyLike | Mapping[str, StrategyLike] | None, launched: Distribution) -> Strategy:
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
        return Groups(tuple((pattern, choose_strategy(each, launched)) for pattern, each in given.items()))
    if given is not None and not isinstance(given, str):
        return given
    wanted = launched if given is None else Distribution.parse(given)
    if wanted.shards > 1:
        between = None if wanted.data is None else choose_strategy(None, replace(wanted, shards=1))
        return FullySharded(wanted.shards, between)
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
