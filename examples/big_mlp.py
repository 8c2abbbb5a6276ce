"""A perceptron that is too big for one worker's memory, and fits when workers hold it between them.

    paceline run --strategy all-reduce examples/big_mlp.py              # refused: it does not fit
    paceline run --strategy pipeline:2 examples/big_mlp.py
    paceline run --strategy tensor:2 examples/big_mlp.py
    paceline run --strategy fsdp examples/big_mlp.py
    paceline run --strategy parameter-server examples/big_mlp.py        # Adam's moments are on the servers

--cap says how many MB training may take of a worker's memory, beyond what Python and torch take: a small model is
trained first, for that. What a strategy needs is computed as `paceline plan` does, before anything is made; what it has
taken is measured.
"""

import ctypes
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from batches import batch_of_replica
from big_mlp_plan import MEGA, Task, refuse_unless_it_fits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

NUM_CLASSES = 16
SMALL_WIDTH = 64
MMAP_THRESHOLD = -3  # what the C library calls M_MMAP_THRESHOLD


def main(options: Namespace) -> None:
    """Train for some steps if the plan says that it fits, and say how much memory that took."""
    give_back_what_is_freed()
    ps = paceline.init()
    cap_bytes = MEGA * options.cap
    task = Task(options.width, options.blocks, options.batch)
    planned_bytes = refuse_unless_it_fits(task, ps.arrangement.distribution, ps.size, cap_bytes)
    train(ps, options, "small", SMALL_WIDTH, num_steps=2)  # so that all libraries are there
    before_bytes = peak_bytes()
    loss = train(ps, options, "big", options.width, options.steps)
    taken_bytes = peak_bytes() - before_bytes
    told = f"planned {planned_bytes / MEGA:.0f} MB, taken {taken_bytes / MEGA:.0f} MB of {cap_bytes / MEGA:.0f} MB"
    print(f"worker {ps.rank} of {ps.size}: {told}; last loss {loss:.3f}")
    if taken_bytes > cap_bytes:
        raise SystemExit(f"worker {ps.rank} has taken more than --cap allows: {told}.")


def train(ps: paceline.Session, options: Namespace, name: str, width: int, num_steps: int) -> float:
    """Train a perceptron of this width for some steps; return the last loss."""
    torch.manual_seed(options.seed)
    batch = batch_of_replica(ps, options.batch)
    loader = DataLoader(samples(num_steps * options.batch, width), batch)
    with torch.device("meta"):  # without memory, until a worker knows its part
        whole = perceptron(width, options.blocks)
    model = paceline.parallelize(whole, loss=cross_entropy)
    is_sliced = ps.arrangement.distribution.data == "fsdp"  # slices take no fused steps; others need no copies in them
    adam = torch.optim.Adam(model.parameters(), lr=options.rate, fused=not is_sliced)
    optimizer = paceline.distributed(adam, model=model, name=name)
    loss = 0.0
    for inputs, labels in paceline.shard(loader):
        optimizer.zero_grad()
        loss = model.forward_backward(inputs, labels)
        optimizer.step()
        paceline.report(loss=loss)
    ps.barrier()
    return loss


def perceptron(width: int, num_blocks: int) -> nn.Sequential:
    """Return blocks of two layers each, which tensor ranks split as one, and the scores of the classes."""
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()) for _ in range(num_blocks)
    ]
    return nn.Sequential(*blocks, nn.Linear(width, NUM_CLASSES))


def samples(num_samples: int, width: int) -> TensorDataset:
    """Return random points, each of the class that a fixed direction of its own gives it."""
    inputs = torch.randn(num_samples, width)
    directions: Tensor = torch.randn(width, NUM_CLASSES)
    return TensorDataset(inputs, (inputs @ directions).argmax(1))


def give_back_what_is_freed() -> None:
    """Have the C library return large blocks to the system: by default it keeps them once one was freed, in pieces."""
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)


def peak_bytes() -> int:
    """Return the most memory that this process has had, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def parse() -> Namespace:
    parser = ArgumentParser(description="A perceptron too big for one worker.")
    parser.add_argument("--cap", type=float, default=450, help="memory that training may take of a worker, in MB")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, of all replicas together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
