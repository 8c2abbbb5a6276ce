"""Hosts of their own: lines keep to their rate and can be cut, and a job that runs over them bears it."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from benchmarks.hosted_job import HostedJob, hosted_spec
from benchmarks.shaped_network import CannotShapeError, Line, ShapedNetwork

WORKER = Path(__file__).parent / "worker.py"
PATIENCE_S = 200.0
SINK = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    while connection.recv(65536):
        pass
    connection.sendall(b"all")
    connection.close()
"""
SOURCE = """
import socket, sys, time
began = time.monotonic()
try:
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4]))
except OSError:
    sys.exit("cut")
connection.settimeout(20.0)
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(3) == b"all"
print(time.monotonic() - began)
"""


@contextmanager
def shaped(*lines: Line) -> Iterator[ShapedNetwork]:
    """Make hosts, or skip the test where that is not possible."""
    with ExitStack() as exit_:
        try:
            network = exit_.enter_context(ShapedNetwork(lines))
        except CannotShapeError as problem:
            pytest.skip(str(problem))
        yield network


def send(network: ShapedNetwork, host: int, to: str, port: str, size_bytes: int, patience_s: float) -> float | None:
    """Send bytes from a host to an address; return the seconds, or None if no peer could be reached in time."""
    told = (to, port, str(size_bytes), str(patience_s))
    done = subprocess.run(
        network.command(host, sys.executable, "-c", SOURCE, *told), capture_output=True, text=True, timeout=PATIENCE_S
    )
    return None if done.stderr.strip() == "cut" else float(done.stdout)


def test_lines_keep_to_their_rate_both_ways_and_can_be_cut_and_healed() -> None:
    with shaped(Line(16.0, None), Line(None, None), Line(None, 16.0)) as network:
        sinks = list[subprocess.Popen[str]]()
        try:
            for host in range(3):
                command = network.command(host, sys.executable, "-c", SINK, network.address(host))
                sinks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            ports = [sink.stdout.readline().strip() for sink in sinks if sink.stdout]
            seconds = [
                send(network, source, network.address(sink), ports[sink], 1_000_000, 20.0)
                for source, sink in ((0, 1), (1, 2), (1, 0), (1, 0), (1, 0))
            ]
            assert None not in seconds
            limited_up, limited_down, *free = map(float, seconds)  # type: ignore[arg-type]
            assert min(limited_up, limited_down) > 0.4, "1 MB at 2 MB/s, less what a token bucket lets through at once"
            assert min(free) < min(limited_up, limited_down)
            before = network.sent_bytes(0)[1]
            network.cut(0)
            assert send(network, 1, network.address(0), ports[0], 10, 0.5) is None
            assert send(network, 1, network.address(2), ports[2], 10, 20.0) is not None, "only one line was cut"
            network.heal(0)
            assert send(network, 1, network.address(0), ports[0], 10, 20.0) is not None
            assert before >= 1_000_000
        finally:
            for sink in sinks:
                sink.kill()
                sink.communicate()


def test_a_job_over_hosts_bears_that_a_line_is_cut_for_a_while() -> None:
    with shaped(*[Line(100.0, 100.0)] * 3) as network:
        spec = hosted_spec(num_workers=2, num_servers=1)
        with HostedJob(network, spec, [2], [0, 1], [sys.executable, str(WORKER), "{folder}"]) as job:
            wait_for(job, "ready-0", "ready-1")
            network.cut(1)
            (job.folder / "go").touch()
            server_port = (job.folder / "server-0.address").read_text().rpartition(":")[2]
            assert send(network, 1, network.address(2), server_port, 10, 0.5) is None
            assert not list(job.folder.glob("done-*")), "no clock is finished without worker 1"
            network.heal(1)
            job.wait(PATIENCE_S)
            assert len(list(job.folder.glob("done-*"))) == 2


def wait_for(job: HostedJob, *names: str) -> None:
    """Block until workers have made these files."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not all((job.folder / name).exists() for name in names):
        pause.wait(0.01)
        assert job.running()
        assert time.monotonic() < deadline, f"the workers have not made {names}"
