"""Paceline: the parameter server for PyTorch.

Everything public is here; what needs torch is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.version import __version__ as __version__

if TYPE_CHECKING:
    from paceline import ray
    from paceline.connecting import connect
    from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
    from paceline.current import (
        barrier,
        distributed,
        init,
        local_rank,
        parallelize,
        preempted,
        rank,
        report,
        shard,
        size,
    )
    from paceline.data.files import files
    from paceline.data.prefetching import prefetch
    from paceline.embedding import Embedding, EmbeddingBag
    from paceline.feeding import sources
    from paceline.node.rows.managed import managed
    from paceline.patterns import all_gather, all_reduce, broadcast, pull, push, reduce, wait
    from paceline.session import Session
    from paceline.supply import feed
    from paceline.tensors import filters, functions, update
    from paceline.tensors.rows import first
    from paceline.tensors.rows.spec import Lifecycle
    from paceline.training.downpour import downpour
    from paceline.training.fsdp import fsdp
    from paceline.training.local_sgd import diloco, local_sgd
    from paceline.tuning.api import tune

__all__ = [
    "Consistency",
    "Embedding",
    "EmbeddingBag",
    "Lifecycle",
    "Session",
    "all_gather",
    "all_reduce",
    "asynchronous",
    "backup",
    "barrier",
    "broadcast",
    "bsp",
    "connect",
    "diloco",
    "distributed",
    "downpour",
    "essp",
    "feed",
    "files",
    "filters",
    "first",
    "fsdp",
    "functions",
    "init",
    "local_rank",
    "local_sgd",
    "managed",
    "parallelize",
    "preempted",
    "prefetch",
    "pull",
    "push",
    "rank",
    "ray",
    "reduce",
    "report",
    "shard",
    "size",
    "sources",
    "ssp",
    "tune",
    "update",
    "wait",
]

# Where a name is, if not in paceline.current.
_HOMES = {
    **dict.fromkeys(("Consistency", "asynchronous", "backup", "bsp", "essp", "ssp"), "paceline.core.consistency"),
    **dict.fromkeys(("Embedding", "EmbeddingBag"), "paceline.embedding"),
    **dict.fromkeys(("diloco", "local_sgd"), "paceline.training.local_sgd"),
    **dict.fromkeys(("all_gather", "all_reduce", "broadcast", "pull", "push", "reduce", "wait"), "paceline.patterns"),
    "Lifecycle": "paceline.tensors.rows.spec",
    "Session": "paceline.session",
    "connect": "paceline.connecting",
    "downpour": "paceline.training.downpour",
    "feed": "paceline.supply",
    "files": "paceline.data.files",
    "fsdp": "paceline.training.fsdp",
    "managed": "paceline.node.rows.managed",
    "prefetch": "paceline.data.prefetching",
    "tune": "paceline.tuning.api",
}
_MODULES = {
    "filters": "paceline.tensors.filters",
    "first": "paceline.tensors.rows.first",
    "functions": "paceline.tensors.functions",
    "ray": "paceline.ray",
    "sources": "paceline.feeding.sources",
    "update": "paceline.tensors.update",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    if name in _MODULES:
        return import_module(_MODULES[name])
    return getattr(import_module(_HOMES.get(name, "paceline.current")), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
