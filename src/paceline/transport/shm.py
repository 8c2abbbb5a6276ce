"""Shared-memory transport between processes of one user on one machine: a Unix socket, and bodies that both map."""

import os
import socket
import stat
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from errno import EADDRINUSE
from pathlib import Path
from typing import Final, final

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.transport.base import Limits, SocketListener, check_identity, strip_scheme
from paceline.transport.carrier import Carrier
from paceline.transport.channel import SocketChannel
from paceline.transport.deadline import Deadline, seconds
from paceline.transport.handshake import HandshakeResult, LocalHandshake, check_same_user, introduce_within
from paceline.transport.listener import BACKLOG, StreamListener
from paceline.transport.payloads import SharedPayloads
from paceline.transport.rate_limited_log import Notice
from paceline.transport.segments import CreateMemory, Segments, create_memory
from paceline.transport.stream import StreamConnection

# The kernel's limit on the path of a Unix socket, its final zero byte included.
_MAX_PATH_BYTES: Final = 108
_TIMEVAL: Final = struct.Struct("ll")


@final
class ShmTransport:
    """Carries frames over a Unix socket; allocated bodies are shared, not copied.

    Addresses are "shm:///run/job/server-0.sock", with or without the scheme. The directory must be closed to others
    (mode 0700); it is made when missing. "shm://@server-0" names a socket without a file, which ends with its process.
    Both sides must run as the same user and name the same job. When shared memory is not available, bodies go through
    the socket and `notice` is called once with the reason. It is also told of every client that is turned away.

    >>> import tempfile
    >>> transport = ShmTransport("example")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     listener = transport.listen(f"{directory}/server-0.sock")
    ...     worker = transport.connect(listener.address, b"worker 3", timeout_s=5)
    ...     server = listener.accept(timeout_s=5)
    ...     gradient = transport.allocate(4)
    ...     gradient[:] = b"abcd"
    ...     worker.send(b"push", gradient, timeout_s=5)
    ...     received = server.receive(timeout_s=5).body
    ...     gradient[0:1] = b"z"
    ...     print(bytes(received))
    ...     for end in (worker, server, listener):
    ...         end.close()
    b'zbcd'
    """

    def __init__(
        self,
        job: str,
        limits: Limits | None = None,
        *,
        notice: Notice | None = None,
        create_memory: CreateMemory = create_memory,
    ) -> None:
        self.name: Final = "shm"
        self.maps_memory: Final = True
        self._handshake = LocalHandshake(job)
        self._limits = limits or Limits()
        self._notice = notice
        self._segments = Segments(create_memory, _Once(notice))

    def allocate(self, size_bytes: int) -> memoryview:
        """Return memory that peers map, or plain memory when none is available; see `Transport.allocate`."""
        return self._segments.allocate(size_bytes)

    def share(self, memory: memoryview, descriptor: int) -> None:
        """Have peers map this memory; see `SharesMemory.share`."""
        self._segments.share(memory, descriptor)

    def listen(self, address: str) -> SocketListener:
        """Listen on a socket; raises UsageError when it is in use, or the directory of its file open to other users."""
        name = _parse(address)
        if isinstance(name, str):
            return self._serve(f"shm://@{name}", _bind_name(name))
        _check_directory(name.parent)
        return ShmListener(name, self._serve(f"shm://{name}", _bind(name)))

    def listen_again(self, address: str, descriptor: int) -> SocketListener:
        """Go on with a socket that listens already; see `HandsOver.listen_again`."""
        name, listener = _parse(address), self._serve(address, socket.socket(fileno=descriptor))
        return listener if isinstance(name, str) else ShmListener(name, listener)

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> StreamConnection:
        """Connect to a listener; see `Transport.connect`."""
        check_identity(identity)
        name = _parse(address)
        peer = f"shm://{'@' if isinstance(name, str) else ''}{name}"
        deadline = Deadline.after(timeout_s)
        sock = _open(name, peer, timeout_s)
        greeted = introduce_within(
            self._handshake, SocketChannel(sock), identity, peer, timeout_s=timeout_s, deadline=deadline
        )
        return self._welcome(greeted, peer)

    def _serve(self, address: str, sock: socket.socket) -> StreamListener:
        return StreamListener(
            sock,
            address,
            self._handshake,
            self._limits,
            inspect=_inspect,
            welcome=self._welcome,
            notice=self._notice,
        )

    def _welcome(self, greeted: HandshakeResult, peer: str) -> StreamConnection:
        return StreamConnection(greeted, peer, self._limits, SharedPayloads(self._segments, self._limits))


