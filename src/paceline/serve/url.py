"""paceline://HOST:PORT/NAMESPACE: the address of a standalone server and one of its namespaces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from paceline.errors import UsageError

SCHEME: Final = "paceline"
DEFAULT_NAMESPACE: Final = "default"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_DIGITS: Final = 5  # of a port


@dataclass(frozen=True, slots=True)
class ServeUrl:
    """The address of a namespace.

    >>> ServeUrl.parse("paceline://node-3:7700/mnist")
    ServeUrl(host='node-3', port=7700, namespace='mnist')
    >>> str(ServeUrl.parse("paceline://[::1]:7700"))
    'paceline://[::1]:7700/default'
    """

    host: str
    port: int
    namespace: str = DEFAULT_NAMESPACE

    @staticmethod
    def parse(text: str) -> ServeUrl:
        """Read an address; raises UsageError when it is none."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme != SCHEME:
            raise UsageError(f"{text!r} is not the address of a server of its own, expected {SCHEME}://HOST:PORT/NAME")
        where, _, namespace = rest.partition("/")
        host, port = parse_host_port(where)
        return ServeUrl(host, port, check_name(namespace or DEFAULT_NAMESPACE))

    def __str__(self) -> str:
        """Return the address as it is written."""
        return f"{SCHEME}://{format_host_port(self.host, self.port)}/{self.namespace}"


def parse_host_port(text: str) -> tuple[str, int]:
    """Read HOST:PORT; raises UsageError when it is not that.

    >>> parse_host_port("127.0.0.1:7700"), parse_host_port("[::]:0")
    (('127.0.0.1', 7700), ('::', 0))
    """
    host, separator, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_number = port.isascii() and port.isdigit() and len(port) <= _MOST_DIGITS and int(port) <= 0xFFFF
    if not separator or not bare or not is_number or (":" in bare and host == bare):
        raise UsageError(
            f"{text!r} is not HOST:PORT, such as 127.0.0.1:7700, node-3:7700 or, with an address of IPv6, [::1]:7700"
        )
    return bare, int(port)


def format_host_port(host: str, port: int) -> str:
    """Write HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_name(name: str) -> str:
    """Return the name of a namespace; raises UsageError when it cannot be one."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a namespace: expected 1 to 64 letters, digits, '.', '_' and '-', the "
            "first a letter or digit"
        )
    return name
