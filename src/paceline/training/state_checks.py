"""Checks of the `state_dict` of an optimizer, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.core.calls import shown
from paceline.errors import UsageError
from paceline.update.hyper_checks import hyper_problem
from paceline.update.table import TableSpec
from paceline.update.torch_rule import (
    PREFIX,
    is_class_of_torch,
    optimizer_class,
    pushed_hyper,
    require_count,
    state_shapes,
)


def require_form(state_dict: object) -> None:
    """Raise UsageError unless this has the form of what `state_dict()` of an optimizer returns.

    >>> require_form({"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]})
    >>> require_form({"state": {}, "param_groups": [{"lr": 0.1}]})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    paceline.errors.UsageError: a group in the state_dict of an optimizer is {'lr': 0.1}, expected a dict ...
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(f"the state_dict of an optimizer is {shown(state_dict)}, expected what state_dict() returned.")
    known = cast("Mapping[str, object]", state_dict)
    if not {"state", "param_groups"} <= known.keys():
        raise UsageError(f"a state_dict of an optimizer has 'state' and 'param_groups', this has {sorted(known)}.")
    groups, state = known["param_groups"], known["state"]
    if not isinstance(groups, list | tuple):
        raise UsageError(
            f"'param_groups' in the state_dict of an optimizer is {shown(groups)}, expected a list of dicts: give it "
            "as state_dict() returned it."
        )
    for group in cast("Sequence[object]", groups):
        if not _is_group(group):
            raise UsageError(
                f"a group in the state_dict of an optimizer is {shown(group)}, expected a dict with 'params', a list "
                "of numbers or names: give it as state_dict() returned it."
            )
    if not isinstance(state, Mapping):
        raise UsageError(
            f"'state' in the state_dict of an optimizer is {shown(state)}, expected a dict by parameter: give it as "
            "state_dict() returned it."
        )
    for key, values in cast("Mapping[object, object]", state).items():
        if not isinstance(values, Mapping):
            raise UsageError(
                f"the state of parameter {shown(key)} in the state_dict of an optimizer is {shown(values)}, expected a "
                "dict: give it as state_dict() returned it."
            )


def _is_group(group: object) -> bool:
    params = cast("Mapping[str, object]", group).get("params") if isinstance(group, Mapping) else None
    return isinstance(params, list | tuple) and all(
        isinstance(one, int | str) for one in cast("Sequence[object]", params)
    )


def require_states(
    kind: type[torch.optim.Optimizer],
    parameters: Sequence[tuple[str, Tensor]],
    state: Mapping[int, Mapping[str, object]],
) -> None:
    """Raise UsageError unless states have the names and shapes of those that a class of torch.optim keeps.

    Torch looks at neither when it loads them, and fails in the next step, or computes with other shapes. Of other
    classes it is not known what they keep.

    Args:
        kind: the class.
        parameters: all that it steps, each with its name, in the order in which torch numbers them.
        state: by number of the parameter, then by name.
    """
    for number, (name, parameter) in enumerate(parameters):
        given = {key: value for key, value in state.get(number, {}).items() if value is not None}
        for key, value in given.items():
            _require_dense(f"the state '{key}' of parameter '{name}'", value, parameter)
        if given and is_class_of_torch(kind):
            _require_kept(kind, name, parameter, given)


def _require_dense(what: str, value: object, parameter: Tensor) -> None:
    """Refuse what is neither a number nor a tensor that has values in main memory or on a device."""
    if isinstance(value, int | float):
        return
    is_dense = isinstance(value, Tensor) and not (
        value.layout != torch.strided or value.is_nested or value.is_quantized or value.device.type == "meta"
    )
    if not is_dense or (cast("Tensor", value).is_complex() and not parameter.is_complex()):
        raise UsageError(f"{what} is {shown(value)}, expected a dense tensor of real numbers.")


def _require_kept(kind: type[torch.optim.Optimizer], name: str, parameter: Tensor, given: Mapping[str, object]) -> None:
    """Refuse states that this class does not keep, or not in such a shape, and too few of them."""
    least, most = (state_shapes(kind, tuple(parameter.shape), more=more) for more in (False, True))
    lacking, unknown = sorted(least.keys() - given.keys()), sorted(given.keys() - most.keys())
    if lacking or unknown:
        problem = f"has {unknown}" if unknown else f"lacks {lacking}"
        raise UsageError(
            f"the state of parameter '{name}' {problem}, and {kind.__name__} keeps {sorted(most)}: it is of another "
            "optimizer."
        )
    for key, value in given.items():
        if not isinstance(value, Tensor):
            continue
        if tuple(value.shape) != most[key]:
            raise UsageError(
                f"the state '{key}' of parameter '{name}' has shape {tuple(value.shape)}, expected {most[key]}: it is "
                "of another model."
            )
        require_count(key, value)


def require_hyper(spec: TableSpec, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError if servers would refuse the pushes to a table with the hyperparameters of these groups."""
    pushed = pushed_hyper(groups, spec.rule)
    for number, (given, known) in enumerate(zip(pushed, spec.rule.groups, strict=True)):
        problem = hyper_problem(spec, given, known)
        if problem:
            raise UsageError(f"table '{spec.name}', hyperparameters of group {number} in a state_dict: {problem}.")


def require_numbers(
    kind: type[torch.optim.Optimizer], defaults: Mapping[str, object], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise UsageError if groups lack numbers without which a class of torch.optim cannot step.

    Torch fills in what it has added to its classes since, which is on or off, or None by default.
    """
    needed = {key for key, value in defaults.items() if value is not None and not isinstance(value, bool)}
    for number, group in enumerate(groups if is_class_of_torch(kind) else ()):
        lacking = sorted(needed - group.keys())
        if lacking:
            raise UsageError(
                f"group {number} in a state_dict lacks {lacking}, which {kind.__name__} needs: it is of another "
                "optimizer."
            )


def class_of(spec: TableSpec) -> type[torch.optim.Optimizer] | None:
    """Return the class of torch.optim that updates a table; None for another rule."""
    return optimizer_class(spec.rule.name) if spec.rule.name.startswith(PREFIX) else None
