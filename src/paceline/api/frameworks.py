"""Detects a framework that is used without its adapter: each worker would train as if it were alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final, Protocol, cast

ADAPTERS: Final = "paceline.integrations"
# What a script has imported of a framework that distributes by itself, and the adapter that gives it ranks.
_DISTRIBUTES: Final = {
    "transformers.trainer": "transformers",
    "lightning.pytorch.trainer.trainer": "lightning",
    "lightning.fabric.fabric": "fabric",
}
# transformers imports it for models alone, so it is asked whether there is an `Accelerator`.
_ACCELERATE: Final = "accelerate.state"


class _AccelerateState(Protocol):
    def is_initialized(self) -> bool: ...


def missing_adapter(modules: Mapping[str, object] = sys.modules) -> str | None:
    """Return the adapter of a framework whose training code is in use while no adapter is imported, else None.

    >>> missing_adapter({"transformers.trainer": ...})
    'transformers'
    >>> missing_adapter({"transformers.trainer": ..., "paceline.integrations": ...})
    >>> missing_adapter({"transformers": ...})
    """
    if ADAPTERS in modules:
        return None
    found = next((adapter for module, adapter in _DISTRIBUTES.items() if module in modules), None)
    if found is None and _ACCELERATE in modules:
        return "accelerate" if cast("_AccelerateState", modules[_ACCELERATE]).is_initialized() else None
    return found
