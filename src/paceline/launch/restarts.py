"""How long to wait before a process that has crashed is started again: longer each time, until it lives for a while."""

from typing import Final, final

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
HEALTHY_S: Final = 60.0  # a process that has lived so long counts as well, and its next crash as the first


@final
class RestartDelays:
    """The pauses before the restarts of each process, by its name; times are monotonic seconds.

    >>> pauses = RestartDelays()
    >>> pauses.note_start("worker 0", 0.0)
    >>> [pauses.after_crash("worker 0", now) for now in (1.0, 2.0, 3.0, 90.0)]
    [0.5, 1.0, 2.0, 0.5]
    """

    def __init__(self) -> None:
        """Know of no process."""
        self._started_s: dict[str, float] = {}
        self._num_crashes: dict[str, int] = {}  # since it last lived well

    def note_start(self, name: str, now: float) -> None:
        """Note that a process begins to live."""
        self._started_s[name] = now

    def after_crash(self, name: str, now: float) -> float:
        """Return for how many seconds not to start it again."""
        before = 0 if now - self._started_s[name] >= HEALTHY_S else self._num_crashes.get(name, 0)
        self._num_crashes[name] = before + 1
        return min(FIRST_PAUSE_S * 2.0 ** min(before, 32), LONGEST_PAUSE_S)
