"""Classify handwritten digits that data servers hold, roughen and hand out, each once an epoch.

paceline run -n 2 --data-servers 1 examples/digits_fed.py
"""

import torch
from digits import load
from torch import Tensor, nn
from torch.nn import functional

import paceline

Record = tuple[Tensor, Tensor]


def main() -> None:
    paceline.init()
    torch.manual_seed(0)
    source = paceline.sources.dataset("digits:training")
    batches = paceline.feed(source, batch_size=32, shuffle=True, transform="digits_fed:roughened")
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model)
    for _ in range(10):
        for images, labels in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if paceline.rank() == 0:
        with optimizer.snapshot():
            _, (images, labels) = load()
            print(f"accuracy {(model(images).argmax(dim=1) == labels).float().mean():.4f}")


def roughened(record: Record, generator: torch.Generator) -> Record:
    """Add some noise to an image, other noise in every epoch."""
    image, label = record
    return image + 0.1 * torch.randn(64, generator=generator), label


if __name__ == "__main__":
    main()
