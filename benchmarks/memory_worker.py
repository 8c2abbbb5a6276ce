"""One worker of the memory benchmark, with nothing large but a parameter and its gradient; run by `paceline run`."""

import sys

import torch
from turns import play

import paceline

NUM_TENSORS = 200  # what backward needs for one of them is small beside the whole
ALIGNMENT = 16  # elements: parameters can be views where each begins at a multiple of 64 bytes


def main() -> None:
    """Step when asked."""
    stage, num_parameters = sys.argv[1], int(sys.argv[2])
    rank = paceline.init().rank
    size = num_parameters // NUM_TENSORS // ALIGNMENT * ALIGNMENT
    parameters = [torch.nn.Parameter(torch.randn(size)) for _ in range(NUM_TENSORS)]
    plain = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)
    optimizer = paceline.distributed(plain)

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            for parameter in parameters:
                (parameter * parameter).sum().backward()
            optimizer.step()

    play(stage, rank, {"step": step})


if __name__ == "__main__":
    main()
