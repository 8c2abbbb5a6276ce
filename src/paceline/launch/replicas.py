"""The processes of servers that have replicas: which one comes in the place of one that has ended."""

from typing import Final, final

from paceline.job.views import NUM_PLACES, Views

MAX_FAILURES: Final = 5  # in a row, of processes in one place that came to nothing: the next one would fail, too


@final
class ServerPlace:
    """One of the two places of a server, with one process after the other; these have numbers of their own.

    The numbers of those in the other place lie between.

    Attributes:
        process: the number of the latest one.
    """

    def __init__(self, views: Views, process: int) -> None:
        """Begin with this process."""
        self._views = views
        self.process = process
        self._num_failures = 0

    def next_process(self, exit_code: int) -> int | None:
        """Return the number of the process after the latest one, which has ended so; None if none is to be started.

        Raises OSError.
        """
        has_served = exit_code < 0 and self._views.includes(self.process)
        self._num_failures = 0 if has_served else self._num_failures + 1
        if self._num_failures == MAX_FAILURES:
            return None
        self.process += NUM_PLACES
        return self.process
