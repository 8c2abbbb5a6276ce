"""A worker's script for tests of workers that join: counts how often each sample is in the gradients that are applied.

`counted.py FILE`: epochs over few samples, until FILE is there; worker 0 then says how often each counts in the values,
and in how many epochs it was read. The gradient of sample i is 1 in place i, and a clock takes the mean of as many
samples each time. That the file is there is told in a table, so that all stop behind the same epoch.
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH, ROUNDS = 2, 4


def say(*words: object) -> None:
    """Write a line as a whole."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Counts(torch.nn.Module):
    """A weight for each sample."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights[ids].mean()


ps = paceline.init()
per_clock = ps.size * BATCH
samples = torch.arange(per_clock * ROUNDS)
batches = paceline.shard(DataLoader(TensorDataset(samples), batch_size=BATCH, shuffle=True))
model = Counts(len(samples))
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1.0), model=model, consistency="bsp")
stops = ps.table("stops", shape=(1,), update=paceline.update.Add(), consistency="bsp", scale="sum")
epoch, num_batches = 0, 0
while not stops.pull()[0]:
    for (ids,) in batches:
        if ps.rank == 0 and not num_batches % ROUNDS and Path(sys.argv[1]).exists():
            stops.push([1.0])
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
        num_batches += 1
        if num_batches == 1:
            say("has batches")
    epoch += 1
if ps.rank == 0:
    say("counts", epoch, *sorted({round(float(-count) * per_clock, 9) for count in model.weights}))
