"""TCP transport: both sides prove that they hold the job's token, and traffic between machines is encrypted."""

import ipaddress
import socket
from errno import EADDRINUSE, EADDRNOTAVAIL
from typing import Final, final

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.transport.base import Limits, Secret, check_identity, strip_scheme
from paceline.transport.buffers import check_size, fresh_buffer
from paceline.transport.carrier import Carrier
from paceline.transport.channel import SocketChannel
from paceline.transport.deadline import Deadline, seconds
from paceline.transport.handshake import Handshake, HandshakeResult, TokenHandshake, introduce_within
from paceline.transport.listener import BACKLOG, StreamListener
from paceline.transport.payloads import InlinePayloads
from paceline.transport.rate_limited_log import Notice
from paceline.transport.stream import StreamConnection
from paceline.transport.tls import TlsHandshake, TlsSettings

# While nothing is said, the kernel asks whether the other end is there, and gives up when so many questions in a row go
# unanswered, after 11 seconds; while something is on its way, `SilenceLimit` sees to the same.
KEEPALIVE_AFTER_S: Final = 5
KEEPALIVE_EVERY_S: Final = 2
NUM_KEEPALIVES: Final = 3
# Unsent data waits in our queues, where urgent frames can pass it, and not in the kernel's.
_UNSENT_BYTES: Final = 256 << 10


@final
class TcpTransport:
    """Carries frames over TCP; without TLS on the loopback interface alone.

    Addresses are "tcp://127.0.0.1:40123", "tcp://[::1]:40123" or "tcp://localhost:40123", with or without the
    scheme; port 0 listens on a free port. Names other than localhost are not looked up.

    With `tls`, which both sides must have, all of it travels encrypted between holders of certificates, and any IP
    address will do. `notice` is told of every client that is turned away, and why.

    >>> import os
    >>> from paceline.transport.base import Credentials
    >>> transport = TcpTransport(Credentials(token=os.urandom(32), job="example"))
    >>> listener = transport.listen("127.0.0.1:0")
    >>> worker = transport.connect(listener.address, b"worker 3", timeout_s=5)
    >>> server = listener.accept(timeout_s=5)
    >>> worker.send(b"pull", timeout_s=5)
    >>> server.receive(timeout_s=5).header
    b'pull'
    >>> for end in (worker, server, listener):
    ...     end.close()
    """

    def __init__(
        self,
        secret: Secret,
        limits: Limits | None = None,
        *,
        tls: TlsSettings | None = None,
        notice: Notice | None = None,
    ) -> None:
        self.name: Final = "tcp"
        self.maps_memory: Final = False
        self._encrypts = tls is not None
        proof = TokenHandshake(secret)
        self._handshake: Handshake = proof if tls is None else TlsHandshake(tls, proof, secret.job)
        self._limits = limits or Limits()
        self._notice = notice

    def allocate(self, size_bytes: int) -> memoryview:
        """Return plain memory; see `Transport.allocate`."""
        check_size(size_bytes)
        return fresh_buffer(size_bytes)

    def listen(self, address: str) -> StreamListener:
        """Listen on an address; raises UsageError when it is taken, or needs TLS and has none."""
        return self.listen_again(*self.bind(address))

    def bind(self, address: str) -> tuple[str, int]:
        """Return the address and the descriptor, the caller's, of a new socket that listens; raises as `listen`."""
        family, host, port = self._parse(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart past connections in TIME_WAIT
            sock.bind((host, port))
            sock.listen(BACKLOG)
            bound = _format(sock.getsockname())
        except OSError as error:
            sock.close()
            raise _explain_bind(error, host, port) from error
        return f"tcp://{bound}", sock.detach()

    def listen_again(self, address: str, descriptor: int) -> StreamListener:
        """Go on with a socket that listens already; see `HandsOver.listen_again`."""
        return self._serve(address, socket.socket(fileno=descriptor))

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

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> StreamConnection:
        """Connect to a listener; see `Transport.connect`. A refused connection is not tried again."""
        check_identity(identity)
        family, host, port = self._parse(address)
        peer = _format((host, port))
        deadline = Deadline.after(timeout_s)
        sock = _open(family, host, port, timeout_s)
        greeted = introduce_within(
            self._handshake, SocketChannel(sock), identity, peer, timeout_s=timeout_s, deadline=deadline
        )
        return self._welcome(greeted, peer)

    def leaves_machine(self, address: str) -> bool:
        """Return whether frames to this address start from another one; see `LeavesMachine`. Sends nothing."""
        family, host, port = self._parse(address)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, port))
            except OSError:  # there is no way there, as `connect` says
                return False
            return probe.getsockname()[0] != probe.getpeername()[0]

    def _parse(self, address: str) -> tuple[socket.AddressFamily, str, int]:
        """Split an address; raises UsageError when it leads beyond this machine and nothing is encrypted."""
        ip, port = _parse(address)
        if not ip.is_loopback and not self._encrypts:
            raise UsageError(
                f"{ip} is not a loopback address: beyond this machine frames need TLS. Give both sides certificates of "
                "one authority (`paceline keys make` makes them, `tls` takes them), or use 127.0.0.1"
            )
        return (socket.AF_INET if ip.version == 4 else socket.AF_INET6), str(ip), port

    def _welcome(self, greeted: HandshakeResult, peer: str) -> StreamConnection:
        return StreamConnection(greeted, peer, self._limits, InlinePayloads())


