"""Trains a small network, compiled by the backend that is named or not at all, and prints its loss."""

import sys
import warnings

import torch
from torch.nn import functional

import paceline

backend, overlap = sys.argv[1], "overlap" in sys.argv
warnings.simplefilter("ignore")  # of torch's compiler, about itself
ps = paceline.init()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
called = net if backend == "none" else torch.compile(net, backend=backend)
optimizer = paceline.distributed(torch.optim.AdamW(net.parameters(), lr=0.01), model=net, overlap=overlap)
x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
for step in range(10):
    start = (step * ps.size + ps.rank) * 8
    optimizer.zero_grad()
    functional.mse_loss(called(x[start : start + 8]), y[start : start + 8]).backward()
    optimizer.step()
ps.barrier()
with optimizer.snapshot():
    loss = functional.mse_loss(net(x), y).item()
if ps.rank == 0:
    print(f"loss {loss:.9f}")
