"""Where a worker meets the others for collective calls: at the address from which it reaches the servers."""

import socket
from ipaddress import ip_address
from typing import Final

LOOPBACK: Final = "127.0.0.1"


def meeting_address(server: str) -> str:
    """Return the own address that leads to a server, so that calls take the line that pushes take.

    Only loopback addresses are taken, of which a machine has many: what travels in calls is not authenticated.

    >>> meeting_address("tcp://127.0.0.1:40123"), meeting_address("shm:///run/job/server-0.sock")
    ('127.0.0.1', '127.0.0.1')
    """
    host, _, port = server.removeprefix("tcp://").rpartition(":")
    if not server.startswith("tcp://") or ":" in host:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        own = str(probe.getsockname()[0])
    return own if ip_address(own).is_loopback else LOOPBACK
