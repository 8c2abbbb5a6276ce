"""Memory of a process that outlives it: shared memory whose descriptors a second process keeps for the successor.

The process that dies with its memory in use (killed, out of memory) leaves its regions with a `MemoryHolder`, in the
process that started it. The successor connects to the same holder, and maps the same memory again under the same names.
"""

import mmap
import os
import secrets
import socket
import threading
import weakref
from contextlib import suppress
from errno import EMFILE, ENOBUFS, EPIPE, ETIMEDOUT
from typing import Final, Self, final

from paceline.transport.segments import create_memory

_KEEP: Final = b"+"
_DROP: Final = b"-"
_ALL: Final = b"?"
_END: Final = b"."
_KEPT: Final = b"y"
_REFUSED: Final = b"n"
_MESSAGE_BYTES: Final = 16 * 1024  # more than a name has
_TIMEOUT_S: Final = 10.0


@final
class _Requests:
    """Asks the holder for one thing at a time, from any thread."""

    def __init__(self, holder: socket.socket) -> None:
        self._holder = holder
        self._lock = threading.Lock()
        self._is_silent = False  # a request was not answered

    def ask(self, request: bytes, *descriptors: int) -> None:
        """Send a request, and wait until the holder has done it; raises OSError.

        After a request without an answer there are no more: its answer could be taken for that of another.
        """
        with self._lock:
            if self._is_silent:
                raise OSError(ETIMEDOUT, "the process that keeps shared memory has not answered")
            try:
                socket.send_fds(self._holder, [request], list(descriptors))
                answer, _ = _receive(self._holder)
            except TimeoutError as error:
                self._is_silent = True
                raise OSError(ETIMEDOUT, "the process that keeps shared memory has not answered") from error
        if answer != _KEPT:
            raise OSError(ENOBUFS, "the process that is to keep shared memory cannot take more of it")


@final
class LastingMemory:
    """Regions of shared memory by name, which outlive this process. Used by one thread at a time, as is each `part`.

    Args:
        holder: this process's end of a `MemoryHolder`, which lives in another process.

    Example:
        >>> with MemoryHolder() as holder:
        ...     holder.start()
        ...     first = LastingMemory.connect(holder.theirs)
        ...     first.region("values", 4)[:] = b"abcd"
        ...     del first  # as if its process had died
        ...     second = LastingMemory.connect(holder.theirs)
        ...     print(second.is_successor, bytes(second.region("values", 4)))
        True b'abcd'
    """

    def __init__(self, requests: _Requests, found: dict[str, int], prefix: str = "") -> None:
        self._requests = requests
        self._descriptors = found
        self._prefix = prefix  # of all names, as the holder knows them
        self._mapped: dict[str, memoryview] = {}
        self.is_successor: Final = bool(found)
        weakref.finalize(self, _close_all, found).atexit = False

    @staticmethod
    def connect(holder: socket.socket, timeout_s: float = _TIMEOUT_S) -> "LastingMemory":
        """Take over what a predecessor has left; raises OSError, TimeoutError among them, when the holder is gone."""
        holder.settimeout(timeout_s)
        mark = secrets.token_bytes(8)
        holder.send(_ALL + mark)
        found: dict[str, int] = {}
        try:
            while True:
                message, descriptors = _receive(holder)
                if not message:
                    raise OSError(EPIPE, "the process that keeps shared memory has ended")
                if message == _END + mark:
                    return LastingMemory(_Requests(holder), found)
                if not message.startswith(mark):  # an answer that the predecessor has not read any more
                    _close_all(dict(enumerate(descriptors)))
                elif not descriptors:
                    raise OSError(EMFILE, os.strerror(EMFILE))
                else:
                    found[message.removeprefix(mark).decode()] = descriptors[0]
        except BaseException:
            _close_all(found)
            raise

    @property
    def names(self) -> list[str]:
        """The names of all that is there."""
        return list(self._descriptors)

    def part(self, prefix: str) -> "LastingMemory":
        """Return the regions whose names begin so, as memory of their own with shorter names; they are gone here."""
        mine = [name for name in self._descriptors if name.startswith(prefix)]
        found = {name.removeprefix(prefix): self._descriptors.pop(name) for name in mine}
        return LastingMemory(self._requests, found, self._prefix + prefix)

    def has(self, name: str) -> bool:
        """Return whether there is a region of this name."""
        return name in self._descriptors

    def region(self, name: str, size_bytes: int, *, sparse: bool = False) -> memoryview:
        """Return a region, writable: of zeros if it is new, else as it was left and of the size that it has.

        Of a `sparse` one, what was never written takes no memory.

        Raises:
            OSError: there is no memory, or the holder cannot keep it.
        """
        if name not in self._mapped:
            descriptor = self.file(name, size_bytes, sparse=sparse)
            self._mapped[name] = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
        return self._mapped[name]

    def file(self, name: str, size_bytes: int, *, sparse: bool = False) -> int:
        """Return the descriptor behind a region, which this object owns; its first `size_bytes` are there.

        Raises as `region` does.
        """
        if name not in self._descriptors:
            self._give(name, create_memory(size_bytes, sparse=sparse))
        return self._descriptors[name]

    def keep(self, name: str, descriptor: int) -> None:
        """Have something else outlive this process, too, such as a socket, under a new name: see `descriptor`.

        The descriptor stays the caller's. Raises OSError: the holder cannot keep it.
        """
        self._give(name, os.dup(descriptor))

    def descriptor(self, name: str) -> int:
        """Return a descriptor of what is there under this name, which the caller owns."""
        return os.dup(self._descriptors[name])

    def drop(self, name: str) -> None:
        """Release a region, which is freed with its last view; does nothing if there is none. Raises OSError."""
        if name in self._descriptors:
            self._requests.ask(_DROP + self._named(name))
            self._mapped.pop(name, None)
            os.close(self._descriptors.pop(name))

    def drop_all(self) -> None:
        """Release all regions. Raises OSError."""
        for name in self.names:
            self.drop(name)

    def _give(self, name: str, descriptor: int) -> None:
        try:
            self._requests.ask(_KEEP + self._named(name), descriptor)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptors[name] = descriptor

    def _named(self, name: str) -> bytes:
        return f"{self._prefix}{name}".encode()


