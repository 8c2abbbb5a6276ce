"""What DistributedDataParallel does after backward, over Gloo: average the gradients, then every worker updates alike.

Run as `python ddp_gloo.py STAGE WORKERS PARAMETERS`.
"""

import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
import work
from spawning import fair_share, run_all
from turns import play

TIMEOUT: Final = timedelta(seconds=120)
BUCKET_BYTES: Final = 25 * 2**20  # as DistributedDataParallel has by default


def worker(stage: str, meeting: str, rank: int, num_workers: int, num_parameters: int) -> None:
    """Be one worker."""
    torch.set_num_threads(fair_share(num_workers))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers, timeout=TIMEOUT)
    parameter = torch.nn.Parameter(torch.from_numpy(work.first_values(num_parameters)))
    gradient = parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=work.LR, momentum=work.MOMENTUM, fused=True)
    gradients = [torch.from_numpy(gradient) for gradient in work.gradients(rank, num_parameters)]
    buckets = gradient.split(BUCKET_BYTES // parameter.element_size())

    def prepare(index: int) -> None:
        gradient.copy_(gradients[index])

    def step(_: object) -> None:
        pending = [dist.all_reduce(bucket.div_(num_workers), async_op=True) for bucket in buckets]
        for reduction in pending:
            reduction.wait()
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
    dist.destroy_process_group()


def main() -> None:
    """Run all workers."""
    stage, num_workers, num_parameters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        run_all(worker, [(stage, meeting, rank, num_workers, num_parameters) for rank in range(num_workers)])


if __name__ == "__main__":
    main()
