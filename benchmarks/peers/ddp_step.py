"""The step benchmark over DistributedDataParallel and Gloo: `python ddp_step.py STAGE MODEL WORKERS`."""

import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from spawning import fair_share, run_all
from step_learner import Learner
from torch.nn.parallel import DistributedDataParallel
from turns import play

TIMEOUT: Final = timedelta(seconds=120)


def worker(stage: str, meeting: str, task: str, rank: int, num_workers: int) -> None:
    """Be one worker."""
    torch.set_num_threads(fair_share(num_workers))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers, timeout=TIMEOUT)
    learner = Learner(task, rank)
    model = DistributedDataParallel(learner.model, gradient_as_bucket_view=True)
    optimizer = learner.make_optimizer()
    acts = {
        "step": lambda num_steps: learner.train(model, optimizer, num_steps),
        "write": lambda folder: learner.write(f"{folder}/{rank}"),
    }
    play(stage, rank, acts)
    dist.destroy_process_group()


def main() -> None:
    """Run all workers."""
    stage, task, num_workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        run_all(worker, [(stage, meeting, task, rank, num_workers) for rank in range(num_workers)])


if __name__ == "__main__":
    main()
