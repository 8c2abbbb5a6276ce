"""What workers and servers may say to each other. Numbers and names only: tensors travel beside these, never inside.

Every message names the generation of the job and, where it comes from a worker, its incarnation: what another
generation or a former incarnation says is refused. A retry repeats its message to the letter, so it is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sender:
    """Which life of which worker speaks: rank, and how often that rank was started before."""

    generation: int
    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True, order=True)
class PushId:
    """The identity of one push; the same on every server and in every retry."""

    generation: int
    worker: int
    incarnation: int
    seq: int

    @property
    def sender(self) -> Sender:
        """The life that made it."""
        return Sender(self.generation, self.worker, self.incarnation)


# -- what a worker says ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """I take part from now on."""

    sender: Sender


@dataclass(frozen=True, slots=True)
class Leave:
    """I have finished, and all my pushes are settled."""

    sender: Sender


@dataclass(frozen=True, slots=True)
class Push:
    """An update made during `clock`; its tensor travels beside it.

    All my pushes of this table below `settled` have been answered by every server, so their answers may be forgotten.
    """

    id: PushId
    table: str
    clock: int
    settled: int


@dataclass(frozen=True, slots=True)
class Clock:
    """I have finished every clock below `clock`, and every server has all pushes that belong to them.

    `withdrawn` names (table, clock, sequence number) of pushes that some server refused: no server may apply its part.
    """

    sender: Sender
    clock: int
    withdrawn: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Pull:
    """Send me the values of `table` as soon as they contain every update of the clocks below `needs`."""

    sender: Sender
    request: int
    table: str
    clock: int
    needs: int


@dataclass(frozen=True, slots=True)
class PieceTaken:
    """I have taken in what you delivered up to `clock`; you may send the next."""

    sender: Sender
    table: str
    clock: int


FromWorker = Join | Leave | Push | Clock | Pull | PieceTaken


# -- what a server answers -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """You take part; the slowest worker here stands at `clock`."""

    clock: int


@dataclass(frozen=True, slots=True)
class Left:
    """You no longer take part."""


@dataclass(frozen=True, slots=True)
class Held:
    """I keep this push until its clock is complete. Not an acknowledgement: it is not applied yet."""

    id: PushId


@dataclass(frozen=True, slots=True)
class Applied:
    """This push is applied, once; keep nothing for it."""

    id: PushId


@dataclass(frozen=True, slots=True)
class PushRefused:
    """This push was not and will never be applied."""

    id: PushId
    reason: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """I know that you have finished the clocks below `clock`."""

    clock: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The values you asked for travel beside this.

    They contain all updates of the clocks below `clock`, `version` updates in total, and of your own pushes of this
    table exactly those below `settled` and those in `includes`.
    """

    request: int
    table: str
    clock: int
    version: int
    settled: int
    includes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """New values, unasked, because the clock advanced; read it as `Fetched`.

    Of a table of rows it brings those that changed after the delivery of clock `since`: -1 is the reader's first one,
    and -2 says that some may have been lost before it.
    """

    table: str
    clock: int
    version: int
    settled: int
    includes: tuple[int, ...]
    since: int = -1


@dataclass(frozen=True, slots=True)
class PullRefused:
    """There is nothing to send for this request, and there will not be."""

    request: int
    table: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """You do not take part (any more): another life of yours does, or you were given up."""

    sender: Sender
    reason: str


FromServer = Joined | Left | Held | Applied | PushRefused | Ticked | Fetched | Delivered | PullRefused | WorkerRefused


# -- what servers say to each other ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Follow:
    """Tell me who completed `clock` of `table` once you know; I have applied every clock below it."""

    generation: int
    server: int
    table: str
    clock: int


@dataclass(frozen=True, slots=True)
class Closed:
    """`clock` of `table` is complete with exactly these contributors, (worker, incarnation) in ascending rank.

    Of their pushes those are left out that `withdrawn` names: (worker, incarnation, sequence number).
    """

    generation: int
    table: str
    clock: int
    contributors: tuple[tuple[int, int], ...]
    withdrawn: tuple[tuple[int, int, int], ...] = ()


BetweenServers = Follow | Closed

Message = FromWorker | FromServer | BetweenServers
