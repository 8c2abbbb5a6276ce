"""Where a server reaches its replica, and what decides which of the two serves: see `replica.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from paceline.errors import PacelineError
from paceline.transport.base import Transport
from paceline.transport.deadline import Deadline

DECISION_PATIENCE_S: Final = 12.0
_PAUSE_S: Final = 0.25


class Superseded(PacelineError):
    """Another process serves in the place of this one, or none is to."""


class HandedOver(Superseded):
    """The replica serves in the place of this process, as it was asked to."""


class Promotion(Protocol):
    """Decides which process of a server goes on: see `job.views.Views`."""

    def promote(self, number: int) -> bool:
        """Have the replica serve from now on, unless the view of this number has ended; return whether it does."""
        ...

    def dismiss(self, number: int) -> bool:
        """Have the head go on without a replica, unless the view of this number has ended; return whether it does."""
        ...

    def enlist(self, number: int, process: int) -> bool:
        """Have a process be the replica from now on, unless the view of this number has ended; return whether it is."""
        ...


def wait_decided(decide: Callable[[], bool], served: str, tell: Callable[[str], None]) -> bool:
    """Return what a `Promotion` decides; while that fails, as on a full disk, ask it again, and tell so once.

    Raises OSError when it fails once 12 s are over, less than workers look for a server; a call that blocks counts.
    """
    deadline, pause, is_told = Deadline.after(DECISION_PATIENCE_S), threading.Event(), False
    while True:
        try:
            return decide()
        except OSError as error:
            if not deadline.remaining_s():
                raise
            if not is_told:
                tell(f"{served} waits: which of its processes serves cannot be read or written: {error}")
                is_told = True
        pause.wait(_PAUSE_S)


class ReplicaPlace(msgspec.Struct, frozen=True):
    """What it takes to reach the replica of a server, and to go on without it.

    Args:
        rank: of the server.
        view: its number.
        promotion: asked when the replica does not answer.
        address: returns where the replica listens, once it does.
        transport: makes the connection.
        tell: called with a line for the user when there is no replica any more.
        generation: of the job.
        process: of the replica, if it is not in the view yet.
        name: of what is served, for messages; by default the server with its rank.
        alone: what the lack of a replica means, for messages; by default that the run ends with the server.
        is_tried_again: after a failure, as another process may listen there by then; told once.
    """

    rank: int
    view: int
    promotion: Promotion
    address: Callable[[], str]
    transport: Transport
    tell: Callable[[str], None]
    generation: int = 1
    process: int = -1
    name: str = ""
    alone: str = ""
    is_tried_again: bool = False

    @property
    def served(self) -> str:
        """What is served, for messages."""
        return self.name or f"server {self.rank}"

    @property
    def without(self) -> str:
        """What the lack of a replica means, for messages."""
        return self.alone or f"the run ends if server {self.rank} is lost, as it has no replica any more"
