"""What one event costs the pure cores, in microseconds: `python benchmarks/core.py [--json]`.

A round is one clock of all workers at one server: every worker pushes, ticks and pulls, and the messages go straight
from core to core. No network, no tensors, no threads: this is the floor under every other number. The cost is the
processor time of a round divided by the events in it; the number given is the median of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque

from paceline.core.consistency import Consistency, bsp, essp, ssp
from paceline.core.effects import Reply, Send, Serve
from paceline.core.events import Arrived, Declared, Opened, WantClock, WantJoin, WantPush, WantRead
from paceline.core.messages import Sender
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore, WorkerEvent

NUM_WORKERS = (8, 64, 512)
TARGET_US = 5.0  # at 64 workers
NUM_EVENTS = 60_000  # in all rounds of one measurement together, about


class Ring:
    """One server core and its workers, joined by a queue; counts the events that the cores take in."""

    def __init__(self, consistency: Consistency, num_workers: int) -> None:
        ranks = tuple(range(num_workers))
        self.server = ServerCore(ServerSettings(0, 1, workers=ranks), started=0.0)
        self.server.handle(Declared("w", consistency), 0.0)
        self.workers = [WorkerCore(WorkerSettings(Sender(1, rank, 0), 1)) for rank in ranks]
        self.queue: deque[tuple[int, object]] = deque()
        self.num_events = 0
        self.server_s = 0.0
        self.num_server_events = 0
        for rank in ranks:
            self.ask(rank, Opened("w", consistency, (0,)))
            self.ask(rank, WantJoin())
        self.settle()

    def ask(self, rank: int, event: WorkerEvent) -> None:
        """Let a worker take in an event."""
        self.num_events += 1
        for effect in self.workers[rank].handle(event, 0.0):
            if isinstance(effect, Send):
                self.queue.append((-1, effect.message))

    def settle(self) -> None:
        """Deliver messages until none is on its way."""
        while self.queue:
            rank, message = self.queue.popleft()
            if rank >= 0:
                self.ask(rank, Arrived(0, message))
                continue
            self.num_events += 1
            self.num_server_events += 1
            began = time.process_time()
            effects = self.server.handle(message, 0.0)  # pyright: ignore[reportArgumentType]
            self.server_s += time.process_time() - began
            for effect in effects:
                if isinstance(effect, Reply | Serve):
                    self.queue.append((effect.worker, effect.message))

    def clock(self) -> None:
        """Let every worker push, tick and read."""
        for rank in range(len(self.workers)):
            self.ask(rank, WantPush("w"))
            self.ask(rank, WantClock())
        self.settle()
        for rank in range(len(self.workers)):
            self.ask(rank, WantRead("w"))
        self.settle()


def measure(consistency: Consistency, num_workers: int) -> tuple[float, float]:
    """Return the median microseconds an event, of all cores and of the server core alone."""
    ring = Ring(consistency, num_workers)
    ring.clock()
    all_us, server_us = list[float](), list[float]()
    gc.collect()
    gc.disable()
    for _ in range(max(5, NUM_EVENTS // (10 * num_workers))):
        ring.num_events = ring.num_server_events = 0
        ring.server_s = 0.0
        began = time.process_time()
        ring.clock()
        all_us.append((time.process_time() - began) / ring.num_events * 1e6)
        server_us.append(ring.server_s / ring.num_server_events * 1e6)
    gc.enable()
    return statistics.median(all_us), statistics.median(server_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    result: dict[str, object] = {"name": "core", "target_us_64": TARGET_US}
    print(f"{'':>14}" + "".join(f"{num:>6} workers" for num in NUM_WORKERS) + "   (us an event; the server's alone)")
    for consistency in (ssp(2), bsp(), essp(2)):
        measured = [measure(consistency, num) for num in NUM_WORKERS]
        print(f"{consistency!s:>14}" + "".join(f"{both:>7.2f} {server:>6.2f}" for both, server in measured))
        name = str(consistency).replace(":", "")
        for num, (both, server) in zip(NUM_WORKERS, measured, strict=True):
            result[f"{name}_us_per_event_{num}"] = round(both, 3)
            result[f"{name}_server_us_per_event_{num}"] = round(server, 3)
            if consistency == ssp(2):
                result[f"us_per_event_{num}"] = round(both, 3)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
