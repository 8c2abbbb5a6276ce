"""What scripts give to `paceline.distributed`, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from paceline.core.consistency import Consistency
from paceline.errors import UsageError
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
    if not isinstance(model, nn.Module | None):
        raise UsageError(f"{here}: model is {brief(model)}, expected the torch.nn.Module that is trained, or None.")
    policies: Iterable[object] = strategy.values() if isinstance(strategy, Mapping) else (strategy,)
    for policy in policies:
        is_made = not isinstance(policy, type) and callable(getattr(policy, "distribute", None))
        if not (is_made or isinstance(policy, str | None)):
            raise UsageError(
                f"{here}: strategy is {brief(policy)}, expected a name such as 'ssp:3', what paceline.all_reduce() or "
                "paceline.local_sgd(8) returns, or one of these for each pattern of names."
            )
    if not isinstance(consistency, Consistency | str | None):
        raise UsageError(
            f"{here}: consistency is {brief(consistency)}, expected 'ssp:3' or paceline.ssp(3), for example."
        )
    if isinstance(fetch_every, bool) or not isinstance(fetch_every, int | None):
        raise UsageError(f"{here}: fetch_every is {brief(fetch_every)}, expected 1 or more steps, or None.")
    _check_parameters(optimizer, here)


def _check_parameters(optimizer: torch.optim.Optimizer, here: str) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "meta":
                raise UsageError(
                    f"{here}: a parameter of shape {tuple(parameter.shape)} is on device meta and has no values: "
                    "materialise the model first, model.to_empty(device='cpu') and its first values."
                )
            if parameter.layout != torch.strided:
                raise UsageError(f"{here}: a parameter of shape {tuple(parameter.shape)} is sparse: make it dense.")
