"""A worker of two large layers; writes down for each batch what it sent, received and took in a step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.observe.resources import ResourceUsage, Usage
from paceline.training.parameter_server import DistributedOptimizer

WARM_STEPS = 2


def usage_of(resources: ResourceUsage) -> Usage:
    """Return the bytes of this process so far."""
    usage = resources.usage()
    assert usage is not None, "the kernel counts bytes on Linux only"
    return usage


def main() -> None:
    """Take some steps with each batch, after two to warm up."""
    out, pushes, (width, num_steps, *batches) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
    ps = paceline.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.distributed(plain, model=model, factors=pushes == "factors")
    assert isinstance(optimizer, DistributedOptimizer)
    resources = ResourceUsage()
    for batch in batches:
        inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(ps.rank))
        took, before, factored = list[float](), usage_of(resources), 0
        for step in range(WARM_STEPS + num_steps):
            if step == WARM_STEPS:
                ps.barrier()
                before, factored = usage_of(resources), optimizer.num_factored
            began = time.perf_counter()
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            took.append(time.perf_counter() - began)
        after = usage_of(resources)
        ps.barrier()
        if ps.rank == 0:
            told = {
                "batch": batch,
                "sent_bytes": (after.sent_bytes - before.sent_bytes) / num_steps,
                "received_bytes": (after.received_bytes - before.received_bytes) / num_steps,
                "step_s": took[WARM_STEPS:],
                "num_factored": optimizer.num_factored - factored,
            }
            with Path(out).open("a") as file:
                print(json.dumps(told), file=file)


if __name__ == "__main__":
    main()
