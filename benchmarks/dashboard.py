"""What the dashboard takes of a core while it shows a large job, with a page that is open: on made-up records.

    python benchmarks/dashboard.py [--workers 64] [--seconds 3600] [--json]

Each second of the job its workers and servers append their records to their traces, as under bsp with five steps a
second; then the dashboard reads them and tells the page, as it does each second. Counted is the processor time of all
threads that read and tell, not that of the records' making. The page is a client that reads the stream and drops it.
"""

import argparse
import random
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from measuring import machine, print_json

from paceline.observe.dashboard.feed import Feed
from paceline.observe.dashboard.server import DashboardServer
from paceline.observe.trace import (
    AppliedRecord,
    ArrivedRecord,
    Carried,
    MinClock,
    ReadRecord,
    Sampled,
    Serving,
    Step,
    Trace,
    TraceRecord,
    trace_path,
)

STEPS_PER_S: Final = 5
SAMPLES_PER_S: Final = 4
PAGE_BYTES: Final = 100 * 1024


class MadeUpJob:
    """Workers and servers that write what they would, a second at a time."""

    def __init__(self, folder: Path, num_workers: int, num_servers: int) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.num_records = 0
        self._random = random.Random(0)
        self._clock = 0
        self._traces = {
            (role, rank): Trace(trace_path(folder, role, rank))
            for role, num in (("worker", num_workers), ("server", num_servers))
            for rank in range(num)
        }

    def go_on(self, second: int) -> None:
        """Write the records of a second."""
        for number in range(STEPS_PER_S):
            end_t = 1000.0 + second + (number + 1) / STEPS_PER_S
            for worker in range(self.num_workers):
                self._step(worker, end_t)
            for server in range(self.num_servers):
                self._clock_end(server, end_t)
            self._clock += 1
        for number in range(SAMPLES_PER_S):
            self._sample(1000.0 + second + number / SAMPLES_PER_S)
        for trace in self._traces.values():
            trace.flush()

    def close(self) -> None:
        """Close the traces."""
        for trace in self._traces.values():
            trace.close()

    def _step(self, worker: int, end_t: float) -> None:
        wait_s = self._random.uniform(0.01, 0.08)
        t, clock = end_t - wait_s, self._clock
        loss = 2.0 / (1 + clock / 500) + self._random.uniform(0, 0.1)
        self._write("worker", worker, Step(t, worker, clock, 32, loss, wait_s, 0.2, wait_s + 0.01))
        self._write("worker", worker, ReadRecord(end_t, worker, "model", clock + 1, clock + 1, wait_s, "fetch"))
        for server in range(self.num_servers):
            self._write("server", server, ArrivedRecord(t + 0.001, server, worker, clock))

    def _clock_end(self, server: int, t: float) -> None:
        workers, clock = tuple(range(self.num_workers)), self._clock + 1
        self._write("server", server, AppliedRecord(t - 0.001, server, "model", workers, clock, 0.002))
        self._write("server", server, MinClock(t - 0.001, server, "model", clock))

    def _sample(self, t: float) -> None:
        passed_s = t - 1000.0
        for role, num in (("worker", self.num_workers), ("server", self.num_servers)):
            for rank in range(num):
                self._write(role, rank, Sampled(t, role, rank, 1, passed_s, 0.0, 0.0, 0, 0, "elsewhere"))
        for server in range(self.num_servers):
            num_bytes = int(1e6 * passed_s)
            self._write("server", server, Serving(t, server, passed_s, 0.2 * passed_s, num_bytes, num_bytes, 3))
            links = tuple((worker, num_bytes, num_bytes) for worker in range(self.num_workers))
            self._write("server", server, Carried(t, server, links, (("model", num_bytes, num_bytes),)))

    def _write(self, role: str, rank: int, record: TraceRecord) -> None:
        self.num_records += 1
        self._traces[role, rank].record(record)


def read_and_drop(url: str, counted: list[int]) -> None:
    """Read the stream of the page to its end, as an open page does."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        request = f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
        connection.sendall(request.encode())
        while chunk := connection.recv(1 << 16):
            counted[0] += len(chunk)


def measure(num_workers: int, num_servers: int, seconds: int) -> dict[str, object]:
    """Return what showing so many seconds of a job took."""
    with tempfile.TemporaryDirectory() as folder:
        job, counted, taken_s = MadeUpJob(Path(folder), num_workers, num_servers), [0], 0.0
        feed = Feed([Path(folder)], ["made up"])
        with DashboardServer(feed) as server:
            page = threading.Thread(target=read_and_drop, args=(server.url, counted))
            page.start()
            for second in range(seconds):
                job.go_on(second)
                began_s, seen = time.process_time(), counted[0]
                feed.publish()
                while counted[0] == seen:  # until the page has something of it
                    time.sleep(0.001)
                taken_s += time.process_time() - began_s
        page.join()
        job.close()
    return {
        "workers": num_workers,
        "servers": num_servers,
        "seconds": seconds,
        "records": job.num_records,
        "cpu_s": round(taken_s, 2),
        "share_of_a_core": round(taken_s / seconds, 4),
        "bytes_to_page_per_s": round(counted[0] / seconds),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    result = measure(options.workers, options.servers, options.seconds)
    if options.json:
        print_json(result | {"machine": machine()})
    else:
        for name, value in result.items():
            print(f"{name:>20}  {value}")


if __name__ == "__main__":
    main()
