"""Messages of the protocol between workers and servers. Each reads as a sentence of its sender.

A message has numbers and names only; tensors travel beside it. It carries the generation of the job and, from a
worker, the incarnation: messages of another generation or an ended incarnation are refused. A retry repeats its message
exactly, so that the receiver recognises it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def value_class(cls: type[T], /) -> type[T]: ...


@overload
def value_class(*, order: bool = False) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True)
def value_class(cls: type[T] | None = None, /, *, order: bool = False) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a dataclass that is frozen for the type checker alone, as freezing makes it four times slower to create.

    >>> @value_class
    ... class Tick:
    ...     clock: int
    >>> Tick(3), Tick(3) == Tick(3), len({Tick(3), Tick(3)})
    (Tick(clock=3), True, 1)
    """
    made = dataclass(slots=True, unsafe_hash=True, order=order)
    return made if cls is None else made(cls)


@value_class
class Sender:
    """The life of a worker that sends a message: its rank, and how often that rank was started before."""

    generation: int
    worker: int
    incarnation: int


@value_class(order=True)
class PushId:
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


@value_class
class Join:
    """I take part from now on."""

    sender: Sender


@value_class
class Leave:
    """I have finished, and all my pushes are settled."""

    sender: Sender


@value_class
class Push:
    """An update made during `clock`; its tensor travels beside it.

    Every server has answered all my pushes of this table below `settled`, so their answers may be forgotten.
    """

    id: PushId
    table: str
    clock: int
    settled: int


@value_class
class Clock:
    """I have finished every clock below `clock`, and every server has all pushes that belong to them.

    `withdrawn` names (table, clock, sequence number) of pushes that some server refused: no server may apply its part.
    """

    sender: Sender
    clock: int
    withdrawn: tuple[tuple[str, int, int], ...] = ()


@value_class
class Pull:
    """Send me the values of `table` as soon as they contain every update of the clocks below `needs`."""

    sender: Sender
    request: int
    table: str
    clock: int
    needs: int


@value_class
class Taken:
    """I have installed your delivery of `clock`; you may send the next."""

    sender: Sender
    table: str
    clock: int


@value_class
class WholeStep:
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


@value_class
class Repeated:
    """Over this connection I have said again all that the process in which you serve may not know of me.

    Values that I have read from you have every update of the clocks below `reached`, -1 for none.
    """

    sender: Sender
    reached: int


FromWorker = Join | Leave | Push | Clock | Pull | WholeStep | Taken | Repeated


# -- from a server to a worker ---------------------------------------------------------------------------------------


@value_class
class Joined:
    """You take part; the slowest worker here stands at `clock`."""

    clock: int


@value_class
class Left:
    """You no longer take part."""


@value_class
class Held:
    """I keep this push until its clock is complete. Not an acknowledgement: it is not applied yet."""

    id: PushId


@value_class
class Applied:
    """This push is applied, exactly once; you may reuse its tensor."""

    id: PushId


@value_class
class PushRefused:
    """This push was not applied and never will be."""

    id: PushId
    reason: str


@value_class
class Ticked:
    """I know that you have finished the clocks below `clock`."""

    clock: int


@value_class
class Fetched:
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


@value_class
class Delivered:
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


@value_class
class PullRefused:
    """This pull cannot be answered, now or later."""

    request: int
    table: str
    reason: str


@value_class
class WorkerRefused:
    """You do not take part (any more): a newer life of your rank does, or your lease has ended."""

    sender: Sender
    reason: str


@value_class
class Replicated:
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


@value_class
class Follow:
    """Send me the decision on `clock` of `table` once it is made; I have applied every clock below it.

    With `norm` I know the decision: that is the norm of my part of the update, and I wait for the norm of all of it.
    """

    generation: int
    server: int
    table: str
    clock: int
    norm: float | None = None


@value_class
class Closed:
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
