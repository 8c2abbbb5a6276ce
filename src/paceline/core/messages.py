"""Messages of the protocol between workers and servers. Each reads as a sentence of its sender.

A message has numbers and names only; tensors travel beside it. It carries the generation of the job and, from a
worker, the incarnation: messages of another generation or an ended incarnation are refused. A retry repeats its message
exactly, so that the receiver recognises it.
"""

from __future__ import annotations

import msgspec


class Sender(msgspec.Struct, frozen=True):
    """The life of a worker that sends a message: its rank, and how often that rank was started before."""

    generation: int
    worker: int
    incarnation: int


class PushId(msgspec.Struct, frozen=True, order=True):
    """The identity of one push; the same on every server and in every retry."""

    generation: int
    worker: int
    incarnation: int
    seq: int

    @property
    def sender(self) -> Sender:
        """The life that made the push."""
        return Sender(self.generation, self.worker, self.incarnation)


# -- from a worker ---------------------------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True):
    """I take part from now on."""

    sender: Sender


class Leave(msgspec.Struct, frozen=True):
    """I have finished, and all my pushes are settled."""

    sender: Sender


class Push(msgspec.Struct, frozen=True):
    """An update made during `clock`; its tensor travels beside it.

    Every server has answered all my pushes of this table below `settled`, so their answers may be forgotten.
    """

    id: PushId
    table: str
    clock: int
    settled: int


class Clock(msgspec.Struct, frozen=True):
    """I have finished every clock below `clock`, and every server has all pushes that belong to them.

    `withdrawn` names (table, clock, sequence number) of pushes that some server refused: no server may apply its part.
    """

    sender: Sender
    clock: int
    withdrawn: tuple[tuple[str, int, int], ...] = ()


class Pull(msgspec.Struct, frozen=True):
    """Send me the values of `table` as soon as they contain every update of the clocks below `needs`."""

    sender: Sender
    request: int
    table: str
    clock: int
    needs: int


class Taken(msgspec.Struct, frozen=True):
    """I have installed your delivery of `clock`; you may send the next."""

    sender: Sender
    table: str
    clock: int


class WholeStep(msgspec.Struct, frozen=True):
    """Pushes, the tick that ends their clock and pulls, in turn; one life sends all of it, and it arrives as a whole.

    Values answer it: the pulls, the tick by `ticked`, and pushes by `includes`. Without a tick the clock ends later.
    """

    pushes: tuple[Push, ...]
    tick: Clock | None
    pulls: tuple[Pull, ...]

    @property
    def sender(self) -> Sender:
        """The life that sends it."""
        return self.pushes[0].id.sender if self.pushes else self.pulls[0].sender


class Repeated(msgspec.Struct, frozen=True):
    """Over this connection I have said again all that the process in which you serve may not know of me.

    Values that I have read from you have every update of the clocks below `reached`, -1 for none.
    """

    sender: Sender
    reached: int


FromWorker = Join | Leave | Push | Clock | Pull | WholeStep | Taken | Repeated


# -- from a server to a worker ---------------------------------------------------------------------------------------


class Joined(msgspec.Struct, frozen=True):
    """You take part; the slowest worker here stands at `clock`."""

    clock: int


class Left(msgspec.Struct, frozen=True):
    """You no longer take part."""


class Held(msgspec.Struct, frozen=True):
    """I keep this push until its clock is complete. Not an acknowledgement: it is not applied yet."""

    id: PushId


class Applied(msgspec.Struct, frozen=True):
    """This push is applied, exactly once; you may reuse its tensor."""

    id: PushId


class PushRefused(msgspec.Struct, frozen=True):
    """This push was not applied and never will be."""

    id: PushId
    reason: str


class Ticked(msgspec.Struct, frozen=True):
    """I know that you have finished the clocks below `clock`."""

    clock: int


class Fetched(msgspec.Struct, frozen=True):
    """The values you asked for travel beside this.

    They contain all updates of the clocks below `clock`, `version` updates in total, and of your own pushes of this
    table exactly those below `settled` and those in `includes`. I know that you have finished the clocks below
    `ticked`.
    """

    request: int
    table: str
    clock: int
    version: int
    settled: int
    includes: tuple[int, ...]
    ticked: int = 0


class Delivered(msgspec.Struct, frozen=True):
    """New values for a subscriber, sent because the clock advanced; the fields mean the same as in `Fetched`.

    For a row table, these are the rows that changed after the delivery of clock `since`: -1 marks the reader's first
    delivery, and -2 means that earlier ones may have been lost.
    """

    table: str
    clock: int
    version: int
    settled: int
    includes: tuple[int, ...]
    since: int = -1


class PullRefused(msgspec.Struct, frozen=True):
    """This pull cannot be answered, now or later."""

    request: int
    table: str
    reason: str


class WorkerRefused(msgspec.Struct, frozen=True):
    """You do not take part (any more): a newer life of your rank does, or your lease has ended."""

    sender: Sender
    reason: str


class Replicated(msgspec.Struct, frozen=True):
    """My replica has these of your pushes, by their sequence numbers: you need not repeat them any more."""

    seqs: tuple[int, ...]


FromServer = (
    Joined
    | Left
    | Held
    | Applied
    | PushRefused
    | Ticked
    | Fetched
    | Delivered
    | PullRefused
    | WorkerRefused
    | Replicated
)


# -- between servers -------------------------------------------------------------------------------------------------


class Follow(msgspec.Struct, frozen=True):
    """Send me the decision on `clock` of `table` once it is made; I have applied every clock below it.

    With `norm` I know the decision: that is the norm of my part of the update, and I wait for the norm of all of it.
    """

    generation: int
    server: int
    table: str
    clock: int
    norm: float | None = None


class Closed(msgspec.Struct, frozen=True):
    """`clock` of `table` is complete with exactly these contributors, (worker, incarnation) in ascending rank.

    Except their pushes in `withdrawn`: (worker, incarnation, sequence number). If it `clips`, the update waits for
    `norm`, that of the parts of all servers together: without it, tell me that of yours.
    """

    generation: int
    table: str
    clock: int
    contributors: tuple[tuple[int, int], ...]
    withdrawn: tuple[tuple[int, int, int], ...] = ()
    clips: bool = False
    norm: float | None = None


BetweenServers = Follow | Closed

Message = FromWorker | FromServer | BetweenServers
