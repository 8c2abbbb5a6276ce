"""Fits a line under any strategy, or fails where it is told to."""

import sys

import torch

import paceline

ps = paceline.init()
if sys.argv[1:] == ["--refuse", str(ps.arrangement.distribution)]:
    raise SystemExit("this strategy is refused")
torch.manual_seed(0)
model = torch.nn.Linear(1000, 1)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1e-4), model=model)
points = torch.randn(64, 1000)
for batch in paceline.shard(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points), batch_size=8)):
    optimizer.zero_grad()
    loss = (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    paceline.report(loss=loss.item())
ps.barrier()
