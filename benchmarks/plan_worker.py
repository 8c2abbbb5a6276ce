"""One process of the benchmarks of plans: trains a model, alone or under `paceline run`.

`single:2` as the strategy are two processes that train each for itself, with a thread each; `single:2:4`, in four
micro-batches, whose gradients accumulate.
"""

import sys
from collections.abc import Mapping
from typing import Final

import torch
from peers.spawning import run_all
from plan_models import TINY, VOCABULARY, WORK, Work
from torch import Tensor
from turns import Act, play

import paceline
from paceline.tools.plan.measuring import Sample

ALONE: Final = "single"
SIZES: Final = {"tiny": TINY, "whole": WORK}
MICRO_BATCHES: Final = 4  # of a pipeline
COPIED_BYTES: Final = 1 << 26  # of a tensor: more than caches hold


def main() -> None:
    """Step when asked."""
    stage, size, name, strategy = sys.argv[1:]
    work = SIZES[size][name]
    kind, _, count = strategy.partition(":")
    if kind == ALONE and count:
        num_workers, _, pieces = count.partition(":")
        run_all(one_of_several, [(stage, size, name, rank, int(pieces or 1)) for rank in range(int(num_workers))])
    elif kind == ALONE:
        play(stage, 0, alone(work, sample_of(work)))
    else:
        play(stage, *together(work, sample_of(work), strategy))


def one_of_several(stage: str, size: str, name: str, rank: int, num_pieces: int) -> None:
    """Train by itself beside others that do the same."""
    torch.set_num_threads(1)
    work = SIZES[size][name]
    play(stage, rank, {**alone(work, sample_of(work), num_pieces), "copy": copying()})


def alone(work: Work, batch: Tensor, num_pieces: int = 1) -> Mapping[str, Act]:
    """Return what a worker that trains by itself, by so many micro-batches, can be asked for."""
    model = work.make()
    optimizer = momentum(model, ALONE)

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            for piece in batch.chunk(num_pieces):
                model.loss(model(piece), piece).backward()
            optimizer.step()

    return {"step": step}


def copying() -> Act:
    """Return what copies memory so often as it is asked."""
    given, copied = torch.ones(2, COPIED_BYTES // 4)

    def copy(num_times: int) -> None:
        for _ in range(num_times):
            copied.copy_(given)

    return copy


def together(work: Work, batch: Tensor, strategy: str) -> tuple[int, Mapping[str, Act]]:
    """Return the rank of a worker of a job that the launcher was told how to distribute, and what it can be asked."""
    rank = paceline.init().rank
    whole = work.make()
    model = paceline.parallelize(whole, loss=whole.loss, micro_batches=MICRO_BATCHES, reduction="mean")
    optimizer = paceline.distributed(momentum(model, strategy), model=model)

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model.forward_backward(batch, batch)
            optimizer.step()

    return rank, {"step": step}


def momentum(model: torch.nn.Module, strategy: str) -> torch.optim.Optimizer:
    """Return the optimizer that the plan is told of; it makes no temporaries."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=strategy != "fsdp", foreach=False)


def sample_of(work: Work) -> Tensor:
    """Return a worker's part of the batch."""
    sample = Sample.parse(work.sample)
    shape = (work.batch, *sample.shape)
    return torch.randint(VOCABULARY, shape) if sample.is_ids else torch.randn(shape)


if __name__ == "__main__":
    main()
