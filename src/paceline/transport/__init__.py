"""Carries frames over memory, shared memory, TCP or TLS; knows no message."""

from paceline.transport.base import EMPTY, Connection, Credentials, Frame, Limits, Listener, Place, Transport
from paceline.transport.faulty import FaultCounts, FaultPlan, FaultyTransport
from paceline.transport.memory import MemoryTransport
from paceline.transport.shm import ShmTransport
from paceline.transport.tcp import TcpTransport
from paceline.transport.tls import TlsSettings

__all__ = [
    "EMPTY",
    "Connection",
    "Credentials",
    "FaultCounts",
    "FaultPlan",
    "FaultyTransport",
    "Frame",
    "Limits",
    "Listener",
    "MemoryTransport",
    "Place",
    "ShmTransport",
    "TcpTransport",
    "TlsSettings",
    "Transport",
]
