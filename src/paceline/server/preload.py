"""What a rule of torch needs before it can be made: a second of importing, which keeps no other client waiting."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paceline.update.named_rules import runs_in_torch
from paceline.update.rules import RuleSpec

MODULE: Final = "torch._dynamo"  # which making any torch optimizer imports
Life = tuple[int, int]


@dataclass(slots=True)
class RulePreload:
    """Imports on a thread of its own, and has requests that need it carried out afterwards.

    Args:
        have_done: has a call made by the server's thread, from any thread.
    """

    have_done: Callable[[Callable[[], None]], None]
    # What each life has asked for last, to be looked at again. Only the server's thread touches it.
    _held: dict[Life, Callable[[], None]] = field(default_factory=dict[Life, Callable[[], None]])
    _thread: threading.Thread | None = None
    _is_warm: bool = field(default_factory=lambda: MODULE in sys.modules)

    def holds(self, life: Life, rule: RuleSpec, again: Callable[[], None]) -> bool:
        """Say whether a request has to wait; then `again` is called once it need not, unless another takes its place.

        A worker repeats what is not answered, so one of each is enough.
        """
        if self._is_warm or not runs_in_torch(rule):
            return False
        self._held[life] = again
        if self._thread is None:
            self._thread = threading.Thread(target=self._import, name="paceline-warming", daemon=True)
            self._thread.start()
        return True

    def close(self, timeout_s: float) -> None:
        """Wait for an import that is under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _import(self) -> None:
        try:
            importlib.import_module(MODULE)
        finally:  # else the error is met again where the rule is made, and told
            self.have_done(self._release)

    def _release(self) -> None:
        self._is_warm = True
        held, self._held = self._held, {}
        for again in held.values():
            again()
