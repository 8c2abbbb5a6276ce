"""A worker of a job that another launcher has started on several hosts.

It waits with its steps until it is told to take them: python nodes_worker.py FOLDER
"""

import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.api.session import Session

NUMEL, NUM_STEPS, PATIENCE_S = 1000, 3, 200.0


def train(ps: Session) -> str:
    """Take a few steps, each worker with gradients of its own; return the bits of what comes of them."""
    table = ps.table("w", shape=(NUMEL,), update=paceline.update.SGD(lr=0.1, momentum=0.9))
    gradients = torch.Generator().manual_seed(ps.rank)
    for _ in range(NUM_STEPS):
        table.push(torch.randn(NUMEL, generator=gradients))
        ps.clock()
        table.pull()
    return table.pull().numpy().tobytes().hex()


def by_torch() -> float:
    """Count workers by the backend of torch, which has the certificates of the job."""
    dist.init_process_group("paceline")
    one = torch.ones(1)
    dist.all_reduce(one)
    dist.destroy_process_group()
    return one.item()


def main() -> None:
    folder = Path(sys.argv[1])
    with paceline.connect() as ps:
        (folder / f"ready-{ps.rank}").touch()
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while not (folder / "go").exists():
            pause.wait(0.01)
            assert time.monotonic() < deadline
        (folder / f"bits-{ps.rank}").write_text(train(ps))
        total = ps.exchange.all_reduce(torch.ones(1), "sum", None).result().item()
        print(f"worker {ps.rank} of {ps.size} counts {total:g}, and by torch {by_torch():g}", flush=True)


if __name__ == "__main__":
    main()
