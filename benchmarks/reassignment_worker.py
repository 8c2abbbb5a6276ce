"""A worker whose computing is a sleep for each sample; worker 1 takes twice as long for every one, for ever.

Under each policy it trains with its own batches alone, and again with slices; all policies take turns.
"""

import argparse
import json
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.session import Session

STRAGGLER = 1
BATCH_SIZE = 48


def run(ps: Session, policy: str, clocks: int, slices: int, sample_s: float, name: str) -> dict[str, object]:
    """Train for so many clocks; return when this worker finished each, and what it did."""
    model = nn.Linear(8, 1)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), consistency=policy, name=name)
    data = TensorDataset(torch.randn(BATCH_SIZE * ps.size * clocks, 8))
    own_s = sample_s * (2 if ps.rank == STRAGGLER else 1)
    ends: list[float] = []
    asking: list[float] = []
    num_samples = 0
    ps.barrier()
    start, before = time.monotonic(), ps.node.clock
    for (batch,) in paceline.shard(DataLoader(data, batch_size=BATCH_SIZE), slices=slices):
        time.sleep(own_s * len(batch))
        step_s, finished = step(ps, model, optimizer, batch)
        num_samples += len(batch)
        if finished:
            ends.append(time.monotonic() - start)
        else:
            asking.append(step_s)
    ps.barrier()
    seconds = time.monotonic() - start
    assert ps.node.clock == before + clocks, "every worker finishes every clock"
    return {
        "policy": policy,
        "slices": slices,
        "rank": ps.rank,
        "seconds": seconds,
        "ends": ends,
        "samples": num_samples,
        "ask_ms": 1000 * median(asking) if asking else 0.0,
    }


def step(ps: Session, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> tuple[float, bool]:
    """Compute and step; return what the step took, and whether a clock ended with it."""
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    clock, start = ps.node.clock, time.monotonic()
    optimizer.step()
    return time.monotonic() - start, ps.node.clock > clock


def main() -> None:
    """Take all runs in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--clocks", type=json.loads, required=True, help='by policy: {"bsp": 10}')
    parser.add_argument("--slices", type=int, required=True)
    parser.add_argument("--sample-ms", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ps = paceline.init()
    for number in range(options.rounds):
        for policy, clocks in options.clocks.items():
            for slices in (1, options.slices):
                name = f"{policy}.{slices}.{number}"
                found = run(ps, policy, clocks, slices, options.sample_ms / 1000, name)
                print("found " + json.dumps({"round": number, **found}), flush=True)


if __name__ == "__main__":
    main()
