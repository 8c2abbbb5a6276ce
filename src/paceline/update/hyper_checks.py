"""Checks of hyperparameters against those of a table's declaration: of every push, and of a state to be loaded."""

from __future__ import annotations

from math import isfinite
from typing import Final

from paceline.update.named_rules import numbers_problem, runs_in_torch
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper, Number
from paceline.update.table import TableSpec
from paceline.update.torch_rule import SWITCHES, lacks_state

_MOST: Final = 1 << 63  # of a whole number, for torch


def pushed_problem(spec: TableSpec | RowTableSpec, hyper: tuple[Hyper, ...]) -> str:
    """Return why updates of a table cannot be made with what a push brings for its groups, "" if they can."""
    groups = spec.rule.groups
    if hyper and len(hyper) != len(groups):
        return f"it carries hyperparameters of {len(hyper)} groups, '{spec.name}' has {len(groups)}"
    for number, (given, known) in enumerate(zip(hyper, groups, strict=False)):
        problem = hyper_problem(spec, given, known)
        if problem:
            return f"hyperparameters of group {number}: {problem}"
    return ""


def hyper_problem(spec: TableSpec | RowTableSpec, given: Hyper, known: Hyper) -> str:
    """Return why updates of a table cannot be made with the hyperparameters of one group, "" if they can.

    Args:
        spec: of the table.
        given: the hyperparameters.
        known: those of the group by now.
    """
    return numbers_objection(spec.rule.name, given, known) or _state_problem(spec, given, known)


def _state_problem(spec: TableSpec | RowTableSpec, given: Hyper, known: Hyper) -> str:
    """Return which hyperparameters need a state that the table was not declared with, "" if none does.

    Dense tables make it when it is first needed, but for torch's own steps.
    """
    if isinstance(spec, TableSpec) and (not runs_in_torch(spec.rule) or spec.rule.name == "torch.optim.SGD"):
        return ""
    lacking = lacks_state(given, known)
    return f"{', '.join(lacking)} was off when '{spec.name}' was declared, which has no state for it" if lacking else ""


def numbers_objection(rule: str, given: Hyper, known: Hyper) -> str:
    """Return what is wrong with the hyperparameters of one group, "" if they are valid.

    >>> numbers_objection("torch.optim.Adam", {"lr": 0.2, "betas": (0.9, 0.99)}, {"lr": 0.1, "betas": (0.9, 0.999)})
    ''
    >>> numbers_objection("torch.optim.Adam", {"lr": float("nan")}, {"lr": 0.1, "eps": 1e-8})
    "missing ['eps'], not a number ['lr']"
    >>> numbers_objection("torch.optim.Adam", {"lr": 0.1, "fused": True}, {"lr": 0.1, "fused": None})
    "other than declared ['fused']"
    """
    if given == known and all(type(given[key]) is type(known[key]) for key in known):
        return ""
    problems = {
        "missing": known.keys() - given.keys(),
        "unknown": given.keys() - known.keys(),
        "other than declared": {key for key in SWITCHES if key in given and given[key] != known.get(key)},
        "not a number": {key for key, value in given.items() if not _is_like(value, known.get(key, value))},
    }
    told = ", ".join(f"{what} {[key[:50] for key in sorted(keys)[:9]]}" for what, keys in problems.items() if keys)
    return told or numbers_problem(rule, given)


def _is_like(given: Number | tuple[Number, ...], known: Number | tuple[Number, ...]) -> bool:
    """Return whether a value has the kind of the declared one: tuples alike, finite numbers, None only for None."""
    if isinstance(given, tuple) and isinstance(known, tuple):
        return len(given) == len(known) and all(_is_like(*pair) for pair in zip(given, known, strict=True))
    if isinstance(given, tuple) or isinstance(known, tuple):
        return False
    if given is None:
        return known is None
    return isfinite(given) and abs(given) < _MOST
