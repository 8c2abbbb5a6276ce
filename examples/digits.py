"""Classify handwritten digits with a small perceptron, and measure it after every epoch: a script to search with.

python examples/digits.py
paceline run -n 2 examples/digits.py --lr 0.1
paceline tune examples/digits_search.yaml examples/digits.py
"""

from argparse import ArgumentParser, Namespace

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline

NUM_TRAINING = 1440


def main() -> None:
    options = parse()
    paceline.init()
    torch.manual_seed(options.seed)
    training, held_out = load()
    batches = paceline.shard(DataLoader(training, batch_size=options.batch, shuffle=True), seed=options.seed)
    model = nn.Sequential(nn.Linear(64, options.hidden), nn.ReLU(), nn.Linear(options.hidden, 10))
    rule = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )
    optimizer = paceline.distributed(rule, model=model)
    accuracy = 0.0
    for _ in range(options.epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            paceline.report(loss=loss.item())
        if paceline.rank() == 0:
            with optimizer.snapshot():
                accuracy = measure(model, *held_out)
    if paceline.rank() == 0:
        print(f"{paceline.size()} worker(s): accuracy {accuracy:.4f} on digits that were held out")


def load() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Return the training examples, and images (357, 64) float32 in 0..1 and labels (357,) that are held out."""
    numbers, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images, labels = torch.from_numpy(numbers)[order].float() / 16, torch.from_numpy(digits)[order]
    training = TensorDataset(images[:NUM_TRAINING], labels[:NUM_TRAINING])
    return training, (images[NUM_TRAINING:], labels[NUM_TRAINING:])


def training() -> TensorDataset:
    """Return the training examples alone: what `paceline.sources.dataset("digits:training")` has data servers build."""
    return load()[0]


def measure(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Report loss and accuracy on what is held out; return the accuracy."""
    scores = model(images)
    accuracy = (scores.argmax(dim=1) == labels).float().mean().item()
    paceline.report(loss=functional.cross_entropy(scores, labels).item(), accuracy=accuracy)
    return accuracy


def parse() -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description="Classify handwritten digits.")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch", type=int, default=32, help="examples a worker takes in each step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
