"""Runs made up by a small rehearsal on virtual time: what the report has to draw, without a store."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from paceline.observe.runs import Run, gather
from paceline.observe.trace import Evaluated, MinClock, ReadRecord, Step, TraceRecord


@dataclass
class Rehearsal:
    """Workers that may run `bound` clocks ahead; the last one is slow for some of the time."""

    bound: float
    refresh: str  # "always" fetches at every clock, "lazily" only when the bound asks for it
    num_workers: int = 4
    num_clocks: int = 150
    final_loss: float = 0.08
    accuracy: float = 0.96
    clock_s: float = 0.05
    last_end_t: dict[int, float] = field(default_factory=dict)  # by clock
    records: list[TraceRecord] = field(default_factory=list)

    def run(self) -> Run:
        rng = random.Random(7)
        finished = [0] * self.num_workers
        held = [0] * self.num_workers
        free_t = [0.0] * self.num_workers  # when the worker is done with its clock
        mins = [(0.0, 0)]  # time and value of every advance of the slowest clock
        while min(finished) < self.num_clocks:
            waiting = [
                w for w in range(self.num_workers)
                if finished[w] < self.num_clocks and finished[w] - min(finished) <= self.bound
            ]  # fmt: skip
            worker = min(waiting, key=lambda w: free_t[w])
            self._one_clock(rng, worker, finished, held, free_t, mins)
        t = max(free_t)
        self.records.append(Evaluated(t, 0, self.num_clocks, self.final_loss * 1.3, self.accuracy))
        return gather(self.records)

    def _one_clock(
        self, rng: random.Random, worker: int, finished: list[int], held: list[int], free_t: list[float],
        mins: list[tuple[float, int]],
    ) -> None:  # fmt: skip
        clock = finished[worker]
        needed = clock - min(self.bound, clock)
        start_t = max(free_t[worker], next(t for t, value in mins if value >= needed))
        wait_s = start_t - free_t[worker]
        current = max(value for t, value in mins if t <= start_t)
        source = "fetch" if self.refresh == "always" or held[worker] < needed else "cache"
        held[worker] = current if source == "fetch" else held[worker]
        slow = worker == self.num_workers - 1 and (clock // 15) % 3 == 1
        compute_s = self.clock_s * rng.uniform(0.8, 1.3) * (2.5 if slow else 1.0)
        end_t = start_t + compute_s
        loss = self.final_loss + 2.2 * math.exp(-clock / 18) + rng.uniform(0, 0.06)
        if self.num_workers > 1:
            self.records.append(ReadRecord(start_t, worker, "model", clock, held[worker], wait_s, source))
        self.records.append(Step(end_t, worker, clock, 32, loss, wait_s, wait_s + compute_s, wait_s + compute_s / 10))
        finished[worker], free_t[worker] = clock + 1, end_t
        self.last_end_t[clock] = max(self.last_end_t.get(clock, 0.0), end_t)
        if min(finished) > mins[-1][1]:
            mins.append((self.last_end_t[clock], min(finished)))
            self.records += [MinClock(mins[-1][0], server, "model", min(finished)) for server in range(2)]


def all_policies() -> dict[str, Run]:
    """The five runs of a demonstration, by label."""
    return {
        "bsp": Rehearsal(0, "always", final_loss=0.085, accuracy=0.9611).run(),
        "ssp(3)": Rehearsal(3, "lazily", final_loss=0.09, accuracy=0.9583).run(),
        "essp(3)": Rehearsal(3, "always", final_loss=0.083, accuracy=0.9639).run(),
        "asynchronous": Rehearsal(math.inf, "always", final_loss=0.1, accuracy=0.9528).run(),
        "one process": Rehearsal(0, "always", num_workers=1, clock_s=0.15, final_loss=0.08, accuracy=0.9667).run(),
    }
