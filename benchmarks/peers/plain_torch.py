"""What a script does without any distribution: torch's fused optimizer, in one process.

Run as `python plain_torch.py STAGE WORKERS PARAMETERS`; the number of workers must be 1.
"""

import sys

import torch
import work
from turns import play


def main() -> None:
    """Take steps when asked."""
    stage, num_workers, num_parameters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if num_workers != 1:
        raise SystemExit(f"plain torch is one worker, asked for {num_workers}")
    parameter = torch.nn.Parameter(torch.from_numpy(work.first_values(num_parameters)))
    gradient = parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=work.LR, momentum=work.MOMENTUM, fused=True)
    gradients = [torch.from_numpy(gradient) for gradient in work.gradients(0, num_parameters)]

    def prepare(index: int) -> None:
        gradient.copy_(gradients[index])

    def step(_: object) -> None:
        optimizer.step()

    play(
        stage,
        0,
        {
            "prepare": prepare,
            "step": step,
            "steps": work.steps_of(prepare, step),
            "write": lambda folder: work.write(parameter.detach().numpy(), f"{folder}/0"),
            "threads": lambda _: torch.get_num_threads(),
        },
    )


if __name__ == "__main__":
    main()
