"""A worker of the managed benchmark: matrix factorization whose items are rows on the server.

Users are dealt out, so their factors stay with their worker. Each clock is so many milliseconds of computing, more
or less: the gradient, a look at the loss, and sleep for the rest.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.worker.rows.table import RowTable

RANK = 32
NUM_USERS, NUM_ITEMS, NUM_RATINGS = 1200, 3000, 120_000  # of all workers together
NOISE = 0.1
BATCH = 800  # ratings of one worker in a clock
SPREAD = 0.3  # of the first factors


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="clock_only")
    parser.add_argument("--budget-mbps", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--bound", type=int, default=16)
    parser.add_argument("--clock-ms", type=float, default=100.0)
    parser.add_argument("--lr", type=float, default=0.07)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets the curve")
    return parser.parse_args()


def ratings(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return users, items and ratings of a low-rank matrix; items are as popular as words are (Zipf)."""
    draws = torch.Generator().manual_seed(seed)
    popularity = 1.0 / torch.arange(1, NUM_ITEMS + 1).float()
    users = torch.randint(NUM_USERS, (NUM_RATINGS,), generator=draws)
    items = torch.multinomial(popularity, NUM_RATINGS, replacement=True, generator=draws)
    left = torch.randn(NUM_USERS, RANK, generator=draws) / RANK**0.25
    right = torch.randn(NUM_ITEMS, RANK, generator=draws) / RANK**0.25
    noise = NOISE * torch.randn(NUM_RATINGS, generator=draws)
    return users, items, (left[users] * right[items]).sum(1) + noise


@dataclass
class Factorization:
    """A worker's part: its ratings, the factors of its users, and the items as it last saw them."""

    table: RowTable
    users: Tensor
    items: Tensor
    values: Tensor
    factors: Tensor
    view: Tensor
    lr: float
    draws: torch.Generator

    def step(self) -> float:
        """Push the gradient of a batch; return the loss over all own ratings."""
        batch = torch.randint(len(self.values), (BATCH,), generator=self.draws)
        users, (touched, places) = self.users[batch], self.items[batch].unique(return_inverse=True)
        rows = self.table.pull(touched)
        self.view[touched] = rows
        error = (self.factors[users] * rows[places]).sum(1) - self.values[batch]
        gradient = torch.zeros_like(rows).index_add_(0, places, error[:, None] * self.factors[users])
        self.factors.index_add_(0, users, error[:, None] * rows[places], alpha=-self.lr)
        self.table.push(touched, gradient)
        return float(((self.factors[self.users] * self.view[self.items]).sum(1) - self.values).square().mean())


def begin(ps: Session, chosen: argparse.Namespace) -> Factorization:
    """Open the table, and take this worker's part of the ratings."""
    users, items, values = ratings(chosen.seed)
    mine = (users % ps.size == ps.rank).nonzero().squeeze(1)  # each worker has users of its own, numbered anew
    draws = torch.Generator().manual_seed(1000 * chosen.seed + ps.rank)
    communication = None
    if chosen.policy != "clock_only":
        communication = paceline.managed(chosen.budget_mbps, priority=chosen.policy, seed=chosen.seed)
    table = ps.table(
        "items",
        rows=RANK,
        update=paceline.update.SGD(lr=chosen.lr),
        consistency=f"ssp:{chosen.bound}",
        init=paceline.first.normal(SPREAD, seed=chosen.seed),
        communication=communication,
    )
    factors = SPREAD * torch.randn(NUM_USERS // ps.size + 1, RANK, generator=draws)
    view = table.pull(torch.arange(NUM_ITEMS))
    return Factorization(table, users[mine] // ps.size, items[mine], values[mine], factors, view, chosen.lr, draws)


def train(ps: Session, chosen: argparse.Namespace) -> list[tuple[float, int, float]]:
    """Train until the time is over; return (seconds of the monotonic clock, clock, loss) after each step."""
    paces = torch.Generator().manual_seed(ps.rank)
    job, curve = begin(ps, chosen), list[tuple[float, int, float]]()
    ps.barrier()
    end = time.monotonic() + chosen.seconds
    while (began := time.monotonic()) < end:
        loss = job.step()
        curve.append((time.monotonic(), ps.node.clock, loss))
        # Half as long to half as long again, so that workers do not all read at the same moment.
        computing_s = chosen.clock_ms / 1000 * (0.5 + float(torch.rand((), generator=paces)))
        time.sleep(max(0.0, computing_s - (time.monotonic() - began)))
        ps.clock()
    return curve


def main() -> None:
    """Train, and write down the curve."""
    chosen = options()
    torch.set_num_threads(1)
    with paceline.connect() as ps:
        curve = train(ps, chosen)
        lines = [" ".join(map(repr, point)) for point in curve]
        (chosen.out / f"curve-{ps.rank}").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
