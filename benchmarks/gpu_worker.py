"""One worker of the GPU benchmark over Paceline; run by `paceline run`."""

import sys

import torch
import work
from turns import play

import paceline


def main() -> None:
    """Take part in a job of one table whose parameter is on a device, and step when asked."""
    stage, num_parameters = sys.argv[1], int(sys.argv[2])
    rank = paceline.init().rank
    torch.cuda.set_device(rank % torch.cuda.device_count())
    parameter = torch.nn.Parameter(torch.from_numpy(work.first_values(num_parameters)).cuda())
    plain = torch.optim.SGD([parameter], lr=work.LR, momentum=work.MOMENTUM)
    optimizer = paceline.distributed(plain, scale="mean", nonfinite="ignore")
    gradients = [torch.from_numpy(gradient).cuda() for gradient in work.gradients(rank, num_parameters)]

    def prepare(index: int) -> None:
        """Let backward leave a gradient, as in a training loop."""
        optimizer.zero_grad()
        (parameter * gradients[index]).sum().backward()
        torch.cuda.synchronize()

    def step(_: object) -> None:
        optimizer.step()
        torch.cuda.synchronize()

    def write(folder: str) -> None:
        work.write(parameter.detach().cpu().numpy(), f"{folder}/{rank}")

    play(stage, rank, {"prepare": prepare, "step": step, "write": write})


if __name__ == "__main__":
    main()
