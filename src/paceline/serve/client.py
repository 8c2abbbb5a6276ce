"""The client of a standalone server: connects to an address, and is admitted to a namespace as a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, final

import msgspec

from paceline.errors import (
    AuthenticationFailed,
    CertificateRefused,
    ConnectionLost,
    DeadlineExceeded,
    PeerError,
    ProtocolBug,
    Refused,
    UsageError,
)
from paceline.job.machines import format_host_port, look_up
from paceline.notices import NEWS, tell
from paceline.serve.access import SCHEME, ServerCredentials, ServeUrl
from paceline.serve.messages import (
    Answer,
    EnterAccepted,
    EnterElsewhere,
    EnterFrame,
    EnterRequest,
    NamespaceStanding,
    decode_answer,
    encode,
)
from paceline.serve.standing import ask_standing
from paceline.transport.base import Connection, Listener
from paceline.transport.deadline import Deadline
from paceline.transport.tcp import TcpTransport
from paceline.version import __version__

CONNECT_TIMEOUT_S: Final = 5.0
# The gateway answers when the namespace is open, which may have to be read from disk first.
ADMISSION_TIMEOUT_S: Final = 60.0
LOOKUP_PAUSE_S: Final = 0.25


@final
class NamespaceTransport:
    """A `Transport` to one namespace: TCP, with the namespace in the identity of the handshake.

    Addresses are those of `ServeUrl`. All addresses of the hosts are tried in turn, first the one that worked last. If
    none works, the hosts are looked up again for the next time: a server that moved has another address. Where several
    servers may serve the namespace, they are asked first which of them does.

    Args:
        find: returns the addresses of the hosts now, at least one; raises UsageError where none is known.
    """

    def __init__(self, location: ServeUrl, tcp: TcpTransport, find: Callable[[], tuple[str, ...]]) -> None:
        self.name: Final = SCHEME
        self.maps_memory: Final = False
        self._location = location
        self._tcp = tcp
        self._find = find
        self._learned: tuple[str, ...] = ()  # addresses that a server has told
        self._addresses = find()
        self._are_several = bool(location.others)
        self._head = ""  # the server that was last connected to

    def allocate(self, size_bytes: int) -> memoryview:
        """Give plain memory; see `Transport.allocate`."""
        return self._tcp.allocate(size_bytes)

    def listen(self, address: str) -> Listener:
        """Raise UsageError: a client does not listen."""
        raise UsageError(f"nothing listens at {address} but `paceline serve`")

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> Connection:
        """Connect to the server of the namespace; see `Transport.connect`."""
        if address != str(self._location):
            raise UsageError(f"this transport leads to {self._location}, and not to {address}")
        deadline = Deadline.after(timeout_s)
        if self._are_several:
            self._find_head(deadline)
        connection = self.open_connection(EnterFrame(self._location.namespace, identity), deadline.remaining_s())
        if self._are_several and self._head not in ("", self._addresses[0]):
            where = self._addresses[0].removeprefix("tcp://")
            tell(f"namespace '{self._location.namespace}' is served at {where} from now on", NEWS)
        self._head = self._addresses[0]
        return connection

    def learn(self, servers: tuple[str, ...]) -> None:
        """Try these servers, too, where the namespace is served by one of several."""
        self._learned = servers
        self._addresses = tuple(dict.fromkeys((*self._addresses, *servers)))
        self._are_several |= len(servers) > 1

    def try_first(self, address: str) -> None:
        """Try this address before the others."""
        self._addresses = (address, *(other for other in self._addresses if other != address))

    def _find_head(self, deadline: Deadline) -> None:
        """Ask the servers which one serves the namespace, and try that one first; raises PeerError where none does."""
        asked, waiting, problems = set[str](), list(self._addresses), list[str]()
        while waiting:
            one, timeout_s = waiting.pop(0), deadline.remaining_s() / (len(waiting) + 2)
            if one in asked:
                continue
            asked.add(one)
            try:
                standing = ask_standing(self._tcp, one, self._location.namespace, timeout_s)
            except AuthenticationFailed:
                raise
            except PeerError as error:
                problems.append(f"{one}: {error}")
                continue
            if standing.is_head:
                self.try_first(one)
                return
            problems.append(f"{one}: another server serves it")
            waiting = [standing.head, *waiting] if standing.head else waiting
        self._look_up_again()
        raise ConnectionLost(f"no server of {self._location} serves it now ({'; '.join(problems)})")

    def open_connection(self, frame: EnterFrame, timeout_s: float) -> Connection:
        """Connect to the first address that leads there; raises what went wrong at the last one.

        Each has an equal part of the time that is left, so that one that drops packets leaves some to the others.
        """
        deadline, identity = Deadline.after(timeout_s), encode(frame)
        for number, one in enumerate(self._addresses):
            num_left = len(self._addresses) - number
            try:
                connection = self._tcp.connect(one, identity, timeout_s=deadline.remaining_s() / num_left)
            except AuthenticationFailed:
                raise
            except PeerError:
                if num_left == 1:
                    self._look_up_again()
                    raise
            else:
                self.try_first(one)
                return connection
        raise ProtocolBug(f"{self._location} has no address")

    def _look_up_again(self) -> None:
        """Try the addresses that the hosts have now, and those that were learned, the next time."""
        with suppress(UsageError):  # no address is known at the moment: those from before may do
            self._addresses = tuple(dict.fromkeys((*self._find(), *self._learned)))


class ServeEntry(msgspec.Struct, frozen=True):
    """An admitted client: the transport to its namespace, and its rank there."""

    transport: NamespaceTransport
    admitted: EnterAccepted


def enter_namespace(location: ServeUrl, access: ServerCredentials, rank: int | None, workers: int | None) -> ServeEntry:
    """Ask the server to admit this client as a worker; blocks until the gateway has answered.

    Raises:
        UsageError: the host has no address, or the credentials are not valid.
        PeerError: the server does not answer, or refuses this client; the message says what to do.
    """
    _wait_known(location)
    transport = NamespaceTransport(location, access.transport(), partial(addresses_of, location))
    deadline = Deadline.after(CONNECT_TIMEOUT_S)
    while True:
        answer = _ask(transport, location, access, rank, workers)
        if isinstance(answer, EnterAccepted):
            transport.learn(answer.servers)
            return ServeEntry(transport, answer)
        if not isinstance(answer, EnterElsewhere) or not answer.address or not deadline.remaining_s():
            reason = "" if isinstance(answer, NamespaceStanding) else answer.reason
            raise Refused(f"{location} does not let this client in: {reason or 'it answers something else'}")
        transport.try_first(answer.address)
        time.sleep(min(LOOKUP_PAUSE_S, deadline.remaining_s()))


def _ask(
    transport: NamespaceTransport, location: ServeUrl, access: ServerCredentials, rank: int | None, workers: int | None
) -> Answer:
    """Ask the first server that answers to admit this client, and return its answer."""
    try:
        connection = transport.open_connection(
            EnterFrame(location.namespace, ask=EnterRequest(rank, workers, __version__)), CONNECT_TIMEOUT_S
        )
    except CertificateRefused as error:
        raise CertificateRefused(f"{location} does not let this client in: {error}") from error
    except AuthenticationFailed as error:
        raise AuthenticationFailed(
            f"{location} does not let this client in: {error}. Its token is the file `token` in the folder that the "
            "server was given as --state or --keys"
        ) from error
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{location} does not answer: {error}. {_advice(access)}") from error
    except PeerError as error:
        raise type(error)(f"cannot reach {location}: {error}. {_advice(access)}") from error
    try:
        return _receive_answer(connection, location)
    finally:
        connection.close()


def _wait_known(location: ServeUrl) -> None:
    """Block until a host has an address: names of new machines become known some time after those."""
    deadline = Deadline.after(CONNECT_TIMEOUT_S)
    while True:
        try:
            addresses_of(location)
        except UsageError as error:
            if not deadline.remaining_s():
                raise UsageError(f"{error} (tried for {CONNECT_TIMEOUT_S:g} s)") from error
            time.sleep(min(LOOKUP_PAUSE_S, deadline.remaining_s()))
        else:
            return


def addresses_of(location: ServeUrl) -> tuple[str, ...]:
    """Return the addresses of the hosts now; raises UsageError where none is known of any."""
    found, problems = list[str](), list[UsageError]()
    for host, port in location.servers:
        try:
            found += (f"tcp://{format_host_port(address, port)}" for address in look_up(host))
        except UsageError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return tuple(found)


def _receive_answer(connection: Connection, location: ServeUrl) -> Answer:
    try:
        return decode_answer(connection.receive(timeout_s=ADMISSION_TIMEOUT_S).header)
    except DeadlineExceeded as error:
        raise DeadlineExceeded(
            f"{location} has not let this client in within {ADMISSION_TIMEOUT_S:g} s: is it busy with reading or "
            "writing what it keeps?"
        ) from error
    except PeerError as error:
        raise type(error)(
            f"{location} has not said whether it lets this client in: {error}. Look at what `paceline serve` wrote"
        ) from error


def _advice(access: ServerCredentials) -> str:
    keys = "" if access.tls else ", and does it listen without --keys, as this client has none"
    return f"Is `paceline serve` running there, does its --listen name an address that leads here{keys}?"
