"""Admission to a namespace: which client is which worker there, and in which of its lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import msgspec
from msgspec.structs import replace

from paceline.core.messages import Sender
from paceline.core.settings import MAX_WORKERS
from paceline.errors import Refused
from paceline.serve.messages import EnterAccepted, EnterRequest
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.core.membership import Incarnation
    from paceline.server.tables import ServerState

# Time in which an admitted client has to connect with its rank.
RESERVED_S: Final = 10.0


class OpenNamespace(msgspec.Struct, frozen=True):
    """What another process has to know of a namespace to go on with it, besides its server.

    Args:
        generation: of the namespace.
        workers: see `EnterRequest`.
        incarnations: the newest that was assigned, by rank.
        reserved: end of the reservation of ranks that have not joined yet (monotonic seconds).
    """

    generation: int
    workers: int | None
    incarnations: dict[int, int]
    reserved: dict[int, float]

    def reserved_anew(self, now: float) -> OpenNamespace:
        """Return the same for a machine whose time is another one: all reservations begin there now."""
        return replace(self, reserved=dict.fromkeys(self.reserved, now + RESERVED_S))

    def encode(self) -> bytes:
        """Return it as bytes."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(content: bytes) -> OpenNamespace:
        """Return what `encode` was called for; raises msgspec.DecodeError."""
        return _OPENED_DECODER.decode(content)


_OPENED_DECODER: Final = msgspec.msgpack.Decoder(OpenNamespace)


class ClaimedRank(Refused):
    """Another client has the requested rank; after a kill, until its connection has ended."""


@final
class Admission:
    """Assigns ranks, with a new incarnation for each life of a rank; for the thread that serves.

    Args:
        namespace: name, for messages.
        generation: of the namespace.
        workers: number of workers; None for any number.
        now: monotonic seconds.
    """

    def __init__(
        self,
        namespace: str,
        generation: int,
        workers: int | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._generation = generation
        self._workers = workers
        self._now = now
        self._opened_at = now()
        self._incarnations: dict[int, int] = {}  # the newest assigned one, by rank
        self._reserved: dict[int, float] = {}  # end of the reservation of ranks that have not joined yet

    def admit(self, held: ServerState, ask: EnterRequest, holder_rank: int | None) -> EnterAccepted:
        """Assign a rank to a client, and reserve it for a while until the client has joined.

        `holder_rank` is the worker of its certificate, if that is for one worker.

        Raises:
            Refused: the rank is not free, or other clients have another number of workers; the message says which.
        """
        self._forget_reserved(held)
        self._check(ask)
        wanted = ask.rank if holder_rank is None else holder_rank
        if ask.rank is not None and ask.rank != wanted:
            raise Refused(f"its certificate is for worker {wanted}, and it asks to be worker {ask.rank}")
        rank = self._first_free(held) if wanted is None else self._checked(held, wanted)
        incarnation = self._incarnations.get(rank, -1) + 1
        self._incarnations[rank] = incarnation
        self._reserved[rank] = self._now() + RESERVED_S
        size = self._workers or max([*held.core.members, *self._reserved]) + 1
        return EnterAccepted(rank, incarnation, self._generation, size)

    def opened(self) -> OpenNamespace:
        """Return what another process has to know to go on."""
        return OpenNamespace(self._generation, self._workers, dict(self._incarnations), dict(self._reserved))

    def take_over(self, opened: OpenNamespace) -> None:
        """Go on where another process ended."""
        self._incarnations, self._reserved = dict(opened.incarnations), dict(opened.reserved)

    def is_idle(self, held: ServerState) -> bool:
        """Return whether no worker has joined, is expected, or was just admitted."""
        self._forget_reserved(held)
        waited = bool(self._incarnations) or self._now() > self._opened_at + RESERVED_S
        return waited and not held.core.members and not self._reserved

    def _check(self, ask: EnterRequest) -> None:
        if ask.version.split(".")[:2] != __version__.split(".")[:2]:
            raise Refused(f"it runs paceline {ask.version}, and the server {__version__}: install the same on both")
        if ask.workers != self._workers:
            raise Refused(
                f"it wants {_amount(ask.workers)} in namespace '{self._namespace}', where others are with "
                f"{_amount(self._workers)}: give every client the same workers=..., or name another namespace"
            )

    def _checked(self, held: ServerState, rank: int) -> int:
        if self._workers is not None and rank >= self._workers:
            raise Refused(f"there is no worker {rank} in namespace '{self._namespace}', which has {self._workers}")
        if rank in self._reserved or _is_here(held, rank):
            raise ClaimedRank(
                f"worker {rank} of namespace '{self._namespace}' is there already: leave rank out, or end that one"
            )
        return rank

    def _first_free(self, held: ServerState) -> int:
        """Return the lowest free rank; if all are taken, the lowest whose worker is disconnected."""
        ranks = range(self._workers or MAX_WORKERS)
        never_came = (rank for rank in ranks if rank not in self._reserved and _joined(held, rank) is None)
        rank = next(never_came, None)
        if rank is None:
            rank = next((rank for rank in ranks if rank not in self._reserved and not _is_here(held, rank)), None)
        if rank is None:
            raise ClaimedRank(f"all {len(ranks)} workers of namespace '{self._namespace}' are there already")
        return rank

    def _forget_reserved(self, held: ServerState) -> None:
        now = self._now()
        self._reserved = {
            rank: until
            for rank, until in self._reserved.items()
            if now < until and not self._has_come(held, Sender(self._generation, rank, self._incarnations[rank]))
        }

    def _has_come(self, held: ServerState, sender: Sender) -> bool:
        life = _joined(held, sender.worker)
        return held.core.lives.has_ended(sender) or (life is not None and life.incarnation == sender.incarnation)


def _joined(held: ServerState, rank: int) -> Incarnation | None:
    life = held.core.lives.current(rank)
    return life if life is not None and life.joined_at is not None else None


def _is_here(held: ServerState, rank: int) -> bool:
    """Return whether a worker has joined and is connected."""
    life = _joined(held, rank)
    return life is not None and life.lease_until is None


def _amount(workers: int | None) -> str:
    return "as many workers as come" if workers is None else f"workers={workers}"
