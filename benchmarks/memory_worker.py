"""One worker of the memory benchmark, with nothing large but a parameter and its gradient; run by `paceline run`."""

import sys

import torch
from turns import play

import paceline


def main() -> None:
    """Step when asked."""
    stage, num_parameters = sys.argv[1], int(sys.argv[2])
    rank = paceline.init().rank
    parameter = torch.nn.Parameter(torch.randn(num_parameters))
    plain = torch.optim.SGD([parameter], lr=0.01, momentum=0.9, fused=True)
    optimizer = paceline.distributed(plain)

    def step(num_steps: int) -> None:
        for _ in range(num_steps):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.normal_()
            optimizer.step()

    play(stage, rank, {"step": step})


if __name__ == "__main__":
    main()
