"""What a step is without servers: all workers add up the gradients on their devices, and each updates all by itself.

Run as `python gpu_reduce.py STAGE BACKEND WORKERS PARAMETERS`.
"""

import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import work
from spawning import run_all
from turns import play

TIMEOUT: Final = timedelta(seconds=120)


def worker(stage: str, meeting: str, backend: str, rank: int, num_workers: int, num_parameters: int) -> None:
    """Be one worker."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=num_workers, timeout=TIMEOUT
    )
    parameter = torch.nn.Parameter(torch.from_numpy(work.first_values(num_parameters)).cuda())
    gradient = parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=work.LR, momentum=work.MOMENTUM, fused=True)
    gradients = [torch.from_numpy(gradient).cuda() for gradient in work.gradients(rank, num_parameters)]

    def prepare(index: int) -> None:
        gradient.copy_(gradients[index])
        torch.cuda.synchronize()

    def step(_: object) -> None:
        dist.all_reduce(gradient.div_(num_workers))
        optimizer.step()
        torch.cuda.synchronize()

    def write(folder: str) -> None:
        work.write(parameter.detach().cpu().numpy(), f"{folder}/{rank}")

    play(stage, rank, {"prepare": prepare, "step": step, "write": write})
    dist.destroy_process_group()


def main() -> None:
    """Run all workers."""
    stage, backend, num_workers, num_parameters = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        run_all(worker, [(stage, meeting, backend, rank, num_workers, num_parameters) for rank in range(num_workers)])


if __name__ == "__main__":
    main()
