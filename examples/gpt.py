"""A small GPT that learns the characters of a text, distributed in any way by a flag alone.

    python examples/gpt.py
    paceline run --strategy all-reduce examples/gpt.py
    paceline run --strategy ssp:3 examples/gpt.py
    paceline run --strategy pipeline:2 examples/gpt.py
    paceline run --strategy tensor:2 examples/gpt.py
    paceline run --strategy fsdp examples/gpt.py
    paceline run -n 4 --strategy all-reduce+pipeline:2 examples/gpt.py

--text names a file to read; without it, the words of Python's standard library are read. Under every strategy the
replicas together take --batch windows a step, so that equally many steps see equally many samples. Side by side:

    paceline compare examples/gpt.py --strategies all-reduce,ssp:3,pipeline:2,tensor:2,all-reduce+pipeline:2@4
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch
from batches import batch_of_replica
from gpt_model import GPT, Shape, loss_of
from gpt_text import Windows, read_text
from torch import nn
from torch.utils.data import DataLoader

import paceline

NUM_HELD_OUT = 4  # times the batch


def main(options: Namespace) -> None:
    """Train, then measure the model on the end of the text."""
    ps = paceline.init()
    text = read_text(options.text)
    torch.manual_seed(options.seed)
    shape = Shape(len(text.characters), options.length, options.width, options.blocks, options.heads)
    model = paceline.parallelize(GPT(shape), loss=loss_of, reduction="mean")
    optimizer = paceline.distributed(torch.optim.AdamW(model.parameters(), lr=options.rate), model=model)

    batch = batch_of_replica(ps, options.batch)
    windows = Windows(text.training, options.length, options.steps * options.batch, options.seed)
    ps.barrier()  # time counts from here
    for inputs, targets in paceline.shard(DataLoader(windows, batch_size=batch)):
        optimizer.zero_grad()
        loss = model.forward_backward(inputs, targets)
        optimizer.step()
        paceline.report(loss=loss)

    ps.barrier()
    with optimizer.snapshot():
        held_out = Windows(text.held_out, options.length, NUM_HELD_OUT * options.batch, options.seed)
        loss, accuracy = judge(model, DataLoader(held_out, batch))
    if ps.rank == 0:
        paceline.report(loss=loss, accuracy=accuracy)
        print(f"{ps.size} worker(s): held-out loss {loss:.3f}, next character right {accuracy:.3f}")


def judge(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return the mean loss, and the share of characters whose successor got the highest score."""
    losses, right = [], []
    for inputs, targets in loader:
        scores = model(inputs)
        losses.append(loss_of(scores, targets))
        right.append((scores.argmax(-1) == targets).float().mean())
    return float(torch.stack(losses).mean()), float(torch.stack(right).mean())


def parse() -> Namespace:
    parser = ArgumentParser(description="A small GPT on the characters of a text.")
    parser.add_argument("--text", type=Path, help="a file; by default the words of Python's standard library")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step, of all replicas together")
    parser.add_argument("--length", type=int, default=64, help="characters of a window")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
