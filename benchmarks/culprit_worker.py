"""A worker of the benchmark of verdicts: equal steps, until one worker has a fault from a clock on.

A step is a sleep, a little computing, and a push and a pull under bsp. What the fault is, is said by its name.
"""

import argparse
import ctypes
import gc
import mmap
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline

SLEEP_S: Final = 0.05
COMPUTE_S: Final = 0.004
MORE_S: Final = 0.1  # that a fault adds to a step, about
NUM_SAMPLES: Final = 100_000
BATCH: Final = 8
WIDTH: Final = 256
NUM_SPINNING: Final = 8
MAPPED_BYTES: Final = 64 << 20
NUM_PAGES: Final = 400
NUM_OBJECTS: Final = 400_000
NUM_IDS: Final = 256
HOT: Final = 7
AT: Final = 15  # clock at which a fault begins
SPIN: Final = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() > 1: pass"


class SlowRule:
    """Adds gradients to values, and takes its time from clock `AT` on."""

    granularity: Final = "element"

    def __init__(self) -> None:
        self._num_updates = 0

    def update(
        self, values: Sequence[Tensor], gradients: Sequence[Tensor | None], hyper: object, groups: Sequence[int]
    ) -> None:
        """Add gradients to values."""
        self._num_updates += 1
        if self._num_updates > AT:
            time.sleep(MORE_S)
        for value, gradient in zip(values, gradients, strict=True):
            if gradient is not None:
                value.add_(gradient)

    def state(self) -> dict[str, Tensor]:
        """Return nothing, as there is none."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Keep nothing."""


class Samples(Dataset[Tensor]):
    """Random samples, which may take a while."""

    def __init__(self) -> None:
        self.pause_s = 0.0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if self.pause_s and index % BATCH == 0:
            time.sleep(self.pause_s)
        return torch.full((WIDTH,), index % 7 / 7)


def through(port: int) -> None:
    """Have connections of this process go through a relay on this machine."""
    connect = socket.socket.connect

    def redirected(self: socket.socket, address: tuple[str, int]) -> None:
        connect(self, ("127.0.0.1", port) if self.family == socket.AF_INET else address)

    socket.socket.connect = redirected  # type: ignore[method-assign]


def no_fault() -> None:
    """Add nothing to a step."""


def spin_beside() -> None:
    """Have other processes keep the core of this one busy."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(core)]) for _ in range(NUM_SPINNING)]
    spinning_until_end.extend(spinning)


spinning_until_end: list[subprocess.Popen[bytes]] = []


def page_reader() -> Callable[[], None]:
    """Return what reads pages of a file that the machine has no memory to keep."""
    with tempfile.NamedTemporaryFile(dir=os.environ.get("PACELINE_CULPRIT_DISK")) as file:
        file.write(os.urandom(1 << 20) * (MAPPED_BYTES >> 20))
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.dup(file.fileno())
        mapped = mmap.mmap(descriptor, MAPPED_BYTES, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    pages = MAPPED_BYTES // mmap.PAGESIZE

    def read() -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < MORE_S:
            mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(descriptor, 0, MAPPED_BYTES, os.POSIX_FADV_DONTNEED)
            for _ in range(NUM_PAGES):
                ctypes.c_char(mapped[random.randrange(pages) * mmap.PAGESIZE])

    return read


def collector() -> Callable[[], None]:
    """Return what has the garbage collector look at many objects."""
    kept = [[number] for number in range(NUM_OBJECTS)]

    def collect() -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < MORE_S:
            gc.collect()
        assert kept

    return collect


def begin(fault: str, samples: Samples) -> Callable[[], None]:
    """Let a fault begin; return what it adds to each step."""
    match fault:
        case "load":
            spin_beside()
        case "sleeps":
            return lambda: time.sleep(MORE_S)
        case "data":
            samples.pause_s = MORE_S
        case "memory":
            return page_reader()
        case "gc":
            return collector()
        case _:
            pass
    return no_fault


def compute() -> None:
    """Use the processor for a while, by its own time."""
    began_s = time.thread_time()
    while time.thread_time() - began_s < COMPUTE_S:
        pass


def train(options: argparse.Namespace, rank: int) -> None:
    """Take steps; from clock `at` on the victim has its fault."""
    samples = Samples()
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1e-3), consistency=paceline.bsp())
    is_victim, more = rank == options.victim, no_fault
    for number, batch in enumerate(paceline.shard(DataLoader(samples, batch_size=BATCH))):
        if number == options.steps:
            break
        if is_victim and number == options.at:
            more = begin(options.fault, samples)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(SLEEP_S)
        compute()
        more()
        optimizer.step()


def push_rows(options: argparse.Namespace, session: paceline.Session) -> None:
    """Push rows drawn evenly from many; from clock `at` on, one row is in every push."""
    table = session.table("words", rows=8, update=paceline.update.Add(), consistency=paceline.bsp(), scale="sum")
    draw = torch.Generator().manual_seed(session.rank)
    for number in range(options.steps):
        ids = torch.randint(1_000_000, (NUM_IDS,), generator=draw).unique()
        if number >= options.at:
            ids[0] = HOT
        time.sleep(SLEEP_S)
        table.pull(ids[:4])
        table.push(ids, torch.ones(len(ids), 8))
        session.clock()


def push_to_slow_rule(options: argparse.Namespace, session: paceline.Session) -> None:
    """Push gradients that a slow rule applies."""
    rule = paceline.update.rule("culprit_worker:SlowRule")
    table = session.table("w", shape=(WIDTH,), update=rule, consistency=paceline.bsp(), scale="sum")
    for _ in range(options.steps):
        time.sleep(SLEEP_S)
        table.push(torch.ones_like(table.pull()))
        session.clock()


def main() -> None:
    """Train, or push rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", default="healthy")
    parser.add_argument("--victim", type=int, default=1)
    parser.add_argument("--at", type=int, default=AT)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--relay", type=int, default=0)
    options = parser.parse_args()
    if options.relay and os.environ.get("PACELINE_RANK") == str(options.victim):
        through(options.relay)
    session = paceline.init()
    try:
        if options.fault == "hot_row":
            push_rows(options, session)
        elif options.fault == "slow_rule":
            push_to_slow_rule(options, session)
        else:
            train(options, session.rank)
    finally:
        for process in spinning_until_end:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
