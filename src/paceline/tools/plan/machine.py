"""Hardware to plan for: devices, their number, and the links between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Final

import msgspec

from paceline.errors import UsageError
from paceline.tools.plan.model import Precision
from paceline.tools.plan.quantities import GB, in_gb, parse_bytes, parse_count, parse_seconds

_GIGABITS: Final = re.compile(r"([0-9.]+)(g|m)bit", re.IGNORECASE)
_NETWORK_LATENCY_S: Final = 20e-6
_CPU_FLOPS: Final = 100e9  # of a few cores; a guess, replaced by what is measured
_CPU_MEMORY: Final = 20 * GB  # a second; as much a guess
_MEMORY_SHARE: Final = 1 / 150  # bytes for an operation of a device that is known only by its operations
SHARED_MEMORY: Final = "shm"
_TO_HOST: Final = "pcie4"


class Device(msgspec.Struct, frozen=True):
    """A device: its memory, and its peak operations a second in half precision and in float32.

    `memory_bytes_per_s`: what its memory reads or writes in a second.
    `is_host`: its memory is that of the host, which holds messages too.
    """

    name: str
    memory_bytes: float
    half_flops: float
    full_flops: float
    link: str = SHARED_MEMORY
    is_host: bool = False
    memory_bytes_per_s: float = _CPU_MEMORY

    def flops(self, precision: Precision) -> float:
        """Return the peak operations a second."""
        return self.half_flops if precision == "mixed" else self.full_flops

    def __str__(self) -> str:
        """Return its name with its memory."""
        return f"{self.name} ({in_gb(self.memory_bytes)})"


class NetworkLink(msgspec.Struct, frozen=True):
    """A link: bytes a second of a device in each direction, and the latency of a message.

    `is_shared`: memory that both ends map, so nothing is copied and bytes count once for both.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    is_shared: bool = False


_MOST_DEVICES: Final = 1_000_000
_LEAST_SHARE: Final = 1e-6


class Machines(msgspec.Struct, frozen=True):
    """Devices to train on, with their links.

    Args:
        device: device of each rank.
        num_devices: number of devices.
        devices_per_machine: number of devices of a machine.
        link: link between the devices of a machine.
        network: link between machines, for each device.
        server_device: device of a server.
        utilisation: share of its peak rate that a device reaches where memory does not bound it, at most 1.

    Raises:
        UsageError: a number is less than 1, or the share is none.
    """

    device: Device
    num_devices: int
    devices_per_machine: int
    link: NetworkLink
    network: NetworkLink
    server_device: Device
    utilisation: float

    def __post_init__(self) -> None:
        """Validate the numbers."""
        for name, number in (("--devices", self.num_devices), ("--devices-per-machine", self.devices_per_machine)):
            if not 1 <= number <= _MOST_DEVICES:
                raise UsageError(f"{name} is {number}, expected 1 to {_MOST_DEVICES}.")
        if not _LEAST_SHARE <= self.utilisation <= 1:
            raise UsageError(f"--utilisation is {self.utilisation}, expected {_LEAST_SHARE:g} to 1.")

    def flops(self, precision: Precision) -> float:
        """Return the operations a second that a device reaches where memory does not bound it."""
        return self.device.flops(precision) * self.utilisation

    @property
    def num_machines(self) -> int:
        """Number of machines that the devices fill."""
        return ceil(self.num_devices / self.devices_per_machine)

    @property
    def server_link(self) -> NetworkLink:
        """Link between workers and servers: on one machine the host's memory, or the link from a device to it."""
        if self.num_machines > 1:
            return self.network
        return self.link if self.device.is_host else LINKS[_TO_HOST]

    def link_over(self, extent: int) -> NetworkLink:
        """Return the slowest link among this many neighbouring devices."""
        return self.link if extent <= self.devices_per_machine else self.network


