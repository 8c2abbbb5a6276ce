"""A step of many small tables beside one of a single table of their total size: `python benchmarks/tables.py`.

One worker and its server in one process, under bsp. `parts` are declared together, as one table (a dict of shapes), and
so are pulled and pushed; `dense` tables are declared one by one, pulled together (`session.pull`) and pushed; `rows`
are asked for all at once (`pull_later`) and pushed; `layers` are `paceline.Embedding`, forward, backward and the end of
the clock. Many and one take turns, each in a session of its own, and a number is the median of the rounds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import torch
from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress

import paceline

WIDTH: Final = 16
ROWS: Final = 10  # of a small table that a step asks for, or that a dense one has
LR: Final = 0.01
NUM_WARM_UP: Final = 3
STEPS_OF_ONE: Final = 50  # a turn
WAYS: Final = ("parts", "dense", "rows", "layers")
Step = Callable[[], None]

app = App(name="tables.py", help="Measure steps of many small tables.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step takes, in milliseconds: on the clock, and of cores."""

    wall_ms: Sample
    core_ms: Sample


@app.default
def tables(
    *, tables: int = 200, rounds: int = 5, steps: int = 5, json: Annotated[bool, Parameter(negative="")] = False
) -> int:
    """Measure and print.

    Parameters
    ----------
    tables:
        Small tables in a step.
    rounds:
        Turns of each way.
    steps:
        Steps a turn of many tables.
    json:
        Print one JSON object as the last line.
    """
    torch.set_num_threads(1)
    found: dict[str, tuple[Cost, Cost]] = {}
    for way in WAYS:
        found[way] = take_turns(way, tables, rounds, steps)
        progress(
            f"{way}: {found[way][0].wall_ms.text(' ms')} for {tables}, {found[way][1].wall_ms.text(' ms')} for one"
        )
    ratios = {way: many.wall_ms.median / one.wall_ms.median for way, (many, one) in found.items()}
    if not json:
        print(machine())
        for way, (many, one) in found.items():
            print(f"{way:7} {many.wall_ms.text(' ms')} a step of {tables} tables, {one.wall_ms.text(' ms')} of one")
            print(f"{'':7} {many.core_ms.text(' ms')} of cores, {one.core_ms.text(' ms')} of one")
            print(f"{'':7} {ratios[way]:.1f} times the time (target 2)")
    print_json(
        {
            "name": "tables",
            "tables": tables,
            **{f"{way}_ms": many.wall_ms.median for way, (many, _) in found.items()},
            **{f"{way}_over_one": ratio for way, ratio in ratios.items()},
        }
    )
    return 0


def step_of(way: str, session: paceline.Session, num_tables: int, num_rows: int) -> Step:
    """Return a step of some tables of one size."""
    update, names = paceline.update.SGD(lr=LR), [f"{way}-{num_tables}-{number}" for number in range(num_tables)]
    ids, gradient = torch.arange(num_rows), torch.ones(num_rows, WIDTH)
    if way == "parts":
        shapes = dict.fromkeys(names, (num_rows, WIDTH))
        parts = session.table(way, shape=shapes, update=update, consistency="bsp")

        def step() -> None:
            parts.pull()
            parts.push(dict.fromkeys(names, gradient))
            session.clock()

    elif way == "dense":
        dense = [session.table(name, shape=(num_rows, WIDTH), update=update, consistency="bsp") for name in names]

        def step() -> None:
            session.pull(*dense)
            for table in dense:
                table.push(gradient)
            session.clock()

    elif way == "rows":
        rows = [session.table(name, rows=WIDTH, update=update, consistency="bsp") for name in names]

        def step() -> None:
            for asked in [table.pull_later(ids) for table in rows]:
                asked.result()
            for table in rows:
                table.push(ids, gradient)
            session.clock()

    else:
        layers = [paceline.Embedding(None, WIDTH, name=name, update=update, consistency="bsp") for name in names]

        def step() -> None:
            torch.stack([layer(ids).sum() for layer in layers]).sum().backward()
            session.clock()

    return step


def turn(way: str, num_tables: int, num_rows: int, num_steps: int) -> tuple[float, float]:
    """Open some tables and step; return the milliseconds of a step, on the clock and of cores."""
    session = paceline.init()
    try:
        step = step_of(way, session, num_tables, num_rows)
        for _ in range(NUM_WARM_UP):
            step()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step()
        return 1e3 * (time.perf_counter() - began) / num_steps, 1e3 * (time.process_time() - cpu) / num_steps
    finally:
        session.close()


def take_turns(way: str, num_tables: int, num_rounds: int, num_steps: int) -> tuple[Cost, Cost]:
    """Have many tables and one step by turns, each in a session of its own."""
    many: list[tuple[float, float]] = []
    one: list[tuple[float, float]] = []
    for _ in range(num_rounds):
        many.append(turn(way, num_tables, ROWS, num_steps))
        one.append(turn(way, 1, num_tables * ROWS, STEPS_OF_ONE))
    found = [Cost(*(Sample.of(list(each)) for each in zip(*times, strict=True))) for times in (many, one)]
    return found[0], found[1]


if __name__ == "__main__":
    app()
