"""An ordinary PyTorch loop on the parameter server: one changed line, and one that shares out the data.

Run it alone, or as four workers that may drift three clocks apart:

    python examples/one_line.py
    paceline run --workers 4 --servers 2 --consistency ssp:3 examples/one_line.py
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

paceline.init()

generator = torch.Generator().manual_seed(0)
points = torch.randn(2000, 2, generator=generator)  # (samples, 2)
inside = (points.square().sum(1) < 1.4).long()  # (samples,): is the point in the circle?
loader = DataLoader(TensorDataset(points, inside), batch_size=25, shuffle=True)
batches = paceline.shard(loader)  # each worker its own part

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = paceline.distributed(torch.optim.Adam(model.parameters(), lr=0.01))  # the changed line

for _ in range(10):
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        paceline.report(loss=loss.item())

paceline.barrier()  # now all pushes of all workers are applied
if paceline.rank() == 0:
    with optimizer.snapshot(), torch.no_grad():
        accuracy = (model(points).argmax(1) == inside).float().mean().item()
    print(f"{paceline.size()} worker(s): accuracy {accuracy:.3f}")
