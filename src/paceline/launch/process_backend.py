"""The local process backend: starts the processes of a job on this machine."""

from collections.abc import Callable, Sequence
from typing import final

from paceline.errors import PacelineError
from paceline.launch.child import Child, Launch, Process, start_process
from paceline.launch.console import Console
from paceline.launch.forkserver.server import ForkServer
from paceline.launch.forkserver.subreaper import Orphans
from paceline.launch.guard import Guard
from paceline.launch.limits import explain
from paceline.launch.output import Outlets
from paceline.launch.pipes import Pipe, Pump
from paceline.launch.supervise import Member


@final
class LocalBackend:
    """Starts processes on this machine, forks them where there is a fork server, and reads their output."""

    def __init__(
        self,
        console: Console,
        guard: Guard,
        wakeup_fd: int,
        fork_server: ForkServer | None,
        outlets: Outlets,
        orphans: Orphans,
    ) -> None:
        """Have the guard watch over all that is started; a signal makes `wakeup_fd` readable.

        While an outlet is full, what processes write there is left to wait.
        """
        self._console = console
        self._guard = guard
        self._fork_server = fork_server
        self._outlets = outlets
        self._pump = Pump(wakeup_fd, outlets)
        self._orphans = orphans
        self._pipes: dict[Child, Sequence[Pipe]] = {}

    def prepare(self) -> Sequence[Member]:
        """Start the fork server, if there is one."""
        return (
            () if self._fork_server is None else (self._add(self._fork_server.launch, self._fork_server.start_server),)
        )

    def settled(self) -> bool:
        """Return whether the fork server is ready, or has failed."""
        return self._fork_server is None or self._fork_server.settled()

    def start(self, launch: Launch) -> Member:
        """Start a process."""
        fork_server = None if launch.has_terminal or launch.is_fresh else self._fork_server
        return self._add(launch, start_process if fork_server is None else fork_server.start)

    def wait(self, timeout_s: float) -> None:
        """Block until a process writes or ends, or a signal comes."""
        self._pump.wait(timeout_s)
        self._orphans.reap([child.pid for child in self._pipes])

    def release(self, member: Member) -> None:
        """Read the rest of what it wrote."""
        for pipe in self._pipes.pop(next(child for child in self._pipes if child is member)):
            self._pump.remove(pipe)

    def close(self) -> None:
        """Nothing is left to release: pipes are closed with their processes."""

    def _add(self, launch: Launch, start: Callable[[Launch], Process]) -> Child:
        try:
            child = Child(launch, self._console, self._guard, start, self._is_held)
        except OSError as error:
            raise PacelineError(f"cannot start {launch.name}: {explain(error)}") from error
        self._pipes[child] = child.pipes
        for pipe in child.pipes:
            self._pump.add(pipe)
        return child

    def _is_held(self, *, to_stderr: bool) -> bool:
        return (self._outlets.stderr if to_stderr else self._outlets.stdout).is_full
