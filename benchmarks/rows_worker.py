"""The worker of the rows benchmark: steps on rows of the servers and on a table of its own, in turn."""

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from turns import play
from zipf import Zipf

import paceline

WIDTH = 16
BAG = 10  # ids a bag
LR = 0.01
NUM_BATCHES = 8  # that are made before anything is timed, and used again and again


def main() -> None:
    """Step when asked."""
    stage, num_rows, num_ids = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(0)
    session = paceline.init()
    zipf = Zipf(num_rows)
    places = [zipf.draw(num_ids) for _ in range(NUM_BATCHES)]
    update, policy = paceline.update.SGD(lr=LR), paceline.asynchronous()
    table = session.table("rows", rows=WIDTH, update=update, consistency=policy)
    bags = paceline.EmbeddingBag(None, WIDTH, mode="sum", name="bags", update=update, consistency=policy, init=0.0)
    own = nn.EmbeddingBag(num_rows, WIDTH, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(own.parameters(), lr=LR)
    for ids in zipf.ids.split(num_ids):
        table.push(ids, torch.zeros(len(ids), WIDTH))
        bags.table.push(ids, torch.zeros(len(ids), WIDTH))
    session.clock()
    gradient = torch.randn(num_ids, WIDTH)

    def raw(place: Tensor) -> None:
        ids = zipf.ids[place]
        table.pull(ids)
        table.push(ids, gradient)
        session.clock()

    def module(place: Tensor) -> None:
        bags(zipf.ids[place].view(-1, BAG)).sum().backward()
        session.clock()

    def local(place: Tensor) -> None:
        optimizer.zero_grad()
        own(place.view(-1, BAG)).sum().backward()
        optimizer.step()

    def settle() -> None:
        for each in (table, bags.table):
            each.pull([0])  # answered after all that was pushed before

    play(stage, session.rank, {step.__name__: timed(step, places, settle) for step in (raw, module, local)})


def timed(step: Callable[[Tensor], None], places: list[Tensor], settle: Callable[[], None]) -> Callable[[int], object]:
    """Return what takes some steps and says how long they took, and how much of a core in this process."""
    batches = endless(places)

    def act(num_steps: int) -> object:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step(next(batches))
        settle()
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}

    return act


def endless(places: list[Tensor]) -> Iterator[Tensor]:
    """Repeat the batches."""
    while True:
        yield from places


if __name__ == "__main__":
    main()
