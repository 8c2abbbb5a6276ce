"""How the workers of a group connect: by sockets of one machine, and by the carrier of the job to other machines.

What listens is gone once all are connected.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from pathlib import Path
from platform import machine
from secrets import token_hex
from typing import Final

import msgspec
from msgspec.structs import replace

from paceline.collective.exchange import Exchange, RoundsExchange
from paceline.collective.failures import names
from paceline.collective.machines import Layout, MachinesExchange
from paceline.collective.peers import Peers
from paceline.collective.rounds import SEGMENT_BYTES, Arrivals, SentRounds, share_segments
from paceline.errors import AuthenticationFailed, DeadlineExceeded, PacelineError, PeerError
from paceline.transport.base import EMPTY, Connection, Limits, Listener, Transport
from paceline.transport.deadline import Deadline
from paceline.transport.shm import ShmTransport
from paceline.wire.messages import Hello, check_caller, check_server, decode, encode

# Rounds need stores of one processor to be seen in their order by the others, as on these.
_ORDERED: Final = ("x86_64", "AMD64")
_LIMITS: Final = Limits(max_header_bytes=4096)
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_KEY_DIGITS: Final = 32


class FarAccess(msgspec.Struct, frozen=True):
    """How workers on other machines reach this one.

    Args:
        transport: carries what is between machines.
        address: where to listen.
        hello: which worker this is; its certificate, if it has one, says the same.
    """

    transport: Transport
    address: str
    hello: Hello


class MemberAddresses(msgspec.Struct, frozen=True):
    """What a worker tells the others of a group.

    Attributes:
        machine: what processes have in common that can share memory; empty if this one cannot.
        near: where it listens for these.
        far: where it listens for those on other machines; empty if it does not.
        key: what they show there, so that they are not taken for members of another group.
        hello: which worker it is.
    """

    machine: str = ""
    near: str = ""
    far: str = ""
    key: str = ""
    hello: Hello = msgspec.field(default_factory=partial(Hello, "worker", 0, 0, 0))

    @staticmethod
    def read(text: str) -> MemberAddresses:
        """Read what another worker has told; raises PeerError if it is not that."""
        try:
            return msgspec.json.decode(text, type=MemberAddresses)
        except msgspec.DecodeError as error:
            raise PeerError(f"a worker has told the others of its group {text[:80]!r}: {error}") from error

    @property
    def text(self) -> str:
        """Encode it."""
        return msgspec.json.encode(self).decode()


@dataclass(slots=True)
class Offer:
    """What a worker offers the others of a group: to connect to it, from the same machine or from others."""

    told: MemberAddresses = field(default_factory=MemberAddresses)
    near: ShmTransport | None = None
    segment: memoryview = EMPTY
    far: Transport | None = None
    _listeners: list[Listener] = field(default_factory=list[Listener])

    @staticmethod
    def make(folder: Path | None, far: FarAccess | None = None) -> Offer:
        """Listen in a folder that only this user can read, and for other machines; as far as that is available."""
        offer = Offer()
        if folder is not None and machine() in _ORDERED:
            offer._listen_near(folder)
        if far is not None:
            offer._listen_far(far)
        return offer

    def close(self) -> None:
        """Listen no longer. May be repeated."""
        while self._listeners:
            self._listeners.pop().close()

    def accept(self, rank: int, told: Sequence[MemberAddresses], timeout_s: float) -> tuple[Peers, Exchange]:
        """Connect to all others, which have told these things; blocks until all have called this.

        Raises:
            PeerError: a worker is gone, or has not come in time.
        """
        deadline = Deadline.after(timeout_s)
        layout = layout_of(rank, told)
        far = {other for other in range(len(told)) if other not in layout.neighbours}
        connections: dict[int, Connection] = {}
        try:
            for other in range(rank):
                connections[other] = self._reach(rank, other, told[other], deadline, is_far=other in far)
            later = set(range(rank + 1, len(told)))
            self._take_near(connections, rank, later - far, deadline)
            self._take_far(connections, rank, {other: told[other].hello for other in later & far}, deadline)
        except PacelineError:
            for connection in connections.values():
                connection.close()
            raise
        finally:
            self.close()
        arrivals = Arrivals(layout.first_ranks) if len(layout.machines) > 1 else None
        peers = Peers(rank, connections, far, arrivals if rank in layout.first_ranks else None)
        try:
            return peers, self._exchange(peers, layout, arrivals, deadline)
        except PeerError as error:
            peers.end(str(error), error)
            raise

    def _exchange(self, peers: Peers, layout: Layout, arrivals: Arrivals | None, deadline: Deadline) -> Exchange:
        """Return what makes collectives: in memory, over connections, or by both."""
        is_first = peers.rank in layout.first_ranks
        between = RoundsExchange(SentRounds(peers, arrivals)) if arrivals is not None and is_first else None
        if between is not None and layout.most == 1:
            return between
        segment = self.segment or memoryview(bytearray(SEGMENT_BYTES))  # which a worker alone on its machine needs too
        near = RoundsExchange(share_segments(peers, layout.neighbours, segment, deadline))
        return near if arrivals is None else MachinesExchange(layout, near, between)

    def _listen_near(self, folder: Path) -> None:
        refusals: list[str] = []
        transport = ShmTransport("collectives", _LIMITS, notice=refusals.append)
        segment = transport.allocate(SEGMENT_BYTES)
        if refusals:
            return
        with suppress(PacelineError, OSError):
            self._listeners.append(transport.listen(str(folder / f"group-{token_hex(6)}.sock")))
            near = self._listeners[-1].address
            self.near, self.segment = transport, segment
            self.told = replace(self.told, machine=_this_machine(), near=near)

    def _listen_far(self, far: FarAccess) -> None:
        with suppress(PacelineError, OSError):  # an address beyond this machine, and no certificate
            self._listeners.append(far.transport.listen(far.address))
            self.far = far.transport
            key = token_hex(_KEY_DIGITS // 2)
            self.told = replace(self.told, far=self._listeners[-1].address, key=key, hello=far.hello)

    def _reach(self, rank: int, other: int, told: MemberAddresses, deadline: Deadline, *, is_far: bool) -> Connection:
        """Connect to a worker with a lower rank."""
        transport, address = (self.far, told.far) if is_far else (self.near, told.near)
        identity = told.key.encode() + encode(self.told.hello) if is_far else str(rank).encode()
        assert transport is not None, "there is one where `can_meet`"
        try:
            connection = transport.connect(address, identity, timeout_s=max(0.001, deadline.remaining_s()))
            check_server(connection, told.hello.rank, "worker")
        except AuthenticationFailed as error:
            raise AuthenticationFailed(f"worker {rank}: {names([other])}: {error}") from error
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"worker {rank}: {names([other])} did not connect in time: {error}") from error
        except PeerError as error:
            raise PeerError(f"worker {rank}: {names([other])} is gone: {error}") from error
        return connection

    def _take_near(self, connections: dict[int, Connection], rank: int, awaited: set[int], deadline: Deadline) -> None:
        """Accept the connections of the workers with higher ranks on this machine."""
        while awaited:
            connection = self._accept(self._listeners[0], rank, awaited, deadline)
            said = connection.identity.decode(errors="replace")
            if not said.isdecimal() or int(said) not in awaited:
                connection.close()
                raise PeerError(f"worker {rank}: a process connected as worker {said!r}, which was not expected")
            connections[int(said)] = connection
            awaited.remove(int(said))

    def _take_far(
        self, connections: dict[int, Connection], rank: int, awaited: dict[int, Hello], deadline: Deadline
    ) -> None:
        """Accept the connections of the workers with higher ranks on other machines; others are closed."""
        refused = ""
        while awaited:
            connection = self._accept(self._listeners[-1], rank, set(awaited), deadline, refused)
            try:
                other = self._identify(connection, awaited)
            except PeerError as error:
                refused = str(error)
                connection.close()
                continue
            connections[other] = connection
            del awaited[other]

    def _identify(self, connection: Connection, awaited: dict[int, Hello]) -> int:
        """Return which worker has connected; raises PeerError if it is not one that is awaited."""
        key, introduction = connection.identity[:_KEY_DIGITS], connection.identity[_KEY_DIGITS:]
        if not compare_digest(key, self.told.key.encode()):
            raise PeerError("a worker connected that is of another group")
        hello = check_caller(decode(introduction), connection)
        for other, expected in awaited.items():
            if hello == expected:
                return other
        raise PeerError(f"{hello.role} {hello.rank} (life {hello.incarnation}) connected, which was not expected")

    def _accept(
        self, listener: Listener, rank: int, awaited: set[int], deadline: Deadline, refused: str = ""
    ) -> Connection:
        try:
            return listener.accept(timeout_s=deadline.remaining_s())
        except DeadlineExceeded as error:
            told = f"worker {rank}: {names(sorted(awaited))} did not connect in time"
            raise DeadlineExceeded(f"{told} ({refused})" if refused else told) from error


def layout_of(rank: int, told: Sequence[MemberAddresses]) -> Layout:
    """Return which worker of a group is on which machine; one that cannot share memory is on one of its own."""
    return Layout.of(rank, [one.machine or f"{other}" for other, one in enumerate(told)])


def can_meet(told: Sequence[MemberAddresses]) -> bool:
    """Return whether workers can connect: they are on one machine and share memory there, or all may be reached."""
    machines = {one.machine for one in told}
    return (len(machines) == 1 and "" not in machines) or all(one.far for one in told)


def private_folder() -> Path:
    """Make a folder that only this user can read, for a group outside of a job."""
    return Path(tempfile.mkdtemp(prefix="paceline-"))


def _this_machine() -> str:
    """Return what all processes have in common that can reach each other's files, sockets and memory, and no others."""
    try:
        boot = _BOOT.read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("mnt", "net")]
    except OSError:
        return ""  # one that shares memory with no other
    return f"{boot}:{spaces[0]}:{spaces[1]}:{os.geteuid()}"
