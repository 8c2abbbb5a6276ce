"""A script of plain torch, without a job: three processes train a replica each over the backend of Paceline.

Each prints a digest of what it learned; then one kills itself in the middle, and the others print what they are told.
"""

import gc
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PeerError  # importing Paceline makes its backend known to torch

NUM_WORKERS = 3


def say(text: str) -> None:
    """Write a line at once, whole beside those of the others."""
    os.write(1, f"{text}\n".encode())


def work(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "paceline",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=NUM_WORKERS,
        timeout=timedelta(seconds=200),
    )
    torch.manual_seed(rank)
    layers = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    pair = dist.new_group([0, 1])
    if rank < 2:
        both = torch.ones(2)
        dist.all_reduce(both, group=pair)
        assert both.tolist() == [2.0, 2.0]
    digest = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    say(f"{rank}: learned {hash(digest)}")
    dist.barrier()
    child = os.fork()
    if not child:  # as a worker of a DataLoader, which drops what it has from its parent
        dist.destroy_process_group()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(3))
    except PeerError as error:
        say(f"{rank}: PeerError {str(error).partition(' is gone')[0]} is gone")


children = []
for rank in range(NUM_WORKERS):
    child = os.fork()
    if not child:
        work(rank, sys.argv[1])
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
