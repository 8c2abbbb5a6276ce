"""Accepting over stream sockets: every client shakes hands in a thread of its own, beside `accept`.

A client that is turned away is told at most that its proof does not hold; who runs the listener is told why.

At most `max_half_open` clients shake hands at once. When the places are taken, the next client waits in the kernel's
backlog until one is free, or until the oldest guest has had its fair time and is shown out.
"""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from paceline.errors import ConnectionLost, DeadlineExceeded, PacelineError, PeerError
from paceline.transport.base import Limits
from paceline.transport.channel import OutOfTime, SocketChannel
from paceline.transport.complaints import Complaints, Notice
from paceline.transport.deadline import Deadline
from paceline.transport.security import Greeted, Handshake
from paceline.transport.stream import StreamConnection

BACKLOG: Final = 512

# An honest handshake takes about a millisecond; who takes longer than this makes room when others wait.
_FAIR_TIME_S: Final = 0.25
# Out of descriptors: wait this long for some to be closed before accepting again.
_BREATHER_S: Final = 0.05

# Checks and names a client that just connected; raises PeerError to turn it away.
Inspect = Callable[[socket.socket], str]
Welcome = Callable[[Greeted, str], StreamConnection]


@dataclass(frozen=True, slots=True, eq=False)
class _Guest:
    """A client whose handshake is under way."""

    channel: SocketChannel
    name: str
    since_s: float


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
        self._complaints = Complaints(notice)
        self._changed = threading.Condition()
        self._guests: dict[_Guest, threading.Thread] = {}  # in the order of their coming
        self._arrived: deque[StreamConnection] = deque()
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the doorman: to end, or to tell later
        sock.setblocking(False)
        self._doorman = threading.Thread(target=self._keep_the_door, name=f"paceline-listen {address}", daemon=True)
        self._doorman.start()

    def accept(self, *, timeout_s: float) -> StreamConnection:
        """Wait for the next connection; see `Listener.accept`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or bool(self._arrived), timeout_s):
                raise DeadlineExceeded(f"waited {timeout_s} s for a connection at {self.address}; none came")
            if self._closed:
                raise ConnectionLost(f"the listener at {self.address} was closed")
            return self._arrived.popleft()

    def close(self) -> None:
        """Stop listening; see `Listener.close`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        os.eventfd_write(self._bell, 1)
        self._doorman.join()
        self._socket.close()
        with self._changed:
            guests = dict(self._guests)
        for guest, thread in guests.items():
            guest.channel.shut()
            thread.join()
        os.close(self._bell)
        for connection in self._arrived:
            connection.close()
        self._arrived.clear()
        self._complaints.tell_rest()

    def _keep_the_door(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._bell, select.POLLIN)
        while not self._closed:
            poller.poll(self._complaints.patience_ms())
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._complaints.tell_due()
            self._wait_for_a_place()
            if self._closed:
                return
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                continue  # the client went away before we looked
            except OSError:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _BREATHER_S)
                continue
            self._admit(sock)

    def _wait_for_a_place(self) -> None:
        with self._changed:
            while len(self._guests) >= self._limits.max_half_open and not self._closed:
                oldest = next(iter(self._guests))
                patience_s = oldest.since_s + _FAIR_TIME_S - time.monotonic()
                if patience_s <= 0:
                    oldest.channel.shut()
                self._changed.wait(max(patience_s, 0.01))

    def _admit(self, sock: socket.socket) -> None:
        try:
            name = self._inspect(sock)
        except PeerError as error:
            self._complain(error, f"a client was turned away: {error}")
            sock.close()
            return
        except OSError:  # it has gone away
            sock.close()
            return
        guest = _Guest(SocketChannel(sock), name, time.monotonic())
        thread = threading.Thread(target=self._receive_guest, args=(guest,), name=f"paceline-greet {name}", daemon=True)
        with self._changed:
            self._guests[guest] = thread
        try:
            thread.start()
        except RuntimeError as error:  # this machine gives no more threads
            with self._changed:
                del self._guests[guest]
            guest.channel.close()
            self._complain(error, f"{name} was turned away: {error}")

    def _receive_guest(self, guest: _Guest) -> None:
        """Shake hands; a guest who fails is not told why."""
        connection = None
        try:
            connection = self._greet(guest)
        except (PacelineError, EOFError, OSError, OutOfTime) as error:
            if not self._closed:
                self._complain(error, f"{guest.name} was turned away: {_reason(error)}")
        with self._changed:
            del self._guests[guest]
            if connection is not None and not self._closed:
                self._arrived.append(connection)
            else:
                guest.channel.close()
            self._changed.notify_all()

    def _complain(self, error: Exception, text: str) -> None:
        if not self._complaints.add(type(error).__name__, text):
            os.eventfd_write(self._bell, 1)

    def _greet(self, guest: _Guest) -> StreamConnection:
        greeted = self._handshake.answer(guest.channel, Deadline.after(self._limits.handshake_timeout_s))
        return self._welcome(greeted, guest.name)


def _reason(error: Exception) -> str:
    """Say what went wrong in a handshake, without a word that the client has chosen."""
    if isinstance(error, OutOfTime):
        return "it did not finish the handshake in time"
    if isinstance(error, EOFError | ConnectionError):
        return "it went away before the handshake was done"
    return str(error)
