"""What servers compute: update rules, shards of tables, the summing of gradients.

`paceline.update` offers update rules by name. Each function returns plain data; servers run the rule that it names.

Example:
    >>> import paceline
    >>> paceline.update.SGD(lr=0.1, momentum=0.9).name
    'torch.optim.SGD'
    >>> paceline.update.torch_optim("NAdam", lr=2e-3).name
    'torch.optim.NAdam'
    >>> paceline.update.rule("my_package.rules:Lion", lr=1e-4).name
    'my_package.rules:Lion'
    >>> paceline.update.FTRL(alpha=0.1, l1=1.0).name  # row tables only, as are RowwiseAdagrad and a few more
    'ftrl'

Other folders use `clipping`, `cuts`, `dtypes`, `factors`, `filters`, `filters.check`, `filters.encoding`,
`filters.key_cache`, `filters.pipeline`, `filters.traffic`, `functions`, `hyper_checks`, `kernels`, `lasting`,
`named_rules`, `placement`, `rates`, `rows.changes`, `rows.column`, `rows.contribution`, `rows.cuts`, `rows.export`,
`rows.index`, `rows.initializers`, `rows.layout`, `rows.ops`, `rows.pending`, `rows.read_ahead`, `rows.rules`,
`rows.spec`, `rows.store`, `rows.torch_ops`, `rows.walk`, `rules`, `shard`, `summing`, `table`, `torch_rule`,
`user_code`.
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
        granularity,
        resolve,
        rule,
    )
    from paceline.update.rules import RuleSpec, UpdateRule
    from paceline.update.torch_rule import from_optimizer, torch_optim

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
    home = "torch_rule" if name == "from_optimizer" else "named_rules"
    return getattr(import_module(f"paceline.update.{home}"), name)


def __dir__() -> list[str]:
    """Return the names of the rules."""
    return sorted(__all__)
