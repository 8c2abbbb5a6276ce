"""Where a worker meets the others for collective calls: at the address from which it reaches the servers."""

import socket
from ipaddress import ip_address
from typing import Final

from paceline.errors import UsageError

LOOPBACK: Final = "127.0.0.1"


def meeting_address(server: str, *, plain: bool = False) -> str:
    """Return the own address that leads to a server, so that calls take the line that pushes take.

    Args:
        server: its address.
        plain: whether what travels in calls may leave the machine, though it is neither encrypted nor authenticated.

    Raises:
        UsageError: it would, and may not.

    >>> meeting_address("tcp://127.0.0.1:40123"), meeting_address("shm:///run/job/server-0.sock")
    ('127.0.0.1', '127.0.0.1')
    """
    if not server.startswith("tcp://"):
        return LOOPBACK
    host, _, port = server.removeprefix("tcp://").rpartition(":")
    there = ip_address(host.strip("[]"))
    with socket.socket(socket.AF_INET if there.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect((str(there), int(port)))  # sends nothing
        own = ip_address(str(probe.getsockname()[0]))
    if own.is_loopback:
        return str(own) if own.version == 4 else LOOPBACK
    if not plain:
        raise UsageError(
            "collective calls (all-reduce, fsdp, stages and tensor ranks of a model, patterns) are between machines "
            f"here, from {own} on, and Gloo, which carries them, does not encrypt: whoever is on the network could "
            "read and change them. Let a parameter server carry the updates, or set PACELINE_PLAIN_COLLECTIVES=1 where "
            "everybody on the network is trusted"
        )
    return str(own)
