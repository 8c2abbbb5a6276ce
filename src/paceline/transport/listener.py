"""Listener on a stream socket. Handshakes run in threads of their own, beside `accept`.

A refused client learns at most that its proof is not valid; the owner of the listener gets the reason.

A client sends first. Until then it is one polled descriptor, of which there are at most `max_silent`. At most
`max_half_open` handshakes run at once. When either limit is reached, the address with the most clients loses its
oldest one, so a flood from one address does not lock out clients from others.
"""

import ipaddress
import math
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final, final

from paceline.errors import PacelineError, PeerError
from paceline.transport.accept_queue import AcceptQueue
from paceline.transport.base import Limits
from paceline.transport.channel import OutOfTime, SocketChannel
from paceline.transport.deadline import Deadline
from paceline.transport.handshake import Handshake, HandshakeResult
from paceline.transport.rate_limited_log import Notice, RateLimitedLog
from paceline.transport.stream import StreamConnection

BACKLOG: Final = 512

# A handshake takes about a millisecond of work and three round trips. A longer one makes room where others of the same
# address wait; at a round trip of 150 ms a handshake under TLS takes half of this.
_FAIR_TIME_S: Final = 1.0
# Out of descriptors: wait this long for some to be closed before accepting again.
_ACCEPT_PAUSE_S: Final = 0.05
_MAX_ACCEPTED_AT_ONCE: Final = 64
_LATE: Final = "it did not finish the handshake in time"

# Checks and names a client that just connected; raises PeerError to turn it away.
Inspect = Callable[[socket.socket], str]
Welcome = Callable[[HandshakeResult, str], StreamConnection]


@dataclass(slots=True, eq=False)
class _Client:
    """A client that is connected and has not finished its handshake; `origin` is the address that it comes from."""

    channel: SocketChannel
    descriptor: int
    name: str
    origin: str
    deadline: Deadline
    started_s: float = math.inf  # when its handshake began
    evicted: bool = False