def _free_address(host: str, folder: str, name: str) -> str:
    return f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"


CARRIER: Final = Carrier(
    lambda job: TcpTransport(job.secret(), tls=job.tls(), notice=job.notice),
    _free_address,
)


def _open(family: socket.AddressFamily, host: str, port: int, timeout_s: float) -> socket.socket:
    peer = _format((host, port))
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # too many open files: some may be closed by the next attempt
        raise PeerError(f"cannot connect to {peer}: {error.strerror}") from error
    try:
        sock.settimeout(max(timeout_s, 0.001))
        sock.connect((host, port))
        if sock.getsockname() == sock.getpeername():
            # Without a listener, the kernel may connect a socket on that very port to itself.
            raise ConnectionRefusedError
        _tune(sock)
    except TimeoutError:
        sock.close()
        raise DeadlineExceeded(f"waited {seconds(timeout_s)} for {peer} to take the connection") from None
    except ConnectionRefusedError:
        sock.close()
        raise PeerError(f"no listener at {peer}: the server is not up yet, gone, or elsewhere") from None
    except OSError as error:
        sock.close()
        raise PeerError(f"cannot connect to {peer}: {error.strerror}") from error
    return sock


def _inspect(sock: socket.socket) -> str:
    _tune(sock)
    return _format(sock.getpeername())


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_KEEPALIVES)


def _parse(address: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Split an address; raises UsageError unless it is a host and a port."""
    host, separator, port = strip_scheme(address, "tcp").rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 0xFFFF:
        raise UsageError(f"{address!r} is not a TCP address, expected host:port such as 127.0.0.1:40123")
    try:
        ip = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise UsageError(
            f"host {host!r} in {address!r} is not an IP address: use 127.0.0.1, [::1] or localhost (other names are "
            "not looked up)"
        ) from None
    return ip, int(port)


def _format(name: tuple[object, ...]) -> str:
    host, port = str(name[0]), name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _explain_bind(error: OSError, host: str, port: int) -> UsageError:
    if error.errno == EADDRINUSE:
        return UsageError(f"port {port} of {host} is taken{_owner(port)}: choose another port, or 0 for a free one")
    if error.errno == EADDRNOTAVAIL:
        return UsageError(f"this machine has no address {host}")
    return UsageError(f"cannot listen on {_format((host, port))}: {error.strerror}")


def _owner(port: int) -> str:
    """Return which processes listen on a port, as far as this user can see."""
    import psutil

    try:
        entries = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ""
    listening = [entry for entry in entries if entry.status == psutil.CONN_LISTEN and entry.laddr[1:] == (port,)]
    pids = sorted({entry.pid for entry in listening if entry.pid is not None})
    return f" by process {', '.join(map(str, pids))}" if pids else ""
