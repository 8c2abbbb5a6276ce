"""What the mistakes of careless.py are made of."""

import resource
from collections.abc import Callable
from dataclasses import dataclass

MODEL = """
import os, signal, sys, time
import torch
import paceline

paceline.init()
torch.manual_seed(paceline.rank())
model = torch.nn.Linear(32, 1)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model=model)

def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def batch():
    return torch.randn(8, 32)
"""
TABLE = """
import torch
import paceline

ps = paceline.connect()
w = ps.table("w", shape=(4,), update=paceline.update.SGD(lr=0.1))
"""


@dataclass(frozen=True)
class Mistake:
    """One thing that is done wrongly, and what has to be said about it."""

    name: str
    did: str  # in one sentence
    script: str
    told: str  # what one of the lines has to contain
    exit_code: int = 0
    options: tuple[str, ...] = ()
    before: Callable[[], None] | None = None  # runs in the process of the launcher, before anything of Paceline


def small_files() -> None:
    """Let no file grow beyond 40 kB, as on a disk that is nearly full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
