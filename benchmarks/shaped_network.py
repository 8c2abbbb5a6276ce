"""Hosts in network namespaces of their own, joined by lines whose rate the kernel limits both ways, and which it cuts.

A namespace "switch" has a bridge; every host's namespace has a line to it. What each end sends goes through a token
bucket (`tbf`). All addresses are of 127.9.0.0/24, which Paceline takes for this machine's, as they are; they do lead
over the lines, since the kernel is told so (`route_localnet`) and each host's loopback interface takes 127.0.0.1 only.
Addresses of another network are those of other machines, as they would be.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

_PREFIX: Final = "paceline"
_BURST_KB: Final = 64  # less would cut the bundles of segments that the kernel hands down at once
_TIMEOUT_S: Final = 20.0


class CannotShapeError(Exception):
    """This machine does not let us make namespaces or limit rates."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a host's line carries in megabits a second, from it (up) and to it (down); None is without a limit."""

    up_mbps: float | None = None
    down_mbps: float | None = None


@dataclass(slots=True)
class ShapedNetwork:
    """A star of lines; a context manager that takes everything down, also what a killed run has left.

    Args:
        lines: one a host; hosts are named by their numbers in it.
        queue_ms: how long a full queue in front of a line takes to leave.
        mtu: the largest packet in bytes; of 1500 the headers take 5 %, of 9000 less than 1 %.
        congestion: how TCP finds its rate, such as "reno"; by default as everywhere on this machine.
        network: the first three numbers of all addresses.
    """

    lines: Sequence[Line]
    queue_ms: float = 1000.0
    mtu: int = 1500
    congestion: str | None = None
    network: str = "127.9.0"
    _name: str = field(default_factory=lambda: f"{_PREFIX}-{os.getpid()}")

    def __enter__(self) -> Self:
        """Set everything up; raises CannotShapeError where that is not possible."""
        if os.geteuid() != 0:
            raise CannotShapeError("making network namespaces takes root")
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise CannotShapeError(f"{' and '.join(missing)} (iproute2) cannot be found")
        _remove_leftovers()
        try:
            self._set_up()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Take everything down."""
        self._take_down()

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"{self.network}.{10 + host}"

    def command(self, host: int, *command: str) -> list[str]:
        """Return what runs a command on a host, which is called host-0, say."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host-{host}")
        return ["ip", "netns", "exec", self._namespace(host), *named, *command]

    def signal(self, host: int, number: int) -> None:
        """Send a signal to all that runs on a host."""
        for pid in _run("ip", "netns", "pids", self._namespace(host)).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def cut(self, host: int) -> None:
        """Let nothing through a host's line any more; neither end is told."""
        self._set_line(host, "down")

    def heal(self, host: int) -> None:
        """Let everything through a host's line again."""
        self._set_line(host, "up")

    def sent_bytes(self, host: int) -> tuple[float, int]:
        """Return when, and how many bytes a host had sent by then, as its token bucket counts: headers included."""
        began = time.monotonic()
        shown = _run("tc", "-n", self._namespace(host), "-s", "-j", "qdisc", "show", "dev", "line")
        return (began + time.monotonic()) / 2, json.loads(shown)[0]["bytes"]

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def _namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _set_line(self, host: int, state: str) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"line{host}", state)

    def _set_up(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, line in enumerate(self.lines):
            self._add_host(host)
            self._limit(self._namespace(host), "line", line.up_mbps)
            self._limit(self._switch, f"line{host}", line.down_mbps)

    def _add_host(self, host: int) -> None:
        namespace, mtu = self._namespace(host), ("mtu", str(self.mtu))
        _run("ip", "netns", "add", namespace)
        settings = ["conf.all.route_localnet=1"]
        if self.congestion is not None:
            settings.append(f"tcp_congestion_control={self.congestion}")
        for setting in settings:
            _run("ip", "netns", "exec", namespace, "sysctl", "-qw", f"net.ipv4.{setting}")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "address", "delete", "127.0.0.1/8", "dev", "lo")
        _run("ip", "-n", namespace, "address", "add", "127.0.0.1/32", "dev", "lo")
        end = ("type", "veth", "peer", "name", "line", *mtu, "netns", namespace)
        _run("ip", "link", "add", f"line{host}", *mtu, "netns", self._switch, *end)
        _run("ip", "-n", self._switch, "link", "set", f"line{host}", "master", "bridge", "up")
        _run("ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "line")
        _run("ip", "-n", namespace, "link", "set", "line", "up")

    def _limit(self, namespace: str, device: str, mbps: float | None) -> None:
        if mbps is not None:
            rate = ("rate", f"{mbps}mbit", "burst", f"{_BURST_KB}kb", "latency", f"{self.queue_ms}ms")
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def _take_down(self) -> None:
        left = _namespaces()
        for namespace in (self._switch, *map(self._namespace, range(len(self.lines)))):
            if namespace in left:
                _run("ip", "netns", "delete", namespace)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _remove_leftovers() -> None:
    """Delete the namespaces of runs whose process is gone."""
    for name in _namespaces():
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            try:
                _run("ip", "netns", "delete", name)
            except CannotShapeError:
                if name in _namespaces():  # else another process that cleans up was faster
                    raise


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise CannotShapeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
