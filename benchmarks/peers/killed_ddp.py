"""DDP over Gloo, a worker of which is killed: `killed_ddp.py FOLDER CLOCKS [tuned]`, started by torchrun.

It is the script of PyTorch's tutorial; tuned, worker 0 saves model and optimizer in every clock, and all begin from
there.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from kill_log import LR, MOMENTUM, TUNED, Log, noise
from kill_model import Model
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for so many clocks, from what was saved."""
    folder, num_clocks, saves = sys.argv[1], int(sys.argv[2]), TUNED in sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), Path(folder) / "saved.pt"
    log = Log(folder, rank, is_target=True)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    first = 0
    if saves and saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["clock"]
    for clock in range(first, num_clocks):
        optimizer.zero_grad()
        model(noise(rank, clock)).backward()
        optimizer.step()
        log.step(clock)
        if saves and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "clock": clock + 1}
            torch.save(state, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
    log.end(model.module.values.detach().numpy())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
