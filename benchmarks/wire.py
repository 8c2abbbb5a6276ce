"""The carriers beside plain sockets: large frames one way, round trips of small ones, over 1 and 64 connections.

    python benchmarks/wire.py

All connections stay open and take turns, so the ratios are of the same minutes.
"""

import json as json_text
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress
from turns import BENCHMARKS, PlayFailed, Side, Stage
from wire_certificates import Authority
from wire_ends import KINDS, MEMBER, TIMEOUT_S, End, Kind, connect

from paceline.job.spec import write_token

MANY: Final = 64
TOTAL_BYTES: Final = 256 * 2**20  # of one turn, over all connections
FRAME_BYTES: Final = {1: 32 * 2**20, MANY: 4 * 2**20}
NUM_PINGS: Final = 2000  # of one turn
IPERF_S: Final = 1

app = App(name="wire.py", help="Measure the carriers beside plain sockets.", help_format="plaintext")


@dataclass(slots=True)
class Wire:
    """The connections of one kind, and what was measured on them, one number a round."""

    kind: Kind
    ends: list[End]
    frame_bytes: int
    bytes_per_s: list[float] = field(default_factory=list[float])
    round_trip_s: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class Line:
    """What iperf3 moves over one stream, one number a round; none where it is not installed."""

    bytes_per_s: list[float] = field(default_factory=list[float])

    def measure(self) -> None:
        """Run iperf3 once, if it is there."""
        if shutil.which("iperf3"):
            self.bytes_per_s.append(_iperf())


class RawLine:
    """Plain tcp sockets to another process, all used at once: what this machine moves over so many connections."""

    def __init__(self, stage: Stage, num_connections: int) -> None:
        self._receiver = _start_receiver(stage)
        self._wire = _open(self._receiver, "raw tcp", stage.folder, num_connections)
        self._threads = ThreadPoolExecutor(num_connections)

    def bytes_per_s(self) -> float:
        """Send large frames on all connections once."""
        return _one_way(self._receiver, self._wire, self._threads)


