"""The messages from a server to its replica, or to a record, and the answers of the replica."""

from __future__ import annotations

from typing import Final

import msgspec

from paceline.update.rules import Hyper
from paceline.wire.messages import MessageCodec

ROLE: Final = "head"  # of the process that serves, towards its replica
FOLDER: Final = "paceline-replica-"  # where a table is, for as long as it takes to send or to restore it
ANSWER_TIMEOUT_S: Final = 30.0  # the connection itself says sooner that a machine is gone


class Attached(msgspec.Struct, frozen=True):
    """I serve, in this view; beside this is the state of my core and of what is kept beside it."""

    view: int


class Restored(msgspec.Struct, frozen=True):
    """Beside this are values and state of a table, as `ServedTable.save` writes them at this clock and version."""

    table: str
    clock: int
    version: int
    hyper: tuple[Hyper, ...]


class Pushed(msgspec.Struct, frozen=True):
    """The tensor beside this came with this push (a frame's header) and waits for its event."""

    push: bytes


class Looked(msgspec.Struct, frozen=True):
    """A worker has said this of rows that it reads (a frame's header), which counts as their use; ids are beside it."""

    frame: bytes


class Happened(msgspec.Struct, frozen=True):
    """This was written down at this time; the body of a request is beside it."""

    now: float
    written: bytes


class Idled(msgspec.Struct, frozen=True):
    """I have looked for requests about tables without pushes whose clock has come."""


class Checked(msgspec.Struct, frozen=True):
    """I am about to give an answer that rests on nothing new: it leaves if you still follow me."""


class Ended(msgspec.Struct, frozen=True):
    """I end as I was told to, or go on without you: serve no longer."""

    reason: str


class Leaving(msgspec.Struct, frozen=True):
    """You have been told all, and I say nothing more to any worker: serve in my place."""


class Noted(msgspec.Struct, frozen=True):
    """What is kept of the server beside its node is this from now on, in the encoding of what keeps it."""

    content: bytes


class Proved(msgspec.Struct, frozen=True):
    """My tables have these digests at the end; in a record only."""

    digests: dict[str, str]


class Received(msgspec.Struct, frozen=True):
    """I have so many of your frames, and do what they say."""

    num_frames: int


HeadMessage = Attached | Restored | Pushed | Happened | Idled | Checked | Ended | Proved | Looked | Noted | Leaving
CODEC: Final = MessageCodec[HeadMessage](
    *(Attached, Restored, Pushed, Happened, Idled, Checked, Ended, Proved, Looked, Noted, Leaving)
)
ANSWERS: Final = MessageCodec[Received](Received)
