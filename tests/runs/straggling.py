"""A worker's script for real runs: it computes by sleeping, and worker 1 is slow at times."""

import sys
import time

import torch

import paceline
from paceline.demo.pace import SLOW_WORKER, Pace

NUM_CLOCKS = 60
COMPUTE_S = 0.02

fetch_every = int(sys.argv[1]) if len(sys.argv) > 1 else None
paceline.init()
model = torch.nn.Linear(8, 4)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), fetch_every=fetch_every)
computing = Pace(COMPUTE_S, fitful=paceline.rank() == SLOW_WORKER, seed=1).clocks()
paceline.barrier()
for _ in range(NUM_CLOCKS):
    optimizer.zero_grad()
    loss = model(torch.ones(8)).square().sum()
    loss.backward()
    paceline.report(loss=loss.item())
    time.sleep(next(computing))
    optimizer.step()
