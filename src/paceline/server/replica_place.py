"""Where a server reaches its replica, and what decides which of the two serves: see `replica.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from paceline.errors import PacelineError
from paceline.transport.base import Transport


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
