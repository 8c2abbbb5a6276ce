"""The rules that rows can have, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

import torch

from paceline.errors import UsageError
from paceline.tensors.own_rule import build_own, missing_members, own_code
from paceline.tensors.rows.adaptive import AdagradRows, AdamRows, RowwiseAdagradRows
from paceline.tensors.rows.descent import AddRows, ProximalRows, SGDRows
from paceline.tensors.rows.ftrl import FTRLRows
from paceline.tensors.rows.revision import AdaptiveRevisionRows
from paceline.tensors.rows.rule import Numbers, RowRule, StateColumn
from paceline.tensors.torch_rule import PREFIX, check_groups

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.tensors.rules import RuleSpec

__all__ = ["RowRule", "StateColumn", "row_rule"]

_MEMBERS = ("columns", "echo", "update")


@dataclass(frozen=True, slots=True)
class _Known:
    """How a rule is built from its hyperparameters, and which of them it cannot do without."""

    build: Callable[[Numbers], RowRule]
    numbers: str


_ADAM = "lr betas eps weight_decay amsgrad maximize"
_KNOWN: dict[str, _Known] = {
    "add": _Known(AddRows, ""),
    "torch.optim.SGD": _Known(SGDRows, "lr momentum dampening nesterov weight_decay maximize"),
    "torch.optim.Adagrad": _Known(AdagradRows, "lr lr_decay weight_decay initial_accumulator_value eps maximize"),
    "torch.optim.Adam": _Known(partial(AdamRows, decoupled=False), _ADAM),
    "torch.optim.AdamW": _Known(partial(AdamRows, decoupled=True), _ADAM),
    "rowwise_adagrad": _Known(RowwiseAdagradRows, "lr initial_accumulator_value eps"),
    "ftrl": _Known(FTRLRows, "alpha beta l1 l2"),
    "adaptive_revision": _Known(AdaptiveRevisionRows, "lr initial_accumulator_value"),
    "proximal": _Known(ProximalRows, "lr l1"),
}


def row_rule(spec: RuleSpec, allowed: AbstractSet[str] | None) -> RowRule:
    """Return the rule for rows that `spec` names; it has no memory, so one object can serve many tables.

    Args:
        spec: what a worker asked for.
        allowed: the import paths that may be loaded; None allows all, which is for code that you wrote yourself.

    Raises:
        UsageError: there is no such rule for rows, it may not be loaded, or it is not a row rule.

    Example:
        >>> from paceline.tensors.update import RowwiseAdagrad
        >>> row_rule(RowwiseAdagrad(lr=0.1), allowed=None).columns
        (StateColumn(name='sum', width=1, fill=0.0),)
    """
    hyper = spec.groups[0]
    known = _KNOWN.get(spec.name)
    if known is None:
        with own_code(f"The update rule {spec.name}"):
            return _InFullPrecision(_own(spec.name, allowed))
    lacking = [name for name in known.numbers.split() if hyper.get(name) is None]
    if lacking:
        raise UsageError(f"The update rule {spec.name} lacks {', '.join(lacking)}. Take it from paceline.update.")
    if spec.name.startswith(PREFIX):
        check_groups(spec)
    else:
        unknown = sorted(hyper.keys() - set(known.numbers.split()))[:3]
        if unknown:
            raise UsageError(f"The update rule {spec.name} has no {unknown}, expected {known.numbers or 'none'}.")
    return _InFullPrecision(known.build(hyper))


def _own(path: str, allowed: AbstractSet[str] | None) -> RowRule:
    if ":" not in path:
        raise UsageError(
            f"There is no form of {path} for rows. Row tables have {', '.join(_KNOWN)}, "
            "and row rules of your own by their import path: 'package.module:Rule'."
        )
    made = build_own(path, allowed)
    if not isinstance(made, RowRule):
        missing = missing_members(made, _MEMBERS)
        raise UsageError(
            f"{path} is not a rule for rows: it has no {missing}. See paceline.tensors.rows.rules.RowRule."
        )
    names = [column.name for column in made.columns]
    if len(set(names)) < len(names):
        raise UsageError(f"{path} has two columns of one name: {', '.join(names)}.")
    if made.echo and made.echo not in names:
        raise UsageError(f"{path} echoes '{made.echo}', which is none of its columns: {', '.join(names) or 'none'}.")
    return made


@final
class _InFullPrecision:
    """Lets a rule compute in float32 where rows have 16 bits: squares and eps vanish in those."""

    def __init__(self, rule: RowRule) -> None:
        self._rule = rule
        self.columns = rule.columns
        self.echo = rule.echo

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Change values and state in place, rounding once."""
        with own_code("The update rule"):
            self._update(values, gradient, state, hyper, echo)

    def _update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        if values.dtype.itemsize >= torch.float32.itemsize:
            self._rule.update(values, gradient, state, hyper, echo)
            return
        wide, wide_state = values.float(), {name: column.float() for name, column in state.items()}
        self._rule.update(wide, gradient.float(), wide_state, hyper, None if echo is None else echo.float())
        values.copy_(wide)
        for name, column in state.items():
            column.copy_(wide_state[name])
