"""A worker of `simulate.py`, which in each clock sleeps for as long as the simulator's worker computes."""

import argparse
import time
from random import Random

import torch

import paceline
from paceline.simulate.scenario import Stragglers


def main() -> None:
    """Work through the clocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clocks", type=int, default=100)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--stragglers", default="transient:0.1:4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--fetch-every", type=int, help="0: only when the bound asks for it")
    options = parser.parse_args()
    compute_s, stragglers = options.compute_ms / 1000, Stragglers.parse(options.stragglers)
    paceline.init()
    pace = Random(f"{options.seed}.{paceline.rank()}.0")
    model = torch.nn.Linear(options.size, 1)
    every = {} if options.fetch_every is None else {"fetch_every": options.fetch_every or None}
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1e-6), model=model, **every)
    inputs = torch.randn(1, options.size)
    for _ in range(options.clocks):
        time.sleep(pace.uniform(0.9 * compute_s, 1.1 * compute_s) * stragglers.slowdown(paceline.rank(), pace))
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
