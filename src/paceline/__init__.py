"""Paceline: the parameter server for PyTorch.

Every public name is here; modules that need torch are imported at first use.
"""

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from paceline.collective.torch_backend import register as _register_backend
from paceline.version import __version__ as __version__

if TYPE_CHECKING:
    from paceline import errors, ray, strategies
    from paceline.api.collectives import all_gather, all_reduce, broadcast, pull, push, receive, reduce, send, wait
    from paceline.api.connect import connect
    from paceline.api.embedding import Embedding, EmbeddingBag
    from paceline.api.feed import feed
    from paceline.api.publishing import publish
    from paceline.api.script import (
        barrier,
        distributed,
        init,
        local_rank,
        parallelize,
        preempted,
        rank,
        report,
        resumed,
        shard,
        size,
        snapshot,
    )
    from paceline.api.session import Session
    from paceline.collective.meeting import FarAccess
    from paceline.core.consistency import Consistency, adaptive, asynchronous, backup, bsp, essp, ssp
    from paceline.data.files import files
    from paceline.data.prefetching import prefetch
    from paceline.data.sources import declared as sources
    from paceline.tools.tune.api import tune
    from paceline.training.strategy import Distributed
    from paceline.update import filters, functions
    from paceline.update import named_rules as update
    from paceline.update.rows import initializers as first
    from paceline.update.rows.spec import Lifecycle
    from paceline.versions.gate import gate
    from paceline.versions.subscription import subscribe
    from paceline.worker.rows.managed import managed
    from paceline.worker.rows.table import RowTable
    from paceline.worker.table import Table

__all__ = [
    "Consistency",
    "Distributed",
    "Embedding",
    "EmbeddingBag",
    "Lifecycle",
    "RowTable",
    "Session",
    "Table",
    "adaptive",
    "all_gather",
    "all_reduce",
    "asynchronous",
    "backup",
    "barrier",
    "broadcast",
    "bsp",
    "connect",
    "distributed",
    "errors",
    "essp",
    "feed",
    "files",
    "filters",
    "first",
    "functions",
    "gate",
    "init",
    "local_rank",
    "managed",
    "parallelize",
    "preempted",
    "prefetch",
    "publish",
    "pull",
    "push",
    "rank",
    "ray",
    "receive",
    "reduce",
    "report",
    "resumed",
    "send",
    "shard",
    "size",
    "snapshot",
    "sources",
    "ssp",
    "strategies",
    "subscribe",
    "tune",
    "update",
    "wait",
]

# Where a name is, if not in paceline.api.script.
_HOMES = {
    **dict.fromkeys(
        ("Consistency", "adaptive", "asynchronous", "backup", "bsp", "essp", "ssp"), "paceline.core.consistency"
    ),
    **dict.fromkeys(("Embedding", "EmbeddingBag"), "paceline.api.embedding"),
    **dict.fromkeys(
        ("all_gather", "all_reduce", "broadcast", "pull", "push", "receive", "reduce", "send", "wait"),
        "paceline.api.collectives",
    ),
    "Distributed": "paceline.training.strategy",
    "Lifecycle": "paceline.update.rows.spec",
    "RowTable": "paceline.worker.rows.table",
    "Session": "paceline.api.session",
    "Table": "paceline.worker.table",
    "connect": "paceline.api.connect",
    "feed": "paceline.api.feed",
    "files": "paceline.data.files",
    "gate": "paceline.versions.gate",
    "managed": "paceline.worker.rows.managed",
    "prefetch": "paceline.data.prefetching",
    "publish": "paceline.api.publishing",
    "subscribe": "paceline.versions.subscription",
    "tune": "paceline.tools.tune.api",
}
_MODULES = {
    "errors": "paceline.errors",
    "filters": "paceline.update.filters",
    "first": "paceline.update.rows.initializers",
    "functions": "paceline.update.functions",
    "ray": "paceline.ray",
    "sources": "paceline.data.sources.declared",
    "strategies": "paceline.strategies",
    "update": "paceline.update.named_rules",
}


def _find_far_access() -> "FarAccess | None":
    """Return how other machines reach this process, if it is a worker of a job: for the backend of torch."""
    join = sys.modules.get("paceline.api.join")
    session = None if join is None else join.open_session()
    return None if session is None else session.exchange.worker_set.far_access


_register_backend(_find_far_access)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    if name in _MODULES:
        return _load(_MODULES[name])
    return getattr(_load(_HOMES.get(name, "paceline.api.script")), name)


def _load(module: str) -> ModuleType:
    """Import a module; garbage is not looked for meanwhile, as each look would go through all that torch has made."""
    if module in sys.modules or not gc.isenabled():
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.enable()


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