DEVICES: Final[Mapping[str, Device]] = {
    device.name: device
    for device in (
        Device("p100-16", 16 * GB, 21.2e12, 10.6e12, "nvlink-p100", memory_bytes_per_s=732 * GB),
        Device("v100-16", 16 * GB, 125e12, 15.7e12, "nvlink-v100", memory_bytes_per_s=900 * GB),
        Device("v100-32", 32 * GB, 125e12, 15.7e12, "nvlink-v100", memory_bytes_per_s=900 * GB),
        Device("a100-40", 40 * GB, 312e12, 19.5e12, "nvlink-a100", memory_bytes_per_s=1555 * GB),
        Device("a100-80", 80 * GB, 312e12, 19.5e12, "nvlink-a100", memory_bytes_per_s=2039 * GB),
        Device("h100-80", 80 * GB, 989e12, 67e12, "nvlink-h100", memory_bytes_per_s=3350 * GB),
    )
}

LINKS: Final[Mapping[str, NetworkLink]] = {
    link.name: link
    for link in (
        NetworkLink(SHARED_MEMORY, 30 * GB, 5e-6, is_shared=True),
        NetworkLink("nvlink-p100", 80 * GB, 5e-6),  # NVLink 1
        NetworkLink("nvlink-v100", 150 * GB, 5e-6),  # NVLink 2
        NetworkLink("nvlink-a100", 300 * GB, 5e-6),  # NVLink 3
        NetworkLink("nvlink-h100", 450 * GB, 5e-6),  # NVLink 4
        NetworkLink("pcie3", 12 * GB, 10e-6),
        NetworkLink("pcie4", 24 * GB, 10e-6),
    )
}


def parse_device(text: str, what: str = "--device") -> Device:
    """Read a device: one of `DEVICES`, cpu:BYTES, or NAME=BYTES.

    Its operations a second may follow the last two, and then the bytes a second of its memory.

    Raises:
        UsageError: it is none of these.

    Example:
        >>> mine = parse_device("mine=24GB:30T:900GB")
        >>> mine.memory_bytes, mine.half_flops, mine.memory_bytes_per_s, mine.is_host
        (24000000000.0, 30000000000000.0, 900000000000.0, False)
    """
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    is_host = text.lower().startswith("cpu:")
    name, _, rest = text.partition(":" if is_host else "=")
    if not rest or not name:
        known = ", ".join(DEVICES)
        raise UsageError(
            f"{what} '{text}' is not known. Expected {known}, cpu:BYTES such as cpu:24GB, or NAME=BYTES such as "
            "mine=24GB; operations a second and bytes a second of its memory may follow, as in mine=24GB:30T:900GB."
        )
    size, _, rates = rest.partition(":")
    flops, _, memory = rates.partition(":")
    rate = parse_count(flops, f"the operations a second of {what}") if flops else _CPU_FLOPS
    guess = _CPU_MEMORY if is_host else rate * _MEMORY_SHARE
    return Device(
        name.lower() if is_host else name,
        parse_bytes(size, f"the memory of {what}"),
        rate,
        rate,
        SHARED_MEMORY if is_host else _TO_HOST,
        is_host,
        parse_bytes(memory, f"the bytes a second of the memory of {what}") if memory else guess,
    )


def parse_link(text: str, what: str) -> NetworkLink:
    """Read a link: one of `LINKS`, a network by its bits such as 10gbit, or BYTES:TIME, a second's bytes and latency.

    Raises:
        UsageError: it is none of these.

    Example:
        >>> parse_link("100mbit", "--network").bytes_per_s
        12500000.0
        >>> parse_link("12.5GB:20ms", "--link").latency_s
        0.02
    """
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    bits = _GIGABITS.fullmatch(text)
    if bits:
        rate = parse_count(f"{bits[1]}{bits[2]}", what) / 8
        return NetworkLink(text.lower(), rate, _NETWORK_LATENCY_S)
    size, _, latency = text.partition(":")
    if not latency:
        raise UsageError(
            f"{what} '{text}' is not known. Expected {', '.join(LINKS)}, a network such as 10gbit or 100mbit, or bytes "
            "a second and latency such as 12.5GB:10us."
        )
    return NetworkLink(text, parse_bytes(size, what), parse_seconds(latency, f"the latency of {what}"))
