"""Address of a standalone server, and the credentials of server and clients: the token, or certificates."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from paceline.errors import UsageError
from paceline.job.credentials.holders import Holder, TokenFiles, tls_settings
from paceline.job.folders import check_private
from paceline.job.machines import format_host_port, is_loopback, parse_host_port
from paceline.job.spec import TOKEN_NAME, write_token
from paceline.notices import tell
from paceline.transport.base import MIN_TOKEN_BYTES, Credentials, Secret
from paceline.transport.tcp import TcpTransport
from paceline.transport.tls import TlsSettings

JOB: Final = "paceline serve"  # name in the proof of the token

PathLike = Path | str
ClientRole = Literal["worker", "reader", "relay"]
SCHEME: Final = "paceline"
DEFAULT_NAMESPACE: Final = "default"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ServerCredentials(msgspec.Struct, frozen=True):
    """Credentials of one side."""

    secret: Secret
    tls: TlsSettings | None = None

    def transport(self, notice: Callable[[str], None] = tell) -> TcpTransport:
        """Make the carrier; `notice` gets a line for each refused peer. Raises UsageError for unusable certificates."""
        return TcpTransport(self.secret, tls=self.tls, notice=notice)


def server_access(host: str, state: Path, keys: Path | None, notice: Callable[[str], None] = tell) -> ServerCredentials:
    """Return the credentials of a server that listens at this host; makes a token if it needs one.

    `notice` gets a line when certificates are about to expire.

    Raises:
        UsageError: other machines could reach it and there are no keys, or the keys are unusable: other users can read
            them, or they are not valid now.
    """
    if keys is not None:
        return _access_by_keys(keys, Holder("server", 0), notice)
    _require_loopback(host, "serve", "connect", "worker")
    if not (state / TOKEN_NAME).exists():
        write_token(state)
    check_private(state, [state / TOKEN_NAME])
    return ServerCredentials(TokenFiles(state, JOB))


def relay_access(
    host: str, secret: Callable[[], Secret], keys: Path | None, notice: Callable[[str], None] = tell
) -> ServerCredentials:
    """Return the credentials of a relay that listens at this host; `secret` makes those for readers on this machine.

    Raises:
        UsageError: as `server_access` does; or `keys` has no certificate for a relay.
    """
    if keys is not None:
        return _access_by_keys(keys, find_holder(keys, None, "relay"), notice)
    _require_loopback(host, "relay", "subscribe", "reader")
    return ServerCredentials(secret())


def _access_by_keys(keys: Path, holder: Holder, notice: Callable[[str], None]) -> ServerCredentials:
    from paceline.job.credentials.key_store import check_keys

    access = ServerCredentials(TokenFiles(keys, JOB), tls_settings(keys, holder))
    soon = check_keys(keys, holder)
    if soon:
        notice(soon)
    return access


def _require_loopback(host: str, command: str, call: str, client: ClientRole) -> None:
    """Raise UsageError where other machines could reach a listener that has no certificates."""
    if not is_loopback(host):
        raise UsageError(
            f"{host} is not a loopback address: who listens where other machines reach it needs certificates, and so "
            f"do its clients. Make them once with `paceline keys make KEYS`, {command} with --keys KEYS, and carry "
            f"what `paceline keys issue KEYS {client}-0 --out FOLDER` writes to the machine of each client, for "
            f"{call}(..., keys=FOLDER); or listen at 127.0.0.1"
        )


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """Credentials that the user of a client gives.

    Args:
        token: the server's token, or its file; by default that of `keys`.
        keys: a folder made by `paceline keys`.
        ca: the certificate of your own authority; then also `certificate` and `key`.
        certificate: of this client.
        key: of this client.
    """

    token: PathLike | bytes | None = field(default=None, repr=False)
    keys: PathLike | None = None
    ca: PathLike | None = None
    certificate: PathLike | None = None
    key: PathLike | None = None

    def access(self, location: ServeUrl, rank: int | None, role: ClientRole = "worker") -> ServerCredentials:
        """Return the credentials for this address and worker, or for any worker; or for a reader or relay.

        Raises:
            UsageError: an argument is missing or not needed.
        """
        own = (self.ca, self.certificate, self.key)
        if self.keys is not None and any(own):
            raise UsageError("connect: give either keys=..., a folder of `paceline keys`, or ca, certificate and key.")
        if any(own) and not all(own):
            raise UsageError("connect: ca, certificate and key belong together: give all three, or keys=...")
        if self.keys is None and self.ca is None and not all(is_loopback(host) for host, _ in location.servers):
            raise UsageError(
                f"{location} is on another machine, which frames reach encrypted alone: give keys=FOLDER, as "
                "`paceline keys issue` writes it, or ca=..., certificate=... and key=..."
            )
        secret = self.secret(location)
        if self.keys is not None:
            return ServerCredentials(secret, tls_settings(Path(self.keys), find_holder(Path(self.keys), rank, role)))
        if self.ca is not None and self.certificate is not None and self.key is not None:
            return ServerCredentials(secret, TlsSettings(Path(self.certificate), Path(self.key), Path(self.ca)))
        return ServerCredentials(secret)

    def secret(self, location: ServeUrl) -> Secret:
        """Return what the processes at this address know; raises UsageError where it is not given."""
        if isinstance(self.token, bytes):
            return Credentials(self.token, JOB)
        if self.token is None and self.keys is not None:
            return TokenFiles(Path(self.keys), JOB)
        if self.token is None:
            raise UsageError(
                f"{location} refuses clients without its token: give token=..., the path of the file `{TOKEN_NAME}` in "
                "the folder that the server was given as --state or --keys, or its bytes"
            )
        try:
            token = Path(self.token).read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the token of {location}, {self.token}: {error.strerror}") from error
        if len(token) < MIN_TOKEN_BYTES:
            raise UsageError(f"{self.token} has {len(token)} bytes, expected {MIN_TOKEN_BYTES}: it is not a token")
        return Credentials(token, JOB)


def find_holder(keys: Path, rank: int | None, role: ClientRole = "worker") -> Holder:
    """Return the holder of the certificate to use: this worker's, else one for any process, else the only one.

    Raises:
        UsageError: there are several and `rank` does not select one, or the only one names no holder.
    """
    names = sorted(path.stem for path in keys.glob(f"{role}-*.pem"))
    wanted = Holder("any") if rank is None else Holder(role, rank)
    if (keys / f"{Holder('any')}.pem").exists() or str(wanted) in names:
        return wanted
    if rank is not None or not names:
        found = f"only for {', '.join(names)}" if names else f"nor for any {role}"
        issue = f"paceline keys issue KEYS {Holder(role, rank or 0)} --out FOLDER"
        raise UsageError(
            f"{keys} has no certificate for {wanted}, {found}: give the rank that a certificate is for, or have one "
            f"made where the keys were made: `{issue}`"
        )
    if len(names) > 1:
        raise UsageError(f"{keys} has certificates of {', '.join(names)}: which {role} is this? Give rank=...")
    return Holder.parse(names[0])


class ServeUrl(msgspec.Struct, frozen=True):
    """The address of a namespace: that of its server, or of several servers that stand in for each other.

    >>> ServeUrl.parse("paceline://node-3:7700/mnist")
    ServeUrl(host='node-3', port=7700, namespace='mnist', others=())
    >>> str(ServeUrl.parse("paceline://[::1]:7700"))
    'paceline://[::1]:7700/default'
    >>> ServeUrl.parse("paceline://node-3:7700,node-4:7700/mnist").others
    (('node-4', 7700),)
    """

    host: str
    port: int
    namespace: str = DEFAULT_NAMESPACE
    others: tuple[tuple[str, int], ...] = ()

    @property
    def servers(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each server."""
        return (self.host, self.port), *self.others

    @staticmethod
    def parse(text: str) -> ServeUrl:
        """Parse an address; raises UsageError."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme != SCHEME:
            raise UsageError(f"{text!r} is not the address of a server of its own, expected {SCHEME}://HOST:PORT/NAME")
        where, _, namespace = rest.partition("/")
        (host, port), *others = map(parse_host_port, where.split(","))
        return ServeUrl(host, port, check_name(namespace or DEFAULT_NAMESPACE), tuple(others))

    def __str__(self) -> str:
        """Return the address as text."""
        return f"{SCHEME}://{','.join(format_host_port(*each) for each in self.servers)}/{self.namespace}"


def check_name(name: str) -> str:
    """Return a valid name of a namespace; raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a namespace: expected 1 to 64 letters, digits, '.', '_' and '-', the "
            "first a letter or digit"
        )
    return name
