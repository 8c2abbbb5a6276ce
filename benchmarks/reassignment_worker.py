"""A worker whose computing is a sleep for each sample; worker 1 takes twice as long for every one, for ever.

Under each policy it trains with its own batches alone, and again with slices; all policies take turns.
"""

import argparse
import json
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session

STRAGGLER = 1
BATCH_SIZE = 48


def run(ps: Session, policy: str, clocks: int, slices: int, sample_s: float, name: str) -> dict[str, object]:
    """Train for so many clocks; return when this worker finished each, and what it did."""
    model = nn.Linear(8, 1)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), consistency=policy, name=name)
    data = TensorDataset(torch.randn(BATCH_SIZE * ps.size * clocks, 8))
    compute = SimulatedCompute(sample_s * (2 if ps.rank == STRAGGLER else 1))
    ends: list[float] = []
    asking: list[float] = []
    num_samples = 0
    ps.barrier()
    start, before = time.monotonic(), ps.node.clock
    for (batch,) in paceline.shard(DataLoader(data, batch_size=BATCH_SIZE), slices=slices):
        began = time.monotonic()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        compute.finish(began, len(batch))
        step_s, finished = step(ps, optimizer)
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


@dataclass
class SimulatedCompute:
    """Makes computing take so long for each sample; a sleep that lasts too long shortens those after it."""

    sample_s: float
    late_s: float = 0.0

    def finish(self, began: float, num_samples: int) -> None:
        """Sleep until these samples are computed at this speed."""
        due = began + self.sample_s * num_samples - self.late_s
        time.sleep(max(0.0, due - time.monotonic()))
        self.late_s = time.monotonic() - due


def step(ps: Session, optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """Step; return what that took, and whether a clock ended with it."""
    clock, start = ps.node.clock, time.monotonic()
    optimizer.step()
    return time.monotonic() - start, ps.node.clock > clock


def main() -> None:
    """Take all runs in turn, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--runs", type=json.loads, required=True, help="[[policy, slices, clocks, ms a sample], ...]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ps = paceline.init()
    for number in range(options.rounds):
        for policy, slices, clocks, sample_ms in options.runs:
            name = f"{policy}.{slices}.{number}"
            found = run(ps, policy, clocks, slices, sample_ms / 1000, name)
            print("found " + json.dumps({"round": number, **found}), flush=True)


if __name__ == "__main__":
    main()
