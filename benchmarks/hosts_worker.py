"""A worker of the benchmark of hosts: sends and fetches a model over and over, and writes down what that took.

By the public face it takes plain steps with `paceline.distributed`, each after the one before. With tables made by
hand, these are chunks of the model. Each is pushed and its values are asked for before the next one is pushed, in a
clock of its own; a chunk is pushed again once its values have come, so several steps are under way.
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

import paceline
from paceline.api.session import Session
from paceline.worker.table import PendingRead, Table

NUM_LINE_TURNS = 10
_LAYERS = 5


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("step", "overlap", "chunks", "ring", "line"), default="step")
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets the seconds")
    return parser.parse_args()


def by_steps(numel: int, num_steps: int, *, overlap: bool) -> list[float]:
    """Take steps with a distributed optimizer.

    Returns the seconds of a step, those in which it computes (medians of several), and those of the first.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(numel // _LAYERS, 1, bias=False) for _ in range(_LAYERS)))
    plain = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    optimizer = paceline.distributed(plain, model=model, overlap=overlap)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    took: list[float] = []
    computed: list[float] = []
    for _ in range(num_steps + 1):
        began = time.monotonic()
        for layer in model:  # each waits for its own values, with overlap
            layer(torch.ones(numel // _LAYERS))
        torch.cat([parameter.view(-1) for parameter in model.parameters()]).sum().backward()
        computed.append(time.monotonic() - began)
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.monotonic() - began)
    optimizer.wait_for_values()
    moved = sum(2 - 0.5**step for step in range(num_steps + 1))
    for sooner, later in zip(before, model.parameters(), strict=True):
        assert torch.allclose(sooner - moved, later.detach(), atol=1e-3), "the servers have not taken these steps"
    return [median(took[1:]), median(computed[1:]), took[0]]


def by_chunks(ps: Session, numel: int, num_chunks: int, num_steps: int) -> list[float]:
    """Sum and fetch the model by tables made by hand; return the seconds of a step, their median, and of the first."""
    tables = _tables(ps, numel, num_chunks, "bsp")
    gradients = [torch.ones(table.shape) for table in tables]
    _play(ps, tables, gradients, 1)  # memory is made, and connections come to their rate
    ps.barrier()
    began = time.monotonic()
    ends = _play(ps, tables, gradients, num_steps + 2)  # in the first the lines fill, in the last they run empty
    for table in tables:
        values = table.pull(refresh=False)
        assert bool((values == ps.size * (num_steps + 3)).all()), f"{table.name} is {values}"
    return [median(later - sooner for sooner, later in pairwise(ends[:-1])), ends[0] - began]


def _tables(ps: Session, numel: int, num_chunks: int, consistency: str) -> list[Table]:
    sizes = [len(chunk) for chunk in torch.arange(numel).tensor_split(num_chunks)]
    return [
        ps.table(f"chunk{index}", shape=(size,), update=paceline.update.Add(), scale="sum", consistency=consistency)
        for index, size in enumerate(sizes)
    ]


def _play(ps: Session, tables: list[Table], gradients: list[torch.Tensor], num_steps: int) -> list[float]:
    """Take steps; return when the last values of each had come."""
    asked, ends = dict[str, PendingRead](), list[float]()
    for step in range(num_steps + 1):
        for table, gradient in zip(tables, gradients, strict=True):
            _arrive(table, asked)
            if step < num_steps:
                table.push(gradient)
                ps.clock()
                asked[table.name] = table.start_read()
        ends.append(time.monotonic())
    return ends[1:]


def _arrive(table: Table, asked: dict[str, PendingRead]) -> None:
    if table.name in asked:
        table.finish_read(asked.pop(table.name), lambda _: None)


def by_ring(ps: Session, numel: int, num_steps: int) -> list[float]:
    """Return the seconds of a step, on average, over all-reduce."""
    gradient = torch.ones(numel)
    _all_reduce(ps, gradient)
    ps.barrier()
    began = time.monotonic()
    for _ in range(num_steps):
        total = _all_reduce(ps, gradient)
        assert float(total[-1]) == ps.size
    return [(time.monotonic() - began) / num_steps]


def _all_reduce(ps: Session, gradient: torch.Tensor) -> torch.Tensor:
    exchange = ps.exchange
    return exchange.finish(exchange.all_reduce(gradient, "sum", None), "all_reduce", None)


def over_line(ps: Session, numel: int, num_chunks: int) -> list[float]:
    """Return the seconds that pushing the model takes, and fetching it, on average, while the line is kept busy."""
    tables = _tables(ps, numel, num_chunks, "asynchronous")
    gradients = [torch.ones(table.shape) for table in tables]
    _push(tables, gradients, 1)
    _pull(tables, 1)
    return [_push(tables, gradients, NUM_LINE_TURNS), _pull(tables, NUM_LINE_TURNS)]


def _push(tables: list[Table], gradients: list[torch.Tensor], num_turns: int) -> float:
    began = time.monotonic()
    pushes = [t.push(gradient) for _ in range(num_turns) for t, gradient in zip(tables, gradients, strict=True)]
    for push in pushes:
        assert push.result().applied
    return (time.monotonic() - began) / num_turns


def _pull(tables: list[Table], num_turns: int) -> float:
    began, asked = time.monotonic(), dict[str, PendingRead]()
    for _ in range(num_turns):
        for table in tables:
            _arrive(table, asked)
            asked[table.name] = table.start_read()
    for table in tables:
        _arrive(table, asked)
    return (time.monotonic() - began) / num_turns


def main() -> None:
    """Take steps, and write down what one took."""
    chosen = options()
    torch.set_num_threads(1)
    numel = int(chosen.megabytes * 1e6) // 4
    with paceline.init() as ps:
        if chosen.mode in ("step", "overlap"):
            found = by_steps(numel, chosen.steps, overlap=chosen.mode == "overlap")
        elif chosen.mode == "chunks":
            found = by_chunks(ps, numel, chosen.chunks, chosen.steps)
        elif chosen.mode == "ring":
            found = by_ring(ps, numel, chosen.steps)
        else:
            found = over_line(ps, numel, chosen.chunks)
        (chosen.out / f"seconds-{ps.rank}").write_text(" ".join(map(repr, found)))


if __name__ == "__main__":
    main()