@final
class StreamListener:
    """A `Listener` over a listening stream socket, which it owns."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        handshake: Handshake,
        limits: Limits,
        *,
        inspect: Inspect,
        welcome: Welcome,
        notice: Notice | None,
    ) -> None:
        self.address: Final = address
        self._socket = sock
        self._handshake = handshake
        self._limits = limits
        self._inspect = inspect
        self._welcome = welcome
        self._limited_log = RateLimitedLog(notice)
        self._changed = threading.Condition()
        self._shaking: dict[_Client, None] = {}  # in the order of their beginning
        self._arrived = AcceptQueue[StreamConnection](address)
        self._closed = False
        # Used by the listening thread alone: clients that have said nothing, by descriptor, and those that wait for a
        # place to shake hands in, both in the order of their coming; and the threads of handshakes.
        self._silent: dict[int, _Client] = {}
        self._waiting: list[_Client] = []
        self._greeters: list[threading.Thread] = []
        self._poller = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # to end, to tell later, or as a place is free
        sock.setblocking(False)
        self._poller.register(sock, select.POLLIN)
        self._poller.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._listen, name=f"paceline-listen {address}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def accept(self, *, timeout_s: float) -> StreamConnection:
        """Wait for the next connection; see `Listener.accept`."""
        return self._arrived.accept(timeout_s=timeout_s)

    def close(self) -> None:
        """Stop listening; see `Listener.close`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._arrived.close()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._socket.close()
        for client in [*self._silent.values(), *self._waiting]:
            client.channel.close()
        with self._changed:
            shaking = list(self._shaking)
        for client in shaking:
            client.channel.shut()
        for thread in self._greeters:
            thread.join()
        os.close(self._wake)
        self._limited_log.tell_rest()

    def _listen(self) -> None:
        while not self._closed:
            for descriptor, _ in self._poller.poll(self._patience_ms()):
                if descriptor in self._silent:
                    self._poller.unregister(descriptor)
                    self._waiting.append(self._silent.pop(descriptor))
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._accept_all()
            self._shut_late()
            self._start_handshakes()
            self._limited_log.tell_due()

    def _patience_ms(self) -> float | None:
        """Return how long the listening thread may wait for events; None for ever."""
        clients = [
            *islice(self._silent.values(), 1),
            *self._waiting,
        ]  # the silent are late in the order of their coming
        waits = [client.deadline.remaining_ms() + 1.0 for client in clients]
        if self._waiting:
            with self._changed:
                started = [client.started_s for client in self._shaking if not client.evicted]
            waits += [max(0.0, start_s + _FAIR_TIME_S - time.monotonic()) * 1000 + 1.0 for start_s in started]
        untold_ms = self._limited_log.patience_ms()
        return min(waits if untold_ms is None else [*waits, untold_ms], default=None)

    def _accept_all(self) -> None:
        """Accept clients that wait in the kernel, a limited number at a time so that others have their turn."""
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the client went away before we looked
            except OSError:
                if not self._evict_silent():
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed, _ACCEPT_PAUSE_S)
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        try:
            name = self._inspect(sock)
            origin = _origin(sock)
        except PeerError as error:
            self._complain(error, f"a client was turned away: {error}")
            sock.close()
            return
        except OSError:  # it has gone away
            sock.close()
            return
        if len(self._silent) + len(self._waiting) >= self._limits.max_silent:
            self._evict_silent()
        deadline = Deadline.after(self._limits.handshake_timeout_s)
        self._silent[sock.fileno()] = _Client(SocketChannel(sock), sock.fileno(), name, origin, deadline)
        self._poller.register(sock, select.POLLIN)

    def _evict_silent(self) -> bool:
        """Close the oldest waiting client of the address with the most of them, preferably a silent one."""
        clients = [*self._silent.values(), *self._waiting]
        if not clients:
            return False
        crowded = _most(clients)
        self._turn_away(
            next(client for client in clients if client.origin == crowded),
            "it was one of too many that have yet to shake hands",
        )
        return True

    def _shut_late(self) -> None:
        silent = takewhile(lambda client: client.deadline.remaining_ms() == 0, self._silent.values())
        waiting = (client for client in self._waiting if client.deadline.remaining_ms() == 0)
        for client in [*silent, *waiting]:
            self._turn_away(client, _LATE)

    def _turn_away(self, client: _Client, reason: str) -> None:
        """End a client that has no thread yet."""
        if self._silent.pop(client.descriptor, None) is not None:
            self._poller.unregister(client.descriptor)
        else:
            self._waiting.remove(client)
        client.channel.close()
        self._complain(OutOfTime(), f"{client.name} was turned away: {reason}")

    def _start_handshakes(self) -> None:
        """Start handshakes of clients that have sent something; addresses with the fewest go first."""
        while self._waiting and not self._closed:
            with self._changed:
                shaking = [client for client in self._shaking if not client.evicted]
                is_full = len(self._shaking) >= self._limits.max_half_open
            places = Counter(client.origin for client in shaking)
            client = min(self._waiting, key=lambda each: places[each.origin])  # the first of equals
            if is_full:
                self._make_room(client, shaking, places)
                return
            self._waiting.remove(client)
            self._start(client)

    def _make_room(self, client: _Client, shaking: list[_Client], places: Counter[str]) -> None:
        """End a handshake that has taken too long, or whose address holds more than its share of them."""
        if len(shaking) < self._limits.max_half_open:
            return  # one that was ended is about to give its place back
        crowded = _most(shaking)
        oldest = next(each for each in shaking if each.origin == crowded)
        holds_too_many = places[crowded] > places[client.origin] + 1
        if holds_too_many or time.monotonic() >= oldest.started_s + _FAIR_TIME_S:
            oldest.evicted = True
            oldest.channel.shut()

    def _start(self, client: _Client) -> None:
        thread = threading.Thread(
            target=self._shake_hands, args=(client,), name=f"paceline-greet {client.name}", daemon=True
        )
        client.started_s = time.monotonic()
        with self._changed:
            self._shaking[client] = None
        self._greeters = [*(greeter for greeter in self._greeters if greeter.is_alive()), thread]
        try:
            thread.start()
        except RuntimeError as error:  # this machine gives no more threads
            with self._changed:
                del self._shaking[client]
            self._greeters.remove(thread)
            client.channel.close()
            self._complain(error, f"{client.name} was turned away: {error}")

    def _shake_hands(self, client: _Client) -> None:
        """Admit a client, or close its connection without a reason."""
        connection = None
        try:
            connection = self._welcome(self._handshake.answer(client.channel, client.deadline), client.name)
        except (PacelineError, EOFError, OSError, OutOfTime) as error:
            if not self._closed or isinstance(error, PeerError):  # others may come of the closing itself
                self._complain(error, f"{client.name} was turned away: {_reason(error)}")
        with self._changed:
            del self._shaking[client]
            if connection is None:
                client.channel.close()
            if not self._closed:
                os.eventfd_write(self._wake, 1)
        if connection is not None:
            self._arrived.put(connection)

    def _complain(self, error: Exception, text: str) -> None:
        if not self._limited_log.add(type(error).__name__, text):
            os.eventfd_write(self._wake, 1)


def _origin(sock: socket.socket) -> str:
    """Return the address that limits count by: the network where one host has many addresses (IPv6)."""
    if sock.family == socket.AF_INET:
        return str(sock.getpeername()[0])
    if sock.family == socket.AF_INET6:
        return str(ipaddress.IPv6Network((sock.getpeername()[0].partition("%")[0], 64), strict=False))
    return ""


def _most(clients: Iterable[_Client]) -> str:
    """Return the most frequent origin of these clients."""
    return Counter(client.origin for client in clients).most_common(1)[0][0]


def _reason(error: Exception) -> str:
    """Return why a handshake failed, without text that the client has chosen."""
    if isinstance(error, OutOfTime):
        return _LATE
    if isinstance(error, EOFError | ConnectionError):
        return "it went away before the handshake was done"
    return str(error)
