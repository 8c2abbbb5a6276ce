"""What the C library of row tables does in a second on one core, beside the same in torch.

    python benchmarks/row_index.py --rows 2000000

Rows of 16 float32 under random 64-bit ids, which are asked for as often as words of a text are (Zipf). A number is
the median of calls with 100,000 ids each, in million ids a second, and the middle half of the calls beside it. Both
kinds take turns, and give the same results, which is checked to the last bit. Inserting starts with an empty index,
which grows by itself on the way.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import torch
from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.ops import RowOps, row_ops

WIDTH: Final = 16
NUM_KEYS: Final = 100_000  # of one call
NUM_SERVERS: Final = 8
TARGETS: Final = {"find": 30.0, "gather": 15.0, "unique": 20.0}  # million a second, by the library

T = TypeVar("T")

app = App(name="row_index.py", help="Measure the index of row tables on one core.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Asked:
    """What all sides do in a round: ids to find, some of them often, and as many rows to write."""

    keys: Tensor
    some: Tensor


@dataclass(slots=True)
class Side:
    """One kind of operations, its index of all ids, and what it took."""

    ops: RowOps
    index: RowIndex
    values: Tensor
    seconds: dict[str, list[float]]
    bytes_per_row: float = 0.0

    @staticmethod
    def of(ops: RowOps, ids: Tensor, values: Tensor) -> "Side":
        """Insert all ids, a call after the other, and time each."""
        side = Side(ops, RowIndex(ops, RowColumn(1, torch.int64)), values.clone(), {"insert": []})
        for keys in ids.split(NUM_KEYS):
            side.take("insert", lambda keys=keys: side.index.add(keys))
        side.bytes_per_row = side.index.memory_bytes / len(side.index)
        return side

    def take(self, name: str, call: Callable[[], T]) -> T:
        """Do something once, and note how long it took."""
        began = time.perf_counter()
        result = call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def millions(self, name: str) -> Sample:
        """Return how many million ids a second passed through a call."""
        return Sample.of([NUM_KEYS / seconds / 1e6 for seconds in self.seconds[name]])


@app.default
def row_index(*, rows: int = 2_000_000, rounds: int = 15, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Time every operation by the library and in torch; print both.

    Parameters
    ----------
    rows
        Number of rows that are there, at least 100000.
    rounds
        Number of calls of each operation.
    json
        Print only one line of JSON on stdout.
    """
    if rows < NUM_KEYS:
        print(f"{rows} rows are too few, expected {NUM_KEYS} or more", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    try:
        kinds = [row_ops("native"), row_ops("torch")]
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=random)
    progress(f"Inserting {rows} ids")
    values = torch.randn(rows, WIDTH, generator=random)
    sides = [Side.of(ops, ids, values) for ops in kinds]
    progress(f"Measuring {rounds} rounds")
    equal = all(take_turns(sides, asked, number) for number, asked in enumerate(draw(ids, rounds, random)))
    tell(sides, rows, equal=equal, only_json=json)
    return 0 if equal else 1


def draw(ids: Tensor, rounds: int, random: torch.Generator) -> Iterator[Asked]:
    """Draw ids for each round, the k-th with a probability of 1/k, and rows to write, all of them different."""
    shares = (1 / torch.arange(1, ids.numel() + 1, dtype=torch.float64)).cumsum(0)
    for _ in range(rounds):
        drawn = torch.rand(NUM_KEYS, dtype=torch.float64, generator=random) * shares[-1]
        some = torch.randperm(ids.numel(), generator=random)[:NUM_KEYS]
        yield Asked(ids[torch.searchsorted(shares, drawn)], some)


def take_turns(sides: list[Side], asked: Asked, number: int) -> bool:
    """Let every side do all operations, in another order every round; return whether they found the same."""
    order = sides[number % len(sides) :] + sides[: number % len(sides)]
    first, *others = [operate(side, asked) for side in order]
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def operate(side: Side, asked: Asked) -> list[Tensor]:
    """Do every operation once; return what came of it."""
    ops, values, keys = side.ops, side.values, asked.keys
    rows = torch.empty(NUM_KEYS, WIDTH)
    slots = side.take("find", lambda: side.index.find(keys))
    side.take("gather", lambda: ops.gather(values, slots, rows))
    distinct, inverse = side.take("unique", lambda: ops.unique(keys))
    sums = side.take("sum_rows", lambda: ops.sum_rows(rows, inverse, distinct.numel()))
    order, _ = side.take("split", lambda: ops.split(keys, NUM_SERVERS))
    side.take("scatter", lambda: ops.scatter(values, asked.some, rows))
    return [slots, rows, distinct, inverse, sums, order, values]


def tell(sides: list[Side], num_rows: int, *, equal: bool, only_json: bool) -> None:
    """Print what was measured."""
    native = sides[0]
    measured = {name: [side.millions(name) for side in sides] for name in native.seconds}
    if not only_json:
        print(f"million ids a second on one core, {num_rows} rows of {WIDTH} float32; {machine()}")
        print(f"  {'':<10}{'native':<26}{'torch':<26}ratio")
        for name, (ours, other) in measured.items():
            target = f"   target {TARGETS[name]:.0f}" if name in TARGETS else ""
            print(f"  {name:<10}{ours.text():<26}{other.text():<26}{ours.median / other.median:.1f}{target}")
        print(f"  the index takes {native.bytes_per_row:.1f} bytes a row; results {'equal' if equal else 'NOT EQUAL'}")
    print_json(
        {
            "name": "row_index",
            "rows": num_rows,
            "equal": equal,
            "index_bytes_per_row": native.bytes_per_row,
            "native": {name: ours.median for name, (ours, _) in measured.items()},
            "torch": {name: other.median for name, (_, other) in measured.items()},
            "targets": TARGETS,
        }
    )


if __name__ == "__main__":
    sys.exit(app())
