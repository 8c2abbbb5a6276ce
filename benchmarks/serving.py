"""Rows read for serving while they are trained: lookups, how late a push shows, and Redis beside it.

    python benchmarks/serving.py [--json] [--rows 1000000] [--width 16] [--lookups 5000]

A worker pushes 100,000 rows a second. This process reads 1,000 random ids at a time from the copy that follows them, as
`paceline.subscribe(...).table(...)` keeps it, over shared memory and over tcp. Rows a second and core are by processor
time of the thread that reads, and those of the feed by that of one that consumes `changes`; the others are wall times,
so other work on the machine makes them worse. The publish lag is from a push's acknowledgement until a reader sees it.
Redis: `MGET` of 1,000 of as many keys, with hiredis, where `redis-server` and the package `redis` are installed.
"""

import argparse
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from measuring import machine, print_json, progress

import paceline
from paceline.versions.rows import SubscribedRows

HERE: Final = Path(__file__).resolve().parent
LOOKUP_IDS: Final = 1000
ROWS_PER_S: Final = 100_000.0
PATIENCE_S: Final = 600.0
FEED_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Reads:
    """What reads took: the 99th percentile of one, in ms, rows a second of processor time, and how late pushes show.

    `fed_per_cpu_s`: rows of changes a second of processor time.
    """

    p99_ms: float
    rows_per_cpu_s: float
    lag_p99_s: float
    fed_per_cpu_s: float


def p99(numbers: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(numbers, n=100, method="inclusive")[98]


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    until_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"the worker did not write {path}")
        time.sleep(0.02)


def read(rows: SubscribedRows, num_rows: int, num_lookups: int) -> tuple[list[float], float, dict[int, float]]:
    """Look rows up; return what each lookup took (s), processor time of all (s), and when each push was seen first."""
    taken, seen, cpu_s = list[float](), dict[int, float](), 0.0
    lookups = [torch.randint(num_rows, (LOOKUP_IDS,)) for _ in range(100)]
    marker = torch.tensor([-1])
    for number in range(num_lookups):
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        rows.pull(lookups[number % len(lookups)])
        cpu_s += time.thread_time() - began_cpu_s
        taken.append(time.perf_counter() - began_s)
        seen.setdefault(int(rows.pull(marker)[0, 0]), time.monotonic())
        time.sleep(0.001)  # requests come now and then, and the follower gets its turn
    return taken, cpu_s, seen


def consume(rows: SubscribedRows) -> float:
    """Take changes for a while; return how many rows they have in a second of processor time."""
    until_s, began_cpu_s, num_rows = time.monotonic() + FEED_S, time.thread_time(), 0
    for change in rows.changes():
        num_rows += 0 if change is None else len(change.ids)
        if time.monotonic() >= until_s:
            break
    return num_rows / (time.thread_time() - began_cpu_s)


def measure(transport: str, num_rows: int, width: int, num_lookups: int) -> Reads:
    """Read while a worker pushes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "paceline", "run", "-n", "1", "--run-dir", str(folder / "run"), "--quiet"]
        command += ["--transport", transport, str(HERE / "serving_worker.py"), name, str(num_rows), str(width)]
        job = subprocess.Popen([*command, str(ROWS_PER_S)], stdout=subprocess.DEVNULL)
        try:
            wait_for(folder / "filled")
            with paceline.subscribe(folder / "run") as reader, reader.table("users") as rows:
                rows.pull([0], timeout_s=PATIENCE_S)
                taken, cpu_s, seen = read(rows, num_rows, num_lookups)
            with paceline.subscribe(folder / "run") as reader, reader.table("users", follow=False) as rows:
                fed_per_cpu_s = consume(rows)
            (folder / "end").touch()
            wait_for(folder / "acknowledged.json")
            job.wait(PATIENCE_S)
            acknowledged = {int(key): at for key, at in json.loads((folder / "acknowledged.json").read_text()).items()}
        finally:
            job.kill()
            job.wait()
    lags = lags_of(acknowledged, seen)
    return Reads(1e3 * p99(taken), LOOKUP_IDS * num_lookups / cpu_s, p99(lags), fed_per_cpu_s)


def lags_of(acknowledged: dict[int, float], seen: dict[int, float]) -> list[float]:
    """Return for each push how long after its acknowledgement it, or a later one, was seen."""
    lags, numbers = list[float](), sorted(seen)
    for number, at_s in sorted(acknowledged.items()):
        later = next((each for each in numbers if each >= number), None)
        if later is not None and number > numbers[0]:
            lags.append(max(0.0, seen[later] - at_s))
            numbers = [each for each in numbers if each >= later]
    return lags


def measure_redis(num_rows: int, width: int, num_lookups: int) -> tuple[float | None, str]:
    """Return the 99th percentile of MGET (ms), or why there is none."""
    server = shutil.which("redis-server")
    if server is None:
        return None, "redis-server is not installed"
    try:
        import redis
    except ImportError:
        return None, "the package redis is not installed"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_ready(port)
        client: Any = redis.Redis(port=port)
        for start in range(0, num_rows, 10_000):
            ids = range(start, min(start + 10_000, num_rows))
            client.mset({each: random.randbytes(4 * width) for each in ids})
        taken = list[float]()
        for _ in range(num_lookups):
            ids = torch.randint(num_rows, (LOOKUP_IDS,)).tolist()
            began_s = time.perf_counter()
            found = client.mget(ids)
            torch.frombuffer(bytearray(b"".join(found)), dtype=torch.float32).view(-1, width)
            taken.append(time.perf_counter() - began_s)
            time.sleep(0.001)
        client.close()
    finally:
        process.kill()
        process.wait()
    return 1e3 * p99(taken), ""


def wait_ready(port: int) -> None:
    """Wait until a server listens."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        if time.monotonic() > until_s:
            raise TimeoutError("redis-server does not listen")
        time.sleep(0.05)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lookups", type=int, default=5000)
    asked = parser.parse_args()
    progress(f"serving {asked.rows} rows of {asked.width} float32 on {machine()}")
    torch.set_num_threads(1)
    shm = measure("shm", asked.rows, asked.width, asked.lookups)
    tcp = measure("tcp", asked.rows, asked.width, asked.lookups)
    redis_ms, why = measure_redis(asked.rows, asked.width, asked.lookups)
    values: dict[str, object] = {
        "name": f"{asked.rows} rows of {asked.width}",
        "million_rows_per_second_per_core": shm.rows_per_cpu_s / 1e6,
        "p99_1000_ids_ms_shm": shm.p99_ms,
        "p99_1000_ids_ms_tcp": tcp.p99_ms,
        "redis_p99_ms": redis_ms,
        "redis_reason": why,
        "publish_lag_p99_s": max(shm.lag_p99_s, tcp.lag_p99_s),
        "feed_million_rows_per_second_per_core": tcp.fed_per_cpu_s / 1e6,
    }
    if asked.json:
        print_json(values)
    else:
        for key, value in values.items():
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
