"""The players of the knowledge graph in the rows benchmark: workers of Paceline, or one process of torch alone.

A step takes 256 triples of a graph of the size of FB15k: 512 entities and 256 relations, of 100 numbers each, drawn as
often as ranks have it (Zipf), and moves head + relation towards tail.
"""

import sys
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from turns import leave_session, play
from zipf import Zipf

import paceline

NUM_ENTITIES: Final = 14_951
NUM_RELATIONS: Final = 1_345
WIDTH: Final = 100
TRIPLES: Final = 256  # a step
LR: Final = 0.01
NUM_BATCHES: Final = 16  # that are made before anything is timed, and used again and again
Layer = Callable[[Tensor], Tensor]


def main() -> None:
    """Step when asked: as a worker of a job, or with torch alone."""
    stage, kind = sys.argv[1:]
    if kind == "paceline":
        session = paceline.init()
        torch.manual_seed(session.rank)
        play(stage, session.rank, {"step": timed(ours(session), session.rank)})
        return
    leave_session()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    play(stage, 0, {"step": timed(alone(sparse=kind == "sparse"), 0)})


def ours(session: paceline.Session) -> Callable[[Tensor, Tensor], None]:
    """Return a step on rows of the servers."""
    update, policy = paceline.update.SGD(lr=LR), paceline.asynchronous()
    entities = paceline.Embedding(NUM_ENTITIES, WIDTH, name="entities", update=update, consistency=policy)
    relations = paceline.Embedding(NUM_RELATIONS, WIDTH, name="relations", update=update, consistency=policy)

    def step(ends: Tensor, between: Tensor) -> None:
        loss(entities, relations, ends, between).backward()
        session.clock()

    return step


def alone(*, sparse: bool) -> Callable[[Tensor, Tensor], None]:
    """Return a step on tables of this process, with or without sparse gradients."""
    entities = nn.Embedding(NUM_ENTITIES, WIDTH, sparse=sparse)
    relations = nn.Embedding(NUM_RELATIONS, WIDTH, sparse=sparse)
    optimizer = torch.optim.SGD([*entities.parameters(), *relations.parameters()], lr=LR)

    def step(ends: Tensor, between: Tensor) -> None:
        optimizer.zero_grad()
        loss(entities, relations, ends, between).backward()
        optimizer.step()

    return step


def loss(entities: Layer, relations: Layer, ends: Tensor, between: Tensor) -> Tensor:
    """Return how far the tails are from where heads and relations point."""
    heads, tails = entities(ends).unbind()
    return (heads + relations(between) - tails).square().sum(1).mean()


def timed(step: Callable[[Tensor, Tensor], None], rank: int) -> Callable[[int], float]:
    """Return what takes some steps and says how many seconds they took."""
    entities, relations = Zipf(NUM_ENTITIES, seed=rank), Zipf(NUM_RELATIONS, seed=rank)
    batches = [(entities.draw(2 * TRIPLES).view(2, -1), relations.draw(TRIPLES)) for _ in range(NUM_BATCHES)]

    def act(num_steps: int) -> float:
        began = time.perf_counter()
        for number in range(num_steps):
            step(*batches[number % NUM_BATCHES])
        return time.perf_counter() - began

    return act


if __name__ == "__main__":
    main()
