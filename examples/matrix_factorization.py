"""Matrix factorization by SGD: a rating is the product of a row of its user and a row of its item, both learned.

The rows lie on the servers. Each worker goes through its part of the ratings, 1 % of it in a clock, and pushes what to
add to the rows that it met. It keeps the rows that it pulled, and asks for them again only when the consistency demands
it. Alone or as several workers, with the ratings of MovieLens or with made-up ones:

    python examples/matrix_factorization.py
    paceline run --workers 4 --servers 2 --consistency essp:3 examples/matrix_factorization.py ml-1m/ratings.dat

`matrix_factorization_figure.py` beside it compares policies.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from ratings import Ratings, load
from torch import Tensor

import paceline

WIDTH = 20  # numbers a row
CLOCKS_A_PASS = 100
READS_A_CLOCK = 4  # rows are read when they are needed, all through the clock
SNAPSHOT_EVERY = 10  # clocks


@dataclass(frozen=True, slots=True)
class Factors:
    """What is learned: a row for each user and for each item."""

    users: paceline.RowTable
    items: paceline.RowTable

    @staticmethod
    def open(ps: paceline.Session, seed: int) -> Factors:
        """Open the tables; the worker applies the step size itself, and every push counts in full, also under bsp."""
        users, items = (
            ps.table(
                name,
                rows=WIDTH,
                update=paceline.update.Add(),
                scale="sum",
                init=paceline.first.normal(0.1, seed=2 * seed + number),
                cache=True,
            )
            for number, name in enumerate(("users", "items"))
        )
        return Factors(users, items)

    def steps(self, ratings: Ratings, size: float) -> tuple[Tensor, Tensor]:
        """Return what each rating adds to the row of its user, and to that of its item: (n, WIDTH) both."""
        left, right = self.users.pull(ratings.users), self.items.pull(ratings.items)
        along = 2 * size * errors(left, right, ratings.values).unsqueeze(1)
        return along * right, along * left

    def push(self, ratings: Ratings, for_users: Tensor, for_items: Tensor) -> None:
        """Add to the rows of the ratings; those of a user or item that comes several times are summed."""
        self.users.push(ratings.users, for_users)
        self.items.push(ratings.items, for_items)


def errors(left: Tensor, right: Tensor, values: Tensor) -> Tensor:
    """Return what the products of rows lack of the ratings."""
    return values - (left * right).sum(dim=1)


def train(ps: paceline.Session, factors: Factors, own: Ratings, options: Namespace) -> None:
    """Go through this worker's ratings for some clocks."""
    num_each = max(1, len(own) // CLOCKS_A_PASS)
    began = time.monotonic()
    for clock in range(options.clocks):
        of_clock = own[torch.arange(clock * num_each, (clock + 1) * num_each) % len(own)]
        steps: list[tuple[Tensor, Tensor]] = []
        for number, part in enumerate(of_clock.cut(READS_A_CLOCK), start=1):
            steps.append(factors.steps(part, options.step))
            rest(began + (clock + number / READS_A_CLOCK) * options.clock_ms / 1000)
        factors.push(of_clock, *(torch.cat(of_parts) for of_parts in zip(*steps, strict=True)))
        ps.clock()


def rest(until: float) -> None:
    """Make computing take as long on every worker as if each had a machine of its own."""
    time.sleep(max(0.0, until - time.monotonic()))


def watch(ps: paceline.Session, factors: Factors, ratings: Ratings, options: Namespace) -> None:
    """Copy all rows now and then, and write how the square loss fell; computed at the end, when it disturbs no worker.

    A worker that pushes nothing is done with its clocks before all others. So none waits for it, and it waits in an
    exact pull until they have come as far.
    """
    began, copies = time.monotonic(), []
    users, of_user = ratings.users.unique(return_inverse=True)
    items, of_item = ratings.items.unique(return_inverse=True)
    for clock in range(0, options.clocks + 1, SNAPSHOT_EVERY):
        left, right = factors.users.pull(users, exact=True), factors.items.pull(items, exact=True)
        copies.append((clock, time.monotonic() - began, left, right))
        for _ in range(SNAPSHOT_EVERY):
            ps.clock()
    ps.barrier()
    whose = list(zip(of_user.split(1 << 15), of_item.split(1 << 15), ratings.values.split(1 << 15), strict=True))
    curve = [
        (clock, seconds, sum(errors(left[u], right[i], x).double().square().sum().item() for u, i, x in whose))
        for clock, seconds, left, right in copies
    ]
    options.watch.write_text(json.dumps(curve))


def main() -> None:
    options = parse()
    training, test = load(options.ratings, options.seed)
    with paceline.connect() as ps:
        factors = Factors.open(ps, options.seed)
        num_learners = ps.size - (options.watch is not None)
        ps.barrier()  # so that no worker's start counts
        if ps.rank < num_learners:
            train(ps, factors, training[ps.rank :: num_learners], options)
            ps.barrier()  # now all pushes of all workers are applied
        else:
            watch(ps, factors, training, options)
        if ps.rank == 0 and options.watch is None:
            rmse = [root_mean_square(factors, ratings) for ratings in (training, test)]
            print(f"{ps.size} worker(s): root mean square error {rmse[0]:.3f}, {rmse[1]:.3f} on held-out ratings")


def root_mean_square(factors: Factors, ratings: Ratings) -> float:
    """Return the size of a typical error."""
    left, right = factors.users.pull(ratings.users, exact=True), factors.items.pull(ratings.items, exact=True)
    return errors(left, right, ratings.values).square().mean().sqrt().item()


def parse() -> Namespace:
    parser = ArgumentParser(description="Factorize a matrix of ratings.")
    parser.add_argument("ratings", type=Path, nargs="?", help="u.data, ratings.dat, ratings.csv or moviedata.mat")
    parser.add_argument("--step", type=float, default=0.02, help="size of a step along the gradient of one rating")
    parser.add_argument("--clocks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the ratings, and of the first rows")
    parser.add_argument("--clock-ms", type=float, default=0.0, help="let each clock take so long, by sleeping")
    parser.add_argument("--watch", type=Path, help="let the last worker write the losses here: [clock, seconds, loss]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