CARRIER: Final = Carrier(
    lambda job: ShmTransport(job.job, notice=job.notice),
    lambda host, folder, name: f"shm://{folder}/{name}.sock",
)


@final
class ShmListener:
    """A `SocketListener` on a socket file, which it removes when closed."""

    def __init__(self, path: Path, listener: StreamListener) -> None:
        self.address: Final = listener.address
        self._path = path
        self._file = path.stat()
        self._listener = listener

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._listener.fileno()

    def accept(self, *, timeout_s: float) -> StreamConnection:
        """Wait for the next connection; see `Listener.accept`."""
        return self._listener.accept(timeout_s=timeout_s)

    def close(self) -> None:
        """Stop listening; see `Listener.close`."""
        self._listener.close()
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), self._file):  # not a successor's
                self._path.unlink()


@final
class _Once:
    """Passes on only the first message."""

    def __init__(self, notice: Notice | None) -> None:
        self._notice = notice
        self._lock = threading.Lock()

    def __call__(self, message: str) -> None:
        with self._lock:
            notice, self._notice = self._notice, None
        if notice is not None:
            notice(message)


def _parse(address: str) -> Path | str:
    """Return the path of a socket file, or the name of a socket without one."""
    plain = strip_scheme(address, "shm")
    if len(plain) > 1 and plain.startswith("@"):
        return plain[1:]
    path = Path(plain)
    if not path.is_absolute() or not path.name:
        raise UsageError(f"{address!r} is not an shm address, expected the full path of a socket file")
    return path


def _check_directory(directory: Path) -> None:
    """Make the directory if it is missing; raises UsageError unless it is ours alone."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{directory} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}, expected 0700 and "
            f"{os.geteuid()}: sockets must lie in a directory closed to other users"
        )


def _bind(path: Path) -> socket.socket:
    """Return a socket listening at `path`, in the place of a dead one if need be."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _reachable(path) as name:
            try:
                sock.bind(name)
            except OSError as error:
                if error.errno != EADDRINUSE:
                    raise
                _remove_dead(path, name)
                sock.bind(name)
            path.chmod(0o600)  # before listen: no client can have connected yet
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen at {path}: {error.strerror}") from error
    except UsageError:
        sock.close()
        raise
    return sock


def _bind_name(name: str) -> socket.socket:
    """Return a socket listening under a name of the kernel, which ends with the socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen at shm://@{name}: {error.strerror or error}") from error
    return sock


def _remove_dead(path: Path, name: str) -> None:
    """Remove a socket file without a listener; raises UsageError if it has one, or is not a socket."""
    if not path.is_socket():
        raise UsageError(f"{path} exists and is not a socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # alive, with a full backlog
    raise UsageError(f"{path} is taken by a living listener: close it first or choose another path")


def _open(name: Path | str, peer: str, timeout_s: float) -> socket.socket:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # too many open files: some may be closed by the next attempt
        raise PeerError(f"cannot connect to {peer}: {error.strerror}") from error
    # A full backlog makes connect wait; only this option bounds that wait on a Unix socket.
    timeout_us = max(1, round(timeout_s * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(timeout_us, 1_000_000)))
    try:
        with nullcontext(f"\0{name}") if isinstance(name, str) else _reachable(name) as reachable:
            sock.connect(reachable)
        check_same_user(sock, peer)
    except BlockingIOError:
        sock.close()
        raise DeadlineExceeded(f"waited {seconds(timeout_s)} for {peer} to take the connection") from None
    except (ConnectionRefusedError, FileNotFoundError):
        sock.close()
        raise PeerError(f"no listener at {peer}: the server is not up yet, gone, or elsewhere") from None
    except OSError as error:
        sock.close()
        raise PeerError(f"cannot connect to {peer}: {error.strerror}") from error
    except (PeerError, UsageError):
        sock.close()
        raise
    return sock


def _inspect(sock: socket.socket) -> str:
    return f"process {check_same_user(sock, 'a client')}"


@contextmanager
def _reachable(path: Path) -> Generator[str]:
    """Yield a name of `path` that is short enough for a socket: itself, or relative to its open directory."""
    if len(os.fsencode(path)) < _MAX_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = f"/proc/self/fd/{directory}/{path.name}"
        if len(os.fsencode(name)) >= _MAX_PATH_BYTES:
            raise UsageError(f"the socket name {path.name!r} is too long: choose a shorter one")
        yield name
    finally:
        os.close(directory)
