"""One worker of `benchmarks/observing.py`: the same job with recording switched off and on in turns.

All workers and servers are threads of this process, so that one clock has the processor time of all of them.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.observe.trace import Trace

WARM_STEPS = 40


def traces() -> list[Trace]:
    """Return what writes records in this process."""
    return [each for each in gc.get_objects() if type(each) is Trace and each.is_kept]


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid of Linux


def exporter() -> int:
    """Return the number of the process that gives trackers and scrapes what this job records."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and b"paceline.launch.exporter" in (entry / "cmdline").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getppid():
                    return int(entry.name)
    raise SystemExit("this job has no exporter: start it with --log")


class Training:
    """A model whose steps cost the processor little, so that what recording adds to them shows."""

    def __init__(self, pause_s: float) -> None:
        """Open its tables."""
        self._pause_s = pause_s
        self._model = nn.Linear(64, 10)
        self._optimizer = paceline.distributed(torch.optim.SGD(self._model.parameters(), lr=0.01), model=self._model)
        self._inputs = torch.randn(32, 64)

    def steps(self, num: int, *, reports: bool) -> None:
        """Take so many steps."""
        for _ in range(num):
            self._optimizer.zero_grad()
            loss = self._model(self._inputs).square().mean()
            loss.backward()
            time.sleep(self._pause_s)
            value = loss.item()
            if reports:
                paceline.report(loss=value, grad_norm=1.0, lr=0.01)
            self._optimizer.step()


def measure(session: paceline.Session, training: Training, num_steps: int, orders: Sequence[bool]) -> list[list[float]]:
    """Take a block of steps for each order, with recording or without; return what blocks took: processor and time."""
    kept = traces() if session.rank == 0 else []
    took: list[list[float]] = []
    for is_on in orders:
        session.barrier()
        for trace in kept:
            trace.is_kept = is_on
        began = time.process_time(), time.perf_counter()
        session.barrier()
        training.steps(num_steps, reports=is_on)
        session.barrier()
        took.append([time.process_time() - began[0], time.perf_counter() - began[1]])
    for trace in kept:
        trace.is_kept = True
    return took


def main() -> None:
    """Measure blocks, and write down what they and the exporter took."""
    pause_s, num_steps, num_pairs, folder = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    session = paceline.init()
    torch.set_num_threads(1)
    training = Training(pause_s)
    training.steps(WARM_STEPS, reports=True)
    orders = [is_on for number in range(num_pairs) for is_on in ((True, False) if number % 2 else (False, True))]
    before_s = cpu_s(exporter()) if session.rank == 0 else 0.0
    took = measure(session, training, num_steps, orders)
    if session.rank == 0:
        of_exporter = cpu_s(exporter()) - before_s
        (folder / "took.json").write_text(json.dumps({"orders": orders, "took": took, "exporter_s": of_exporter}))


if __name__ == "__main__":
    main()
