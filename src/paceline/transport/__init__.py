"""Carries frames over memory, shared memory, TCP or TLS; knows no message.

Other folders use `accept_queue`, `base`, `buffer_pool`, `buffers`, `carrier`, `deadline`, `file_watch`, `frames`,
`lasting_memory`, `memory`, `peer_identity`, `poller`, `segments`, `shm`, `tcp`, `tls`.
"""

from paceline.transport.base import EMPTY, AllocateBody, Connection, Credentials, Frame, Limits, Listener, Transport
from paceline.transport.faulty import FaultCounts, FaultPlan, FaultyTransport
from paceline.transport.memory import MemoryTransport
from paceline.transport.shm import ShmTransport
from paceline.transport.tcp import TcpTransport
from paceline.transport.tls import TlsSettings

__all__ = [
    "EMPTY",
    "AllocateBody",
    "Connection",
    "Credentials",
    "FaultCounts",
    "FaultPlan",
    "FaultyTransport",
    "Frame",
    "Limits",
    "Listener",
    "MemoryTransport",
    "ShmTransport",
    "TcpTransport",
    "TlsSettings",
    "Transport",
]
