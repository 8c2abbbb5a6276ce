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
from typing import Annotated, Final

from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress
from turns import BENCHMARKS, PlayFailed, Side, Stage
from wire_ends import KINDS, TIMEOUT_S, TOKEN_NAME, End, Kind, connect

from paceline.launch.spec import write_token

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
            token = _make_token(stage)
            command = [sys.executable, str(BENCHMARKS / "wire_receiver.py"), "{stage}", str(stage.folder)]
            receiver = stage.start("receiver", command, 1)
            results = {num: measure(receiver, token, num, rounds) for num in (1, MANY)}
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    iperf = Sample.of([_iperf() for _ in range(rounds)]).median if shutil.which("iperf3") else None
    if not json:
        tell(results, iperf)
    print_json(summary(results, iperf))
    return 0


def measure(receiver: Side, token: bytes, num_connections: int, num_rounds: int) -> list[Wire]:
    """Open connections of each kind and use them in turn."""
    progress(f"Measuring {num_connections} connection{'s' * (num_connections > 1)} of each kind")
    wires = [_open(receiver, kind, token, num_connections) for kind in KINDS]
    with ThreadPoolExecutor(num_connections) as threads:
        for number in range(num_rounds + 1):
            for each in wires:
                one_way, round_trip = _one_way(receiver, each, threads), _round_trip(receiver, each)
                if number:  # the first is the warm-up
                    each.bytes_per_s.append(one_way)
                    each.round_trip_s.append(round_trip)
    for each in wires:
        for end in each.ends:
            end.close()
        receiver.ask("close", each.kind)
    return wires


def tell(results: dict[int, list[Wire]], iperf_bytes_per_s: float | None) -> None:
    """Print what was measured as a table."""
    print(f"between two processes of one machine; {machine()}")
    for num_connections, wires in results.items():
        print(f"{num_connections} connection{'s' * (num_connections > 1)}:")
        for each in wires:
            rate = Sample.of([rate / 1e9 for rate in each.bytes_per_s])
            trip = Sample.of([1e6 * trip for trip in each.round_trip_s])
            print(f"  {each.kind:<9} one way {rate.text(' GB/s', 2):<26} round trip of 64 B {trip.text(' us')}")
    if iperf_bytes_per_s is None:
        print("iperf3 is not here, so the line's rate is that of the raw socket loop")
    else:
        print(f"iperf3, one stream: {iperf_bytes_per_s / 1e9:.2f} GB/s")


def summary(results: dict[int, list[Wire]], iperf_bytes_per_s: float | None) -> dict[str, object]:
    """Return the ratios to plain sockets, each of measurements of the same round."""
    by_kind = {num: {each.kind: each for each in wires} for num, wires in results.items()}
    one, many = by_kind[1], by_kind[MANY]
    rate = Sample.of(one["tcp"].bytes_per_s).median
    return {
        "name": "wire",
        "tcp_fraction": rate / iperf_bytes_per_s if iperf_bytes_per_s else _fraction(one["tcp"], one["raw tcp"]),
        "against": "iperf3" if iperf_bytes_per_s else "raw socket loop",
        "tcp_raw_fraction": _fraction(one["tcp"], one["raw tcp"]),
        "rtt_ratio": _slowness(one["tcp"], one["raw tcp"]),
        f"tcp_fraction_{MANY}": _fraction(many["tcp"], many["raw tcp"]),
        f"rtt_ratio_{MANY}": _slowness(many["tcp"], many["raw tcp"]),
        "unix_fraction": _fraction(one["unix"], one["raw unix"]),
        "unix_rtt_ratio": _slowness(one["unix"], one["raw unix"]),
        "gb_per_s": {kind: Sample.of(each.bytes_per_s).median / 1e9 for kind, each in one.items()},
        "rtt_us": {kind: 1e6 * Sample.of(each.round_trip_s).median for kind, each in one.items()},
    }


def _make_token(stage: Stage) -> bytes:
    write_token(stage.folder)
    return (stage.folder / TOKEN_NAME).read_bytes()


def _open(receiver: Side, kind: Kind, token: bytes, num_connections: int) -> Wire:
    size_bytes = FRAME_BYTES[num_connections]
    address = receiver.ask("listen", kind).answers[0]
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(lambda: [connect(kind, address, token, size_bytes) for _ in range(num_connections)])
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


def _fraction(ours: Wire, raw: Wire) -> float:
    return Sample.of([a / b for a, b in zip(ours.bytes_per_s, raw.bytes_per_s, strict=True)]).median


def _slowness(ours: Wire, raw: Wire) -> float:
    return Sample.of([a / b for a, b in zip(ours.round_trip_s, raw.round_trip_s, strict=True)]).median


def _iperf() -> float:
    """Return the bytes a second that iperf3 moves over one stream."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()  # it says that it listens
        client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", str(IPERF_S), "--json"]
        report = subprocess.run(client, check=True, capture_output=True, timeout=TIMEOUT_S).stdout
    finally:
        server.kill()
        server.wait(TIMEOUT_S)
    return json_text.loads(report)["end"]["sum_received"]["bits_per_second"] / 8


if __name__ == "__main__":
    sys.exit(app())
