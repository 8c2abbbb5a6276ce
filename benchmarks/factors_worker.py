"""A worker of two large layers; prints what it sent, received and took in a step, with factors or without."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

import paceline
from paceline.observe.resources import ResourceUsage, Usage
from paceline.training.parameter_server import DistributedOptimizer


def usage_of(resources: ResourceUsage) -> Usage:
    """Return the bytes of this process so far."""
    usage = resources.usage()
    assert usage is not None, "the kernel counts bytes on Linux only"
    return usage


def main() -> None:
    """Take two steps to warm up, then some that are counted."""
    width, batch, num_steps, factors = map(int, sys.argv[1:])
    ps = paceline.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.distributed(plain, model=model, factors=bool(factors))
    assert isinstance(optimizer, DistributedOptimizer)
    inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(ps.rank))
    resources, took, loss = ResourceUsage(), list[float](), torch.zeros(())
    before = usage_of(resources)
    for step in range(2 + num_steps):
        if step == 2:
            ps.barrier()
            before = usage_of(resources)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    after = usage_of(resources)
    ps.barrier()
    if ps.rank == 0:
        told = {
            "sent_bytes": (after.sent_bytes - before.sent_bytes) / num_steps,
            "received_bytes": (after.received_bytes - before.received_bytes) / num_steps,
            "step_s": took[2:],
            "num_factored": optimizer.num_factored,
            "loss": loss.item(),
        }
        print("found", json.dumps(told))


if __name__ == "__main__":
    main()
