"""Update rules, shards of dense tables, row tables and their filters: everything that servers compute.

`paceline.update` offers the update rules that scripts name; see `named_rules`.

Example:
    >>> import paceline
    >>> paceline.update.Adam(lr=0.001).name
    'torch.optim.Adam'
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.update.named_rules import (
        FTRL,
        SGD,
        Adagrad,
        Adam,
        AdamW,
        AdaptiveRevision,
        Add,
        DelayedNesterov,
        Merging,
        Proximal,
        RowwiseAdagrad,
        RuleSpec,
        UpdateRule,
        from_optimizer,
        granularity,
        resolve,
        rule,
        torch_optim,
    )

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveRevision",
    "Add",
    "DelayedNesterov",
    "Merging",
    "Proximal",
    "RowwiseAdagrad",
    "RuleSpec",
    "UpdateRule",
    "from_optimizer",
    "granularity",
    "resolve",
    "rule",
    "torch_optim",
]


def __getattr__(name: str) -> object:
    """Import a rule when it is first named: rules need torch, the plain data beside them does not."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline.update' has no attribute {name!r}")
    return getattr(import_module("paceline.update.named_rules"), name)


def __dir__() -> list[str]:
    """Return the names of the rules."""
    return sorted(__all__)
