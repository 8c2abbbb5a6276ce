"""One worker of the dense benchmarks over Paceline; run by `paceline run`, or alone."""

import sys

import torch
import work
from turns import play

import paceline


def main() -> None:
    """Take part in a job of one table, and step when asked."""
    stage, num_parameters, nonfinite = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    rank = paceline.init().rank
    parameter = torch.nn.Parameter(torch.from_numpy(work.first_values(num_parameters)))
    plain = torch.optim.SGD([parameter], lr=work.LR, momentum=work.MOMENTUM, fused=True)
    optimizer = paceline.distributed(plain, scale="mean", nonfinite=nonfinite)
    gradients = [torch.from_numpy(gradient) for gradient in work.gradients(rank, num_parameters)]

    def prepare(index: int) -> None:
        """Let backward leave a gradient, as in a training loop."""
        optimizer.zero_grad()
        (parameter * gradients[index]).sum().backward()

    def step(_: object) -> None:
        optimizer.step()

    play(
        stage,
        rank,
        {
            "prepare": prepare,
            "step": step,
            "steps": work.steps_of(prepare, step),
            "write": lambda folder: work.write(parameter.detach().numpy(), f"{folder}/{rank}"),
            "threads": lambda _: torch.get_num_threads(),
        },
    )


if __name__ == "__main__":
    main()
