"""Workers and a server in network namespaces of their own, joined by lines whose rate the kernel limits both ways.

A namespace "server" has a bridge; every worker's namespace has a line to it. What each end sends goes through a token
bucket (`tbf`): traffic over the loopback interface would not. All addresses are of 127.9.0.0/24, which Paceline takes
for this machine's, as they are; they do lead over the lines, since the kernel is told so (`route_localnet`) and no
namespace has a loopback interface that is up.
"""

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

_PREFIX: Final = "paceline"
_BURST_KB: Final = 64  # less would cut the bundles of segments that the kernel hands down at once
_TIMEOUT_S: Final = 20.0
SERVER_HOST: Final = "127.9.0.1"


class CannotShapeError(Exception):
    """This machine does not let us make namespaces or limit rates."""


@dataclass(slots=True)
class ShapedNetwork:
    """A star of lines; a context manager that takes everything down, also what a killed run has left.

    Args:
        num_workers: how many lines.
        up_mbps: what the workers' ends of the lines may send, each.
        down_mbps: what the server's ends may send, each.
    """

    num_workers: int
    up_mbps: float
    down_mbps: float
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

    @property
    def server(self) -> str:
        """The server's namespace."""
        return f"{self._name}-server"

    def worker(self, rank: int) -> str:
        """Return a worker's namespace."""
        return f"{self._name}-{rank}"

    def command(self, namespace: str, *command: str) -> list[str]:
        """Return what runs a command in a namespace."""
        return ["ip", "netns", "exec", namespace, *command]

    def sent_bytes(self, rank: int) -> tuple[float, int]:
        """Return when, and how many bytes a worker had sent by then, as the token bucket counts: headers included."""
        began = time.monotonic()
        shown = _run("tc", "-n", self.worker(rank), "-s", "-j", "qdisc", "show", "dev", "line")
        return (began + time.monotonic()) / 2, json.loads(shown)[0]["bytes"]

    def _set_up(self) -> None:
        _namespace(self.server)
        _run("ip", "-n", self.server, "link", "add", "bridge", "type", "bridge")
        _address(self.server, "bridge", f"{SERVER_HOST}/24")
        for rank in range(self.num_workers):
            _namespace(self.worker(rank))
            end = ("type", "veth", "peer", "name", "line", "netns", self.worker(rank))
            _run("ip", "link", "add", f"line{rank}", "netns", self.server, *end)
            _run("ip", "-n", self.server, "link", "set", f"line{rank}", "master", "bridge", "up")
            _address(self.worker(rank), "line", f"127.9.0.{10 + rank}/24")
            _limit(self.worker(rank), "line", self.up_mbps)
            _limit(self.server, f"line{rank}", self.down_mbps)

    def _take_down(self) -> None:
        for namespace in (self.server, *map(self.worker, range(self.num_workers))):
            if namespace in _namespaces():
                _run("ip", "netns", "delete", namespace)


def _namespace(name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")


def _address(namespace: str, device: str, address: str) -> None:
    _run("ip", "-n", namespace, "address", "add", address, "dev", device)
    _run("ip", "-n", namespace, "link", "set", device, "up")


def _limit(namespace: str, device: str, mbps: float) -> None:
    rate = ("rate", f"{mbps}mbit", "burst", f"{_BURST_KB}kb", "latency", "1s")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _remove_leftovers() -> None:
    """Delete the namespaces of runs whose process is gone."""
    for name in _namespaces():
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == _PREFIX and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise CannotShapeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