@app.default
def wire(*, rounds: int = 9, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Measure all carriers in turn; print rates, round trips and the ratios to plain sockets.

    Parameters
    ----------
    rounds
        Number of measured rounds, after one to warm up.
    json
        Print only one line of JSON on stdout.
    """
    try:
        with Stage() as stage:
            kinds = _prepare(stage.folder)
            receiver = _start_receiver(stage)
            line = Line()
            results = {
                1: measure([_open(receiver, kind, stage.folder, 1) for kind in kinds], receiver, rounds, line),
                MANY: measure([_open(receiver, kind, stage.folder, MANY) for kind in kinds], receiver, rounds),
            }
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    if not json:
        tell(results, line)
    print_json(summary(results, line))
    return 0


def measure(wires: list[Wire], receiver: Side, num_rounds: int, line: Line | None = None) -> list[Wire]:
    """Use the connections of each kind, and the line, in turn; close them in the end."""
    num_connections = len(wires[0].ends)
    progress(f"Measuring {num_connections} connection{'s' * (num_connections > 1)} of each kind")
    with ThreadPoolExecutor(num_connections) as threads:
        for number in range(num_rounds + 1):
            for each in wires:
                one_way, round_trip = _one_way(receiver, each, threads), _round_trip(receiver, each)
                if number:  # the first is the warm-up
                    each.bytes_per_s.append(one_way)
                    each.round_trip_s.append(round_trip)
            if line is not None and number:
                line.measure()
    for each in wires:
        for end in each.ends:
            end.close()
        receiver.ask("close", each.kind)
    return wires


def tell(results: dict[int, list[Wire]], line: Line) -> None:
    """Print what was measured as a table."""
    print(f"between two processes of one machine; {machine()}")
    for num_connections, wires in results.items():
        print(f"{num_connections} connection{'s' * (num_connections > 1)}:")
        for each in wires:
            rate = Sample.of([rate / 1e9 for rate in each.bytes_per_s])
            trip = Sample.of([1e6 * trip for trip in each.round_trip_s])
            print(f"  {each.kind:<9} one way {rate.text(' GB/s', 2):<26} round trip of 64 B {trip.text(' us')}")
    if line.bytes_per_s:
        print(
            f"  iperf3    one way {Sample.of([rate / 1e9 for rate in line.bytes_per_s]).text(' GB/s', 2)}, one stream"
        )
    else:
        print("iperf3 is not here, so the line's rate is that of the raw socket loop")


def summary(results: dict[int, list[Wire]], line: Line) -> dict[str, object]:
    """Return the ratios to plain sockets, each of measurements of the same round."""
    by_kind = {num: {each.kind: each for each in wires} for num, wires in results.items()}
    one, many = by_kind[1], by_kind[MANY]
    against_raw = _fraction(one["tcp"].bytes_per_s, one["raw tcp"].bytes_per_s)
    encrypted: dict[str, object] = {}
    if "tls" in one:
        encrypted["tls_raw_fraction"] = _fraction(one["tls"].bytes_per_s, one["raw tcp"].bytes_per_s)
        encrypted["tls_rtt_ratio"] = _fraction(one["tls"].round_trip_s, one["raw tcp"].round_trip_s)
    return {
        "name": "wire",
        "tcp_fraction": _fraction(one["tcp"].bytes_per_s, line.bytes_per_s) if line.bytes_per_s else against_raw,
        "against": "iperf3" if line.bytes_per_s else "raw socket loop",
        "tcp_raw_fraction": against_raw,
        "rtt_ratio": _fraction(one["tcp"].round_trip_s, one["raw tcp"].round_trip_s),
        f"tcp_raw_fraction_{MANY}": _fraction(many["tcp"].bytes_per_s, many["raw tcp"].bytes_per_s),
        f"rtt_ratio_{MANY}": _fraction(many["tcp"].round_trip_s, many["raw tcp"].round_trip_s),
        **encrypted,
        "unix_fraction": _fraction(one["unix"].bytes_per_s, one["raw unix"].bytes_per_s),
        "unix_rtt_ratio": _fraction(one["unix"].round_trip_s, one["raw unix"].round_trip_s),
        "gb_per_s": {kind: Sample.of(each.bytes_per_s).median / 1e9 for kind, each in one.items()},
        "rtt_us": {kind: 1e6 * Sample.of(each.round_trip_s).median for kind, each in one.items()},
    }


def _prepare(folder: Path) -> list[Kind]:
    """Make the secrets of both processes; return the kinds that can be measured with them."""
    write_token(folder)
    try:
        Authority(folder).issue(MEMBER)
    except ModuleNotFoundError:
        progress("Leaving out tls, since trustme, which makes certificates, is not here: pip install trustme")
        return [kind for kind in KINDS if kind != "tls"]
    return list(KINDS)


def _start_receiver(stage: Stage) -> Side:
    command = [sys.executable, str(BENCHMARKS / "wire_receiver.py"), "{stage}", str(stage.folder)]
    return stage.start("receiver", command, 1)


def _open(receiver: Side, kind: Kind, folder: Path, num_connections: int) -> Wire:
    size_bytes = FRAME_BYTES[MANY if num_connections == MANY else 1]
    address = receiver.ask("listen", kind).answers[0]
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(
            lambda: [connect(kind, address, folder, size_bytes) for _ in range(num_connections)]
        )
        receiver.ask("accept", {"kind": kind, "num": num_connections, "size_bytes": size_bytes})
        return Wire(kind, connecting.result(TIMEOUT_S), size_bytes)


def _one_way(receiver: Side, each: Wire, threads: ThreadPoolExecutor) -> float:
    """Send large frames on all connections at once; return the bytes taken in a second."""
    num_frames = TOTAL_BYTES // each.frame_bytes // len(each.ends)
    asked = {"kind": each.kind, "num": num_frames}
    seconds = _together(receiver, "take", asked, threads, each, lambda end: [end.send() for _ in range(num_frames)])
    return TOTAL_BYTES / seconds


def _together(
    receiver: Side,
    act: str,
    asked: dict[str, object],
    threads: ThreadPoolExecutor,
    each: Wire,
    do: Callable[[End], object],
) -> float:
    """Do something on all our ends while the receiver does its part; return the seconds until both are done."""
    start = time.monotonic()
    doing = [threads.submit(do, end) for end in each.ends]
    receiver.ask(act, asked)
    for done in doing:
        done.result(TIMEOUT_S)
    return time.monotonic() - start


def _round_trip(receiver: Side, each: Wire) -> float:
    """Send small messages to and fro, on one connection after the other; return the median seconds of one."""
    num_each = NUM_PINGS // len(each.ends)
    trips: list[float] = []

    def ping() -> None:
        for _ in range(num_each):
            for end in each.ends:
                start = time.perf_counter()
                end.send_small()
                end.take_small()
                trips.append(time.perf_counter() - start)

    with ThreadPoolExecutor(1) as threads:
        pinging = threads.submit(ping)
        receiver.ask("echo", {"kind": each.kind, "num": num_each})
        pinging.result(TIMEOUT_S)
    return Sample.of(trips).median


def _fraction(ours: list[float], theirs: list[float]) -> float:
    """Return the median ratio of measurements of the same round."""
    return Sample.of([a / b for a, b in zip(ours, theirs, strict=True)]).median


def _iperf() -> float:
    """Return the bytes a second that iperf3 moves over one stream."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-B", "127.0.0.1", "-p", port], stdout=subprocess.DEVNULL)
    try:
        return _iperf_client(port)
    finally:
        server.kill()
        server.wait(TIMEOUT_S)


def _iperf_client(port: str) -> float:
    client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", str(IPERF_S), "--json"]
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:  # at first the server may not listen yet
        done = subprocess.run(client, check=False, capture_output=True, timeout=TIMEOUT_S)
        received = json_text.loads(done.stdout or "{}").get("end", {}).get("sum_received")
        if done.returncode == 0 and received is not None:
            return received["bits_per_second"] / 8
    raise PlayFailed(f"iperf3 measured nothing in {TIMEOUT_S:g} s")


if __name__ == "__main__":
    sys.exit(app())
