"""Train a small classifier of handwritten digits: an ordinary PyTorch script with the few calls that make it parallel.

paceline run --workers 4 --servers 2 --consistency ssp:3 digits.py digits.npz
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.tools.demo.runs import SLOW_WORKER, ComputePace


def main() -> None:
    """Train for some epochs; worker 0 then measures the model on the test examples."""
    options = parse()
    paceline.init()
    torch.manual_seed(options.seed)
    training, (test_images, test_labels) = load(options.data)
    batches = paceline.shard(DataLoader(training, batch_size=options.batch, shuffle=True), seed=options.seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = paceline.distributed(
        torch.optim.SGD(model.parameters(), lr=options.lr), model=model, fetch_every=options.fetch_every
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    is_fitful = paceline.size() > 1 and paceline.rank() == SLOW_WORKER
    computing = ComputePace(options.compute_ms / 1000, is_fitful, options.seed).clocks()
    paceline.barrier()  # so that the start of other workers does not count as waiting

    for _ in range(options.epochs):
        for images, labels in batches:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            paceline.report(loss=loss.item())
            time.sleep(next(computing))
            optimizer.step()
        schedule.step()

    paceline.barrier()  # so that every update is applied
    if paceline.rank() == 0:
        with optimizer.snapshot():
            measure(model, test_images, test_labels)


def load(path: Path) -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Return the training examples and the test examples: images (n, 64) float32 in 0..1 and labels (n,) int64."""
    with np.load(path) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
        num_training = int(arrays["num_training"])
    training = TensorDataset(images[:num_training], labels[:num_training])
    return training, (images[num_training:], labels[num_training:])


@torch.no_grad()
def measure(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Report loss and accuracy on held-out examples."""
    scores = model(images)
    accuracy = (scores.argmax(dim=1) == labels).float().mean().item()
    paceline.report(loss=functional.cross_entropy(scores, labels).item(), accuracy=accuracy)


def parse() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("data", type=Path, help="the digits as npz: images, labels, num_training")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=15, help="examples a worker takes in each clock")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compute-ms", type=float, default=20.0, help="simulated computing in each clock")
    parser.add_argument("--fetch-every", type=int, default=None, help="fetch every n-th clock, not when the bound asks")
    return parser.parse_args()


if __name__ == "__main__":
    main()
