"""The machine that a process runs on: its cores, and the addresses at which other machines of a job reach it.

Host names are looked up here, once, and nowhere else; what listens and connects is given addresses.
"""

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Final

import msgspec

from paceline.core.consistency import Consistency
from paceline.errors import UsageError

LOOPBACK: Final = "127.0.0.1"
ANY_ADDRESS: Final = ("0.0.0.0", "::")  # to listen at every address of this machine
LOOKUP_TIMEOUT_S: Final = 1.0
# Addresses that are kept free for examples: the way to them is the way to anywhere.
ANYWHERE: Final = ("192.0.2.1", "2001:db8::1")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_ANY_PORT: Final = 9
_MOST_DIGITS: Final = 5  # of a port


class Machine(msgspec.Struct, frozen=True):
    """A machine: what it is called, and which start of its kernel this is, so that none is taken for a namesake."""

    name: str
    boot: str = ""

    def __str__(self) -> str:
        """Return what it is called."""
        return self.name


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    return Machine(socket.gethostname(), boot)


def is_loopback(host: str) -> bool:
    """Return whether this names the machine that says it, whichever it is.

    >>> is_loopback("localhost"), is_loopback("127.0.1.1"), is_loopback("node-3")
    (True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_host_port(text: str) -> tuple[str, int]:
    """Parse HOST:PORT; raises UsageError.

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
    """Return HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def look_up(host: str) -> list[str]:
    """Return the addresses of a host; an address is its own.

    Blocks for a second at most; raises UsageError when nothing is known by then.
    """
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):  # the latter for a part that is empty, or longer than names have
            found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))

    asking = threading.Thread(target=ask, name=f"paceline-look-up {host}", daemon=True)
    asking.start()
    asking.join(LOOKUP_TIMEOUT_S)  # a name server may take much longer to answer that it knows nothing
    if not found:
        raise UsageError(
            f"no address is known for the host {host!r}, asked for {LOOKUP_TIMEOUT_S:g} s: check its name, or give its "
            "address"
        )
    return list(dict.fromkeys(found))


def own_addresses() -> list[str]:
    """Return the addresses of this machine at which others may reach it, those of version 4 first."""
    import psutil

    told = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if _is_ip(entry.family)]
    useful = {address for address in map(ip_address, told) if not (address.is_loopback or address.is_link_local)}
    return [str(address) for address in sorted(useful, key=lambda address: (address.version, int(address)))]


def own_address(host: str) -> str:
    """Return the address of this machine that the user means by a name, an address or a network (10.1.0.0/16).

    Raises UsageError when it has no such address, or one that other machines cannot reach.
    """
    found = _addresses_in(host) if "/" in host else look_up(host)
    for address in found:
        if _is_here(address) and not is_loopback(address):
            return address
    known = f" (known as {', '.join(found)})" if found else ""
    raise UsageError(
        f"PACELINE_HOST is {host}{known}, at which no other machine reaches this one, {socket.gethostname()}: "
        f"{_has()}. Name one of these"
    )


def address_for_others(master: str | None) -> str:
    """Return the address of this machine that the launcher has told all others, or else the one that leads anywhere.

    Raises UsageError when none is found.
    """
    named = look_up(master) if master is not None and not is_loopback(master) else []
    with suppress(UsageError):
        named += look_up(socket.gethostname())
    for address in named:
        if _is_here(address) and not is_loopback(address):
            return address
    for somewhere in ANYWHERE:
        address = _source(somewhere)
        if address is not None:
            return address
    raise UsageError(
        f"at which address do the other machines reach {socket.gethostname()}? {_has()}. Name one: PACELINE_HOST=..."
    )


def address_towards(there: str, whose: Machine) -> str:
    """Return the address of this machine from which the way leads to another one; nothing is sent.

    Raises UsageError when there is none.
    """
    address = _source(there)
    if address is None:
        raise UsageError(
            f"no way leads from {socket.gethostname()} to {there}, at which {whose} is to be reached: {_has()}. Let "
            f"PACELINE_HOST on {whose} name an address in a network that all machines share"
        )
    return address


def check_family(own: str, there: str, whose: Machine) -> None:
    """Raise UsageError for addresses of different versions of IP: a machine with one may not reach the other."""
    if ip_address(own).version != ip_address(there).version:
        raise UsageError(
            f"PACELINE_HOST is {own} on {socket.gethostname()}, but {whose} is reached at {there}, and all addresses "
            f"of a job are of one version of IP: {_has()}. Name one that is of version {ip_address(there).version}"
        )


def _addresses_in(network: str) -> list[str]:
    try:
        inside = ip_network(network, strict=False)
    except ValueError as error:
        raise UsageError(f"PACELINE_HOST is {network}, expected a name, an address or a network: {error}") from error
    return [address for address in own_addresses() if ip_address(address) in inside]


def _has() -> str:
    found = own_addresses()
    return f"this machine has {', '.join(found)}" if found else "this machine has no address that others could reach"


def _is_ip(family: int) -> bool:
    return family in (socket.AF_INET, socket.AF_INET6)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET if ip_address(address).version == 4 else socket.AF_INET6


def _is_here(address: str) -> bool:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _source(there: str) -> str | None:
    """Return the address that packets to `there` would have as their source."""
    with socket.socket(_family(there), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, _ANY_PORT))  # sends nothing
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if is_loopback(address) else address


def cores_here() -> list[int]:
    """Return the numbers of the cores that this process may run on."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_of(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """Return the cores of one of `count` processes: neighbours, at least one, and not shared while they suffice.

    >>> share_of(range(8), index=1, count=3)
    (2, 3)
    >>> share_of(range(2), index=2, count=4)
    (0,)
    """
    size = max(1, len(cores) // count)
    start = index * size % len(cores)
    return tuple(cores[start : start + size])


def server_threads(consistency: Consistency, num_cores: int, num_servers: int, num_workers: int) -> int:
    """Return with how many threads a server updates a table, so that it never takes cores from workers that compute.

    In lockstep all workers wait while servers update, so these have the machine; else they have what workers leave.

    >>> from paceline.core.consistency import asynchronous, bsp
    >>> [server_threads(c, num_cores=8, num_servers=1, num_workers=6) for c in (bsp(), asynchronous())]
    [8, 2]
    """
    free = num_cores if consistency.lockstep else num_cores - num_workers
    return max(1, free // num_servers)
