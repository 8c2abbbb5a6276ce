"""Whether the machine at the other end of a connection is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from paceline.transport.base import Connection, MeasuresSilence

LOOK_S: Final = 0.25  # between two looks
SILENCE_S: Final = 1.0  # of a machine that is spoken to all the while
SILENT: Final = f"its machine has confirmed nothing for {SILENCE_S:g} s"


@final
@dataclass(slots=True)
class LineWatch:
    """Tells when the machine at the other end is gone: it confirms nothing, while this end keeps saying something.

    What a machine confirms is said by its kernel, so a process there may be busy or stopped for as long as it likes.
    """

    connection: Connection
    now: Callable[[], float] = time.monotonic
    num_looks: int = 0  # in a row that have brought nothing
    _looked_s: float = 0.0

    def note_heard(self) -> None:
        """Note that a frame has come."""
        self.num_looks = 0

    def is_silent(self) -> bool:
        """Return whether the other machine is gone; called after each look that has brought nothing."""
        looked_s, self._looked_s = self._looked_s, self.now()
        is_late = self._looked_s - looked_s > 3 * LOOK_S  # this process was stopped, or has done something else
        self.num_looks = 1 if is_late else self.num_looks + 1
        if self.num_looks * LOOK_S < SILENCE_S or not isinstance(self.connection, MeasuresSilence):
            return False
        return self.connection.silent_s() >= SILENCE_S
