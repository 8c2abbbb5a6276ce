"""One process of the benchmark of plans: trains a model, alone or under `paceline run`."""

import sys

import torch
from plan_models import EMPTY, NUM_CLASSES, VOCABULARY, WORK
from torch import Tensor, nn
from turns import play

import paceline
from paceline.planning.sample import Sample

ALONE = "single"


def main() -> None:
    """Step when asked."""
    stage, name, strategy = sys.argv[1:]
    rank = 0 if strategy == ALONE else paceline.init().rank
    module, batch = made(name)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, fused=True)
    stepper = optimizer if strategy == ALONE else paceline.distributed(optimizer)

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            stepper.zero_grad()
            module(batch).sum().backward()
            stepper.step()

    play(stage, rank, {"step": step})


def made(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model, which gives a loss, and a worker's part of the batch."""
    if name == EMPTY:
        return nn.Linear(NUM_CLASSES, 1), torch.ones(1, NUM_CLASSES)
    work = WORK[name]
    sample = Sample.parse(work.sample)
    shape = (work.batch, *sample.shape)
    return work.make(), torch.randint(VOCABULARY, shape) if sample.is_ids else torch.randn(shape)


if __name__ == "__main__":
    main()
