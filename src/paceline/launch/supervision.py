"""Interfaces of what a supervisor works with: processes, where they run, places, requests to join, the display."""

from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.launch.child import Launch


class ProgressDisplay(Protocol):
    """A live display of the run's progress."""

    def refresh(self, now: float) -> None:
        """Show the state of things at `now` (monotonic seconds)."""
        ...

    def note(self, worker: int, state: str) -> None:
        """Show that a worker has ended, and how; an empty state means that it runs."""
        ...

    def close(self) -> None:
        """Leave the display as it is."""
        ...


class Rendezvous(Protocol):
    """Collects the addresses of the servers, and publishes them to the workers."""

    def poll(self) -> bool:
        """Return whether all servers listen; does not block."""
        ...

    def missing(self) -> list[str]:
        """Return the names of the servers that are still awaited."""
        ...


class Member(Protocol):
    """A process of the job that was started, wherever it runs."""

    @property
    def launch(self) -> Launch:
        """How it was started."""
        ...

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def pid(self) -> int | None:
        """Its number, where that is known."""
        ...

    @property
    def last_lines(self) -> Sequence[str]:
        """What it last wrote to stderr."""
        ...

    def reap(self) -> int | None:
        """Return its exit code (negative: the signal that killed it), or None while it runs.

        Once it has ended, `ProcessBackend.release` clears up after it.
        """
        ...

    def signal(self, number: int) -> None:
        """Send it a signal."""
        ...

    def kill(self) -> None:
        """Kill it and all that it started."""
        ...

    def send_line(self, line: str) -> None:
        """Write a line to its standard input, if it is there to read it."""
        ...


class Succession(Protocol):
    """Whether the run can go on when the process of a server has died, and which process comes in its place."""

    def objection(self, rank: int) -> str:
        """Return why it cannot, now that a process of this server has died; "" if it can."""
        ...

    def following(self, launch: Launch, exit_code: int, /) -> Launch | None:
        """Return how to start the process in the place of the one that has ended so; None if none is to come."""
        ...

    def is_spare(self, launch: Launch, /) -> bool:
        """Return whether the run can do without this process of a server."""
        ...


class Candidate(Protocol):
    """A `paceline join` that asks for places of a run, and has not been answered."""

    @property
    def num(self) -> int:
        """For how many places it asks."""
        ...

    @property
    def origin(self) -> str:
        """Where it is: another machine, or a process of this one."""
        ...

    def permits(self, launch: Launch) -> bool:
        """Return whether it may have the place of this worker."""
        ...

    def refuse(self, reason: str) -> None:
        """Answer that it gets none."""
        ...

    def admit(self, launches: Sequence[Launch]) -> Sequence[Member]:
        """Answer that it gets these places; return the workers that it starts there. Raises PeerError if it is gone."""
        ...


class JoinRequests(Protocol):
    """Where candidates ask."""

    def requested(self) -> Sequence[Candidate]:
        """Return those that have asked since the last call; does not block."""
        ...


class Places(Protocol):
    """Places of workers that come and go."""

    def requested(self) -> int | None:
        """Return how many workers there are to be, if that was asked since the last call; does not block."""
        ...

    def answer(self, text: str) -> None:
        """Tell the process that asked."""
        ...

    def take(self, num: int, permits: Callable[[Launch], bool] = ...) -> list[Launch]:
        """Take up to so many places without a worker that are permitted; return how workers are started there."""
        ...

    def give_back(self, launch: Launch) -> None:
        """Note that the worker of this place has ended."""
        ...


class ProcessBackend(Protocol):
    """Where processes run: this machine, or those of an engine."""

    def prepare(self) -> Sequence[Member]:
        """Begin to make room for the processes; return the processes that help with it. Does not block."""
        ...

    def settled(self) -> bool:
        """Return whether processes can be started now; does not block. Raises when they never can."""
        ...

    def start(self, launch: Launch) -> Member:
        """Start a process; does not wait until it runs."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until something happens or `timeout_s` have passed; relay what processes have written."""
        ...

    def release(self, member: Member) -> None:
        """Relay the rest of what a member that has ended has written, clear up after it, and forget it."""
        ...

    def close(self) -> None:
        """Release what is left; nothing runs any more."""
        ...
