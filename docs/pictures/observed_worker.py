"""The worker of the runs that `draw_observability.py` looks at: what is wrong with them, its options say."""

import argparse
import time

import torch
from torch import nn

import paceline

NUM_FEATURES = 20
BATCH = 64
LATE_CLOCK = 15  # from which on the row is hot
HOT = 7


def train(options: argparse.Namespace, rank: int) -> None:
    """Fit a linear model to made-up data; worker 1 may take longer."""
    torch.manual_seed(0)
    wanted = torch.randn(NUM_FEATURES)
    model = nn.Linear(NUM_FEATURES, 1)
    optimizer = paceline.distributed(
        torch.optim.SGD(model.parameters(), lr=options.lr), model=model, consistency=options.consistency
    )
    draw = torch.Generator().manual_seed(rank)
    for clock in range(options.steps):
        inputs = torch.randn(BATCH, NUM_FEATURES, generator=draw)
        targets = inputs @ wanted + 0.3 * torch.randn(BATCH, generator=draw)
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        time.sleep(options.step_s + (options.slow_s if rank == 1 and clock >= options.slow_from else 0.0))
        paceline.report(loss=loss.item())
        optimizer.step()


def push_rows(options: argparse.Namespace, session: paceline.Session) -> None:
    """Push rows drawn evenly from many, and after a while one of them each time."""
    table = session.table("words", rows=8, update=paceline.update.Add(), consistency=paceline.bsp(), scale="sum")
    draw = torch.Generator().manual_seed(session.rank)
    for clock in range(options.steps):
        ids = torch.randint(1_000_000, (256,), generator=draw).unique()
        if clock >= LATE_CLOCK:
            ids[0] = HOT
        time.sleep(options.step_s)
        table.pull(ids[:4])
        table.push(ids, torch.ones(len(ids), 8))
        session.clock()


def main() -> None:
    """Train, or push rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--step-s", type=float, default=0.03)
    parser.add_argument("--slow-s", type=float, default=0.0, help="that worker 1 takes longer")
    parser.add_argument("--slow-from", type=int, default=0, help="from which clock on")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--consistency", default="bsp")
    parser.add_argument("--rows", action="store_true")
    options = parser.parse_args()
    session = paceline.init()
    if options.rows:
        push_rows(options, session)
    else:
        train(options, session.rank)


if __name__ == "__main__":
    main()
