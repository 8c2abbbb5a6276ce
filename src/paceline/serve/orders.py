"""What the supervisor of `paceline serve` and the processes that serve say to each other, and two supervisors."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.server.journal import FORMAT
from paceline.version import __version__

ORDER_BYTES: Final = 64 * 1024
# Under these names, memory that outlives a process has more than memory.
LISTENER: Final = "listener"
LOCK: Final = "lock"

SERVES: Final = b"serves"  # a process accepts clients
HAND_OVER: Final = b"hand over"  # save what cannot be gone on with, and be killed
TAKEN: Final = b"taken"  # a supervisor has all that another one had


class ServeVersion(msgspec.Struct, frozen=True):
    """What a program can go on with: memory of the same format."""

    format: int = FORMAT
    program: str = __version__


class ServeOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to serve; see `paceline.serve.command.serve`.

    Args:
        state: absolute path of the folder.
        address: at which it listens, tcp://HOST:PORT.
        keys: absolute path of a folder.
        snapshot_every_s: interval between two snapshots; 0 chooses by what one takes.
        allow: what clients may name.
        or_previous: whether a damaged snapshot may be replaced by the one before.
        greets: say what is served where.
        checks: read all that was saved before clients are let in, and say what is damaged.
        metrics: port, or HOST:PORT, at which Prometheus scrapes; empty for none.
        views: absolute path of the folder that servers see which stand in for each other; empty for none.
        lag: clocks by which their replicas may lag.
        ends: save and end at once, as the process before was told to.
    """

    state: str
    address: str
    keys: str | None
    snapshot_every_s: float
    allow: tuple[str, ...]
    or_previous: bool
    greets: bool = True
    checks: bool = True
    ends: bool = False
    metrics: str = ""
    views: str = ""
    lag: int = 0

    def encode(self) -> bytes:
        """Return a message."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(message: bytes) -> ServeOrders:
        """Read a message."""
        return msgspec.json.decode(message, type=ServeOrders)


class ServeOffer(msgspec.Struct, frozen=True):
    """What a supervisor answers to one that is to take its place.

    Args:
        address: at which it listens.
        serving: the process that serves; 0 for none.
        waiting: the process that is ready to go on in its place; 0 for none yet.
        refusal: why nothing can be taken over; empty if it can.
        metrics: port, or HOST:PORT, at which Prometheus scrapes; empty for none, None where that is not known.
    """

    address: str = ""
    serving: int = 0
    waiting: int = 0
    refusal: str = ""
    metrics: str | None = None


def ready(version: ServeVersion | None = None) -> bytes:
    """Return the message of a process that has imported all, or of a supervisor that is to take over."""
    return msgspec.json.encode(version or ServeVersion())


def read_version(message: bytes) -> ServeVersion:
    """Read what `ready` has returned; raises msgspec.DecodeError."""
    return msgspec.json.decode(message, type=ServeVersion)
