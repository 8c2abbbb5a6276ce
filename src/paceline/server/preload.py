"""Background import of what torch optimizers need: it takes a second, in which the server goes on serving."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.work_queue import Life
from paceline.torch_private import DYNAMO
from paceline.update.named_rules import runs_in_torch
from paceline.update.rules import RuleSpec


@dataclass(slots=True)
class RulePreload:
    """Imports on its own thread, and defers requests that need the module until it is done.

    Args:
        run_on_server: has the server's thread make a call; callable from any thread.
    """

    run_on_server: Callable[[Callable[[], None]], None]
    # By worker: its last deferred request. Only the server's thread touches it.
    _held: dict[Life, Callable[[], None]] = field(default_factory=dict[Life, Callable[[], None]])
    _thread: threading.Thread | None = None
    _is_warm: bool = field(default_factory=lambda: DYNAMO in sys.modules)

    def defer(self, life: Life, rule: RuleSpec, again: Callable[[], None]) -> bool:
        """Return whether a request has to wait for the import; `again` is then called after it.

        Only the last request of each worker is kept: a worker repeats what is not answered.
        """
        if self._is_warm or not runs_in_torch(rule):
            return False
        self._held[life] = again
        if self._thread is None:
            self._thread = threading.Thread(target=self._import, name="paceline-preload", daemon=True)
            self._thread.start()
        return True

    def close(self, timeout_s: float) -> None:
        """Wait for an import that is running, `timeout_s` at most."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _import(self) -> None:
        try:
            importlib.import_module(DYNAMO)
        finally:  # if it failed, creating the rule fails with the same error, which is reported
            self.run_on_server(self._release)

    def _release(self) -> None:
        self._is_warm = True
        held, self._held = self._held, {}
        for again in held.values():
            again()
