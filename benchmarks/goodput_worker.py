"""One worker of `goodput.py`: steps until it is told to leave, and notes when each of its steps ended."""

import os
import sys
import time
from pathlib import Path
from typing import Final

import torch

import paceline

WIDTH: Final = 1 << 20
COMPUTE_S: Final = 0.2  # by sleeping


def steps_path(folder: Path, rank: int) -> Path:
    """Return the file with the moments of a worker's steps, in all its lives."""
    return folder / f"steps-{rank}"


def pid_path(folder: Path, rank: int) -> Path:
    """Return the file with the process that is this worker."""
    return folder / f"pid-{rank}"


def main() -> None:
    """Train for as long as the job lets it."""
    folder = Path(sys.argv[1])
    paceline.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(1 << 10, WIDTH >> 10, bias=False)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model=model)
    rank = paceline.rank()
    pid_path(folder, rank).write_text(str(os.getpid()))
    inputs = torch.randn(1 << 10, generator=torch.Generator().manual_seed(rank))
    with steps_path(folder, rank).open("a") as steps:
        while True:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            time.sleep(COMPUTE_S)  # in the place of more computing
            optimizer.step()
            steps.write(f"{time.monotonic()}\n")
            steps.flush()


if __name__ == "__main__":
    main()
