"""A worker's script for the fault tests: is fed, pushes 1 into the slot of every sample that it gets, and may kill.

`fed_ledger.py CONSISTENCY NUM_EPOCHS NUMBERS [RANK:EPOCH:BATCH:STEP ...]`: the worker of that rank, in its first life,
kills itself by SIGKILL at its so-many-th batch of that epoch, "before-push" or "after-push"; at "data-server" it kills
data server 1 instead. Others hold their first batch of an epoch until those have died that are to die in it, so that
these get one. What each batch has is said as soon as it is there. Those that are left meet at the end and print how
often each sample counts on each of two servers.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy
import psutil
import torch

import paceline
from paceline.job.folders import wait_for

CONSISTENCY, NUM_EPOCHS, NUMBERS = sys.argv[1], int(sys.argv[2]), sys.argv[3]
NUM_SAMPLES = len(numpy.load(NUMBERS))
RANK, INCARNATION = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_INCARNATION"])
LAUNCHER = int(os.environ["PACELINE_LAUNCHER_PID"])
ALL_PLANS = [plan.split(":") for plan in sys.argv[4:]]
PLANS = [plan for plan in ALL_PLANS if INCARNATION == 0 and plan[0] == str(RANK)]
WAIT_S = 30.0


def fail_at(epoch: int, batch: int, step: str) -> None:
    for _, *place, planned in PLANS:
        if (place, planned) == ([str(epoch), str(batch)], step):
            if step != "data-server":
                mark(str(RANK)).touch()
            os.kill(VICTIM if step == "data-server" else os.getpid(), signal.SIGKILL)


def mark(rank: str) -> Path:
    """Where a worker says that it dies."""
    return Path(NUMBERS).with_name(f"died-{rank}")


def await_deaths(epoch: int) -> None:
    others = [rank for rank, when, _, step in ALL_PLANS if when == str(epoch) and step != "data-server"]
    marks = [mark(rank) for rank in others if rank != str(RANK)]
    wait_for(lambda: all(path.exists() for path in marks) or None, WAIT_S, lambda: f"none of {marks} has come")


def data_server() -> int:
    """While no worker has died yet: what has ended has no words."""
    family = {process.pid: process.cmdline() for process in psutil.Process(LAUNCHER).children()}
    [found] = [pid for pid, words in family.items() if "paceline.launch.data_server" in words and words[-1] == "1"]
    return found


def say(word: str, found: object) -> None:
    sys.stdout.write(f"{word} {json.dumps(found)}\n")
    sys.stdout.flush()


ps = paceline.init()
VICTIM = data_server() if any(plan[-1] == "data-server" for plan in PLANS) else 0
# The first half of the table lies on the first server, the second on the second.
ledger = ps.table("ledger", shape=(2, NUM_SAMPLES), update=paceline.update.Add(), consistency=CONSISTENCY, scale="sum")
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = paceline.distributed(torch.optim.SGD([weight], lr=0.1), consistency=CONSISTENCY)
loader = paceline.feed(paceline.sources.arrays(NUMBERS), batch_size=8, shuffle=True, seed=5)
if INCARNATION == 0:
    ps.barrier()  # so that each has some of them
for epoch in range(NUM_EPOCHS):
    for number, indices in enumerate(loader):
        say("has", [epoch, indices.tolist(), RANK, INCARNATION])
        fail_at(epoch, number, "data-server")
        fail_at(epoch, number, "before-push")
        if number == 0:
            await_deaths(epoch)
        counts = torch.zeros(2, NUM_SAMPLES)
        counts[:, indices] = 1.0
        ledger.push(counts)
        fail_at(epoch, number, "after-push")
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
ps.barrier()
say("ledger", ledger.pull(exact=True).int().tolist())
