"""A worker's script for the fault tests: pushes 1 into a slot of its own at every clock, and may kill itself.

`ledger.py CONSISTENCY NUM_CLOCKS [RANK:STEP ...]`: the worker of that rank kills itself by SIGKILL when it comes to the
step, in its first incarnation; at the step "asleep" it stops itself by SIGSTOP instead, until it is woken. Those
that are left meet at the end and print the ledger.
"""

import os
import signal
import sys
from collections import Counter
from typing import Any

import torch

import paceline
from paceline.core.events import WantJoin
from paceline.core.messages import Clock, Leave, Pull, Push
from paceline.transport.shm import ShmTransport
from paceline.wire.requests import Barrier, Initialise
from paceline.wire.send_queue import SendHold
from paceline.worker.node import WorkerNode

CONSISTENCY, NUM_CLOCKS = sys.argv[1], int(sys.argv[2])
STEPS = dict(plan.split(":") for plan in sys.argv[3:])
RANK, INCARNATION = int(os.environ["PACELINE_RANK"]), int(os.environ["PACELINE_INCARNATION"])
STEP = STEPS.get(str(RANK), "") if INCARNATION == 0 else ""
KILL_CLOCK = NUM_CLOCKS // 2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: str) -> None:
    if step == STEP:
        die()


def sleep_at(step: str) -> None:
    if step == STEP:
        os.kill(os.getpid(), signal.SIGSTOP)


def die_at_nth(owner: Any, method: str, nth: int, kind: type, *, position: int, after: bool = False) -> None:
    """Die before (or after) `owner.method` does with its n-th `kind`, the argument at `position`, what it does."""
    original = getattr(owner, method)
    seen: Counter[type] = Counter()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        said = getattr(args[position], "message", args[position])
        seen[kind] += isinstance(said, kind)
        dies = isinstance(said, kind) and seen[kind] == nth
        if dies and not after:
            die()
        result = original(*args, **kwargs)
        if dies:
            die()
        return result

    setattr(owner, method, wrapped)


def part(clock: int, server: int) -> int:
    """The how-many-th message this is, when one goes to each of two servers at every clock."""
    return 2 * clock + server + 1


def arm() -> None:
    """Lay the mine for the steps that lie inside a call."""
    SendHold.add = lambda _, queue: queue.release()  # what is sent before the end has left
    match STEP:
        case "in-handshake":  # connected to one server, not to the other
            die_at_nth(ShmTransport, "connect", 2, bytes, position=2)
        case "before-join":
            die_at_nth(WorkerNode, "_handle", 1, WantJoin, position=1)
        case "between-first-values":
            die_at_nth(WorkerNode, "_send_frame", 2, Initialise, position=2)
        case "between-parts":
            die_at_nth(WorkerNode, "_perform", part(KILL_CLOCK, 1), Push, position=1)
        case "between-ticks":
            die_at_nth(WorkerNode, "_perform", part(KILL_CLOCK, 1), Clock, position=1)
        case "in-pull":
            die_at_nth(WorkerNode, "_perform", part(KILL_CLOCK, 1), Pull, position=1, after=True)
        case "in-barrier":
            die_at_nth(WorkerNode, "_send_frame", 1, Barrier, position=2, after=True)
        case "between-leaves":
            die_at_nth(WorkerNode, "_perform", 2, Leave, position=1)


arm()
with paceline.connect() as ps:
    die_at("after-join")
    # Half of each slot lies on the first server and half on the second; a second life has slots of its own.
    shape = (2, 2 * ps.size, NUM_CLOCKS, 64)
    row = INCARNATION * ps.size + ps.rank
    ledger = ps.table("ledger", shape=shape, update=paceline.update.Add(), consistency=CONSISTENCY, scale="sum")
    print("begin", os.getpid(), flush=True)
    acks = []
    while len(acks) < NUM_CLOCKS:
        clock = len(acks)
        gradient = torch.zeros(shape)
        gradient[:, row, clock] = 1.0
        if clock == KILL_CLOCK:
            sleep_at("asleep")
            die_at("before-push")
        acks.append(ledger.push(gradient))
        if clock == KILL_CLOCK:
            die_at("after-push")
        ps.clock()
        if clock == KILL_CLOCK:
            die_at("after-tick")
        values = ledger.pull()
        assert ((values == 0) | (values == 1)).all(), values
    ps.barrier()
    applied = sum(ack.result(timeout=30).applied for ack in acks)
    values = ledger.pull(exact=CONSISTENCY != "asynchronous")
    assert ((values == 0) | (values == 1)).all(), values
    assert (values == values[..., :1]).all(), values
    if CONSISTENCY.startswith(("bsp", "backup")):
        assert (values[0] == values[1]).all(), "a push counts on one server and not on the other"
    counts = values[0, :, :, 0].sum(dim=1).int().tolist()
    assert counts[row] >= applied, (counts, applied)
    print("ledger", INCARNATION, applied, counts, flush=True)
