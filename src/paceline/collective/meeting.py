"""How the workers of a group that are on one machine connect: by sockets that are gone once all are connected."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from platform import machine
from secrets import token_hex
from typing import Final

from paceline.collective.failures import names
from paceline.collective.peers import Peers
from paceline.collective.rounds import SEGMENT_BYTES, SharedRounds, share_segments
from paceline.errors import DeadlineExceeded, PacelineError, PeerError
from paceline.transport.base import Connection, Limits, Listener
from paceline.transport.deadline import Deadline
from paceline.transport.shm import ShmTransport

# Rounds need stores of one processor to be seen in their order by the others, as on these.
_ORDERED: Final = ("x86_64", "AMD64")
_LIMITS: Final = Limits(max_header_bytes=4096)
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class Offer:
    """What a worker offers the others of a group: to connect here, if they are on the same machine.

    Attributes:
        text: what the others are told; empty if shared memory is not available here.
    """

    transport: ShmTransport
    segment: memoryview
    listener: Listener
    text: str

    @staticmethod
    def make(folder: Path) -> Offer | None:
        """Listen in a folder that only this user can read; None where that, or shared memory, is not available."""
        if machine() not in _ORDERED:
            return None
        refusals: list[str] = []
        transport = ShmTransport("collectives", _LIMITS, notice=refusals.append)
        segment = transport.allocate(SEGMENT_BYTES)
        try:
            if refusals:
                return None
            listener = transport.listen(str(folder / f"group-{token_hex(6)}.sock"))
        except (PacelineError, OSError):
            return None
        return Offer(transport, segment, listener, f"{_this_machine()} {listener.address}")

    def accept(self, rank: int, told: list[str], timeout_s: float) -> SharedRounds:
        """Connect to all others, which have told these offers; blocks until all have called this.

        Raises:
            PeerError: a worker is gone, or has not come in time.
        """
        deadline = Deadline.after(timeout_s)
        connections: dict[int, Connection] = {}
        try:
            for other in range(rank):
                connections[other] = self._reach(rank, other, told[other].rpartition(" ")[2], deadline)
            while len(connections) < len(told) - 1:
                self._take_one(connections, rank, len(told), deadline)
        except PeerError:
            for connection in connections.values():
                connection.close()
            raise
        finally:
            self.listener.close()
        peers = Peers(rank, connections)
        try:
            return share_segments(peers, self.segment, deadline)
        except PeerError as error:
            peers.end(str(error))
            raise

    def _reach(self, rank: int, other: int, address: str, deadline: Deadline) -> Connection:
        """Connect to a worker with a lower rank."""
        try:
            return self.transport.connect(address, str(rank).encode(), timeout_s=max(0.001, deadline.remaining_s()))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"worker {rank}: {names([other])} did not connect in time: {error}") from error
        except PeerError as error:
            raise PeerError(f"worker {rank}: {names([other])} is gone: {error}") from error

    def _take_one(self, connections: dict[int, Connection], rank: int, size: int, deadline: Deadline) -> None:
        """Accept the connection of one of the workers with higher ranks."""
        try:
            connection = self.listener.accept(timeout_s=deadline.remaining_s())
        except DeadlineExceeded as error:
            absent = [other for other in range(rank + 1, size) if other not in connections]
            raise DeadlineExceeded(f"worker {rank}: {names(absent)} did not connect in time") from error
        said = connection.identity.decode(errors="replace")
        if not said.isdecimal() or not rank < int(said) < size or int(said) in connections:
            connection.close()
            raise PeerError(f"worker {rank}: a process connected as worker {said!r}, which was not expected")
        connections[int(said)] = connection


def are_together(told: list[str]) -> bool:
    """Return whether all workers are on one machine and offer shared memory there."""
    machines = {text.partition(" ")[0] for text in told}
    return len(machines) == 1 and "" not in machines


def private_folder() -> Path:
    """Make a folder that only this user can read, for a group outside of a job."""
    return Path(tempfile.mkdtemp(prefix="paceline-"))


def _this_machine() -> str:
    """Return what all processes have in common that can reach each other's files, sockets and memory, and no others."""
    try:
        boot = _BOOT.read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("mnt", "net")]
    except OSError:
        return f"{socket.gethostname()}:{os.getpid()}"  # one that no other worker has: Gloo connects them
    return f"{boot}:{spaces[0]}:{spaces[1]}:{os.geteuid()}"
