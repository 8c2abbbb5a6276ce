"""One process of the benchmark of plans: trains a model, alone or under `paceline run`."""

import sys
from typing import Final

import torch
from plan_models import TINY, VOCABULARY, WORK, Work
from torch import Tensor, nn
from turns import play

import paceline
from paceline.planning.sample import Sample

ALONE: Final = "single"
SIZES: Final = {"tiny": TINY, "whole": WORK}


def main() -> None:
    """Step when asked."""
    stage, size, name, strategy = sys.argv[1:]
    rank = 0 if strategy == ALONE else paceline.init().rank
    module, batch = made(SIZES[size][name])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, fused=True)
    stepper = optimizer if strategy == ALONE else paceline.distributed(optimizer)

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            stepper.zero_grad()
            module(batch).backward()
            stepper.step()

    play(stage, rank, {"step": step})


def made(work: Work) -> tuple[nn.Module, Tensor]:
    """Return a model, which gives a loss, and a worker's part of the batch."""
    sample = Sample.parse(work.sample)
    shape = (work.batch, *sample.shape)
    return work.make(), torch.randint(VOCABULARY, shape) if sample.is_ids else torch.randn(shape)


if __name__ == "__main__":
    main()