@final
class MemoryHolder:
    """Keeps the memory of one process at a time, and passes it on to its successor. A context manager.

    `theirs` is the end of the process that uses the memory. Each of them inherits it, and this process keeps it, too.

    Args:
        most_regions: how many it keeps at once, a descriptor each; it refuses more.
    """

    def __init__(self, most_regions: int = 256) -> None:
        # Whole messages, and the end of this process is seen by the other.
        self._requests, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._most_regions = most_regions
        self._kept: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="paceline-memory", daemon=True)

    def __enter__(self) -> Self:
        """Return this holder."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def start(self) -> None:
        """Answer from now on, in a thread of its own."""
        self._thread.start()

    def read(self, name: str, num_bytes: int) -> bytes:
        """Return the first bytes of a region; b"" if there is none of this name."""
        with self._lock:
            descriptor = self._kept.get(name.encode())
            return b"" if descriptor is None else os.pread(descriptor, num_bytes, 0)

    def adopt(self, name: str, descriptor: int) -> None:
        """Keep something from now on, as if the other process had asked for it; the descriptor stays the caller's."""
        with self._lock:
            _close_all({name: self._kept.pop(name.encode())} if name.encode() in self._kept else {})
            self._kept[name.encode()] = os.dup(descriptor)

    def names(self) -> list[str]:
        """Return the names of all that is kept."""
        with self._lock:
            return [name.decode() for name in self._kept]

    def drop(self, name: str) -> None:
        """Let go of something."""
        with self._lock:
            _close_all({name: self._kept.pop(name.encode())} if name.encode() in self._kept else {})

    def close(self) -> None:
        """Release all memory."""
        with suppress(OSError):  # it has ended already
            self._requests.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._requests.close()
        self.theirs.close()
        with self._lock:
            _close_all(self._kept)
            self._kept = {}

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                message, descriptors = _receive(self._requests)
                if not message:
                    return
                self._answer(message[:1], message[1:], descriptors)

    def _answer(self, request: bytes, name: bytes, descriptors: list[int]) -> None:
        if request == _ALL:
            with self._lock:
                known = list(self._kept)
            for each in known:
                self._pass_on(name, each)
            self._requests.send(_END + name)
            return
        with self._lock:
            before = {name: self._kept.pop(name)} if name in self._kept else {}
            if request == _KEEP and len(descriptors) == 1 and len(self._kept) < self._most_regions:
                self._kept[name] = descriptors.pop()
            _close_all(before)
            _close_all(dict(enumerate(descriptors)))
            is_done = request == _DROP or name in self._kept
        self._requests.send(_KEPT if is_done else _REFUSED)

    def _pass_on(self, mark: bytes, name: bytes) -> None:
        """Send a descriptor, unless it was dropped meanwhile: its number may stand for another file by then."""
        with self._lock:
            if name not in self._kept:
                return
            descriptor = os.dup(self._kept[name])
        try:
            socket.send_fds(self._requests, [mark + name], [descriptor])  # without the lock, as it may block
        finally:
            os.close(descriptor)


def _receive(end: socket.socket) -> tuple[bytes, list[int]]:
    message, descriptors, _, _ = socket.recv_fds(end, _MESSAGE_BYTES, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return message, descriptors


def _close_all(descriptors: dict[str, int] | dict[bytes, int] | dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
