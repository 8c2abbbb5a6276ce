"""A table that is larger than its memory: rows come in, are trained further at random, and are read back exactly.

    python benchmarks/spill.py --rows 10000000

All ids are pushed once, in batches, then random ones again and again; every row that is read after that is compared
with what it must be, which follows from its id. The memory is that of the whole process above what it had before the
table: private pages, where the index lies, and pages of files, where the rows lie.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Annotated, Final

import torch
from cyclopts import App, Parameter
from measuring import machine, print_json, progress
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.named_rules import Add
from paceline.update.rows.layout import index_bytes, row_bytes
from paceline.update.rows.ops import row_ops
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import Lifecycle, RowTableSpec
from paceline.update.rows.store import RowContribution, RowStore

WIDTH: Final = 8
BATCH_ROWS: Final = 1 << 17
ODD: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # times a number, modulo 2**64: ids without order, and all different
FIELDS: Final = {"RssAnon:": "anonymous", "RssFile:": "file"}
REPORT_S: Final = 5.0
SAMPLE_S: Final = 0.002
MIB: Final = 2**20

app = App(name="spill.py", help="Measure a table that is larger than its memory.", help_format="plaintext")


@dataclass(slots=True)
class Resident:
    """The memory of this process above what it had when this was made, in bytes, and the most there was."""

    base: dict[str, int] = field(default_factory=lambda: resident())
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys([*FIELDS.values(), "both"], 0))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look again and again as long as the block takes."""
        done = Event()
        with ThreadPoolExecutor(1) as threads:
            watching = threads.submit(self._watch, done)
            try:
                yield
            finally:
                done.set()
            watching.result()

    def _watch(self, done: Event) -> None:
        while not done.wait(SAMPLE_S):
            now = {name: value - self.base[name] for name, value in resident().items()}
            now["both"] = sum(now.values())
            self.peak = {name: max(self.peak[name], now[name]) for name in now}


@dataclass(slots=True)
class Pace:
    """How fast rows went by, and a line about it every now and then."""

    what: str
    num_rows: int
    start_s: float = field(default_factory=time.monotonic)
    num_done: int = 0
    busy_s: float = 0.0
    core_s: float = 0.0
    told_s: float = 0.0

    @contextmanager
    def timed(self, num: int) -> Iterator[None]:
        """Count rows that go by in the block."""
        start_s, core_s = time.perf_counter(), time.thread_time()
        yield
        self.num_done += num
        self.busy_s += time.perf_counter() - start_s
        self.core_s += time.thread_time() - core_s
        self._tell()

    def _tell(self) -> None:
        elapsed_s = time.monotonic() - self.start_s
        if elapsed_s - self.told_s > REPORT_S:
            self.told_s = elapsed_s
            left_s = elapsed_s * (self.num_rows / self.num_done - 1)
            progress(
                f"{self.what}: {self.num_done / 1e6:.1f} M of {self.num_rows / 1e6:.1f} M rows, {left_s:.0f} s left"
            )

    @property
    def rows_per_s(self) -> float:
        """Rows a second, without the time to make them up or to check them."""
        return self.num_done / self.busy_s

    @property
    def rows_per_core_s(self) -> float:
        """Rows a second that a core works for it: others' work and waits for the disk do not count."""
        return self.num_done / self.core_s


@app.default
def spill(
    *,
    rows: int = 100_000_000,
    budget_mib: int = 2048,
    directory: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Push all rows, update and read random ones; print memory, speed and whether all were right.

    Parameters
    ----------
    rows
        Number of rows, of 8 float32 each.
    budget_mib
        The memory of the table.
    directory
        Where the rest goes; a folder for temporary files when left out.
    json
        Print only one line of JSON on stdout.
    """
    life = Lifecycle(memory_bytes=budget_mib * MIB, spill=str(directory or tempfile.gettempdir()))
    spec = RowTableSpec("rows", WIDTH, "float32", Add(), "asp", "sum", "ignore", life=life)
    rule = row_rule(spec.rule, allowed=None)
    torch.set_num_threads(1)
    touch_allocators()
    memory = Resident()
    times = torch.zeros(rows, dtype=torch.uint8)  # that a row was updated: the check's own
    memory.base["anonymous"] += times.nbytes
    try:
        store = RowStore(spec, rule, row_ops())
        with memory.watched():
            paces, num_wrong = run(store, times)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    statistics = store.statistics()
    store.close()
    result: dict[str, object] = {
        "name": "spill",
        "million_rows": rows / 1e6,
        "budget_mib": budget_mib,
        "peak_mib": memory.peak["both"] / MIB,
        "peak_anonymous_mib": memory.peak["anonymous"] / MIB,
        "peak_file_mib": memory.peak["file"] / MIB,
        "peak_of_budget": memory.peak["both"] / (budget_mib * MIB),
        "table_mib": (statistics.index_bytes + statistics.spilled_bytes) / MIB,
        "bytes_per_row": (statistics.index_bytes + statistics.spilled_bytes) / statistics.num_rows,
        "bytes_per_row_by_formula": row_bytes(spec, rule) + index_bytes(rows) / rows,
        "million_rows_per_core_second": {pace.what: pace.rows_per_core_s / 1e6 for pace in paces},
        "million_rows_per_second": {pace.what: pace.rows_per_s / 1e6 for pace in paces},
        "num_wrong": num_wrong,
    }
    if not json:
        tell(result)
    print_json(result)
    return 0 if num_wrong == 0 and memory.peak["both"] <= budget_mib * MIB else 1


def run(store: RowStore, times: Tensor) -> tuple[list[Pace], int]:
    """Push, update, and read back; return the paces, and how many rows were not what they must be.

    Args:
        store: empty.
        times: (rows,), zeros, which become how often each row was updated.
    """
    num_rows = len(times)
    num_again = max(BATCH_ROWS, num_rows // 100)
    random = torch.Generator().manual_seed(0)
    paces = [Pace("pushed new", num_rows), Pace("updated", num_again), Pace("read", num_again)]
    for numbers in batches(num_rows):
        push(store, numbers, 0, paces[0])
    for clock in range(1, 1 + num_again // BATCH_ROWS):
        numbers = torch.randint(num_rows, (BATCH_ROWS,), generator=random).unique()
        push(store, numbers, clock, paces[1])
        times[numbers] += 1
    num_wrong = 0
    for _ in range(num_again // BATCH_ROWS):
        numbers = torch.randint(num_rows, (BATCH_ROWS,), generator=random)
        ids = ids_of(numbers)
        with paces[2].timed(len(ids)):
            found = store.read(ids, 0)
        expected = gradient_of(numbers) * (1 + times[numbers].float())[:, None]
        num_wrong += int((found != expected).any(1).sum())
    return paces, num_wrong


def push(store: RowStore, numbers: Tensor, clock: int, pace: Pace) -> None:
    """Push some rows once."""
    contribution = RowContribution(ids_of(numbers), gradient_of(numbers))
    with pace.timed(len(numbers)):
        store.apply([contribution], clock)


def batches(num_rows: int) -> Iterator[Tensor]:
    """Return the numbers of all rows, some at a time."""
    for start in range(0, num_rows, BATCH_ROWS):
        yield torch.arange(start, min(start + BATCH_ROWS, num_rows))


def ids_of(numbers: Tensor) -> Tensor:
    """Return the ids of rows: without order, negative ones too."""
    return numbers * ODD


def gradient_of(numbers: Tensor) -> Tensor:
    """Return what is pushed to rows, (n, width): small whole numbers, so that sums of them are exact."""
    return ((numbers[:, None] >> torch.arange(WIDTH)) % 1021 - 510).float()


def touch_allocators() -> None:
    """Do all that will be done once, on a small scale, so that only the table's memory is new afterwards."""
    numbers = torch.arange(BATCH_ROWS)
    gradient_of(numbers).add_(ids_of(numbers)[:, None]).unique()


def resident() -> dict[str, int]:
    """Return the bytes of this process that are in main memory, private ones and those of files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {FIELDS[line[0]]: 1024 * int(line[1]) for line in lines if line and line[0] in FIELDS}


def tell(result: dict[str, object]) -> None:
    """Print what was measured."""
    print(f"{result['million_rows']:.1f} M rows of {WIDTH} float32; {machine()}")
    print(
        f"  memory  peak {result['peak_mib']:.0f} MiB of a budget of {result['budget_mib']} MiB "
        f"({result['peak_anonymous_mib']:.0f} MiB private, {result['peak_file_mib']:.0f} MiB of files); "
        f"the table has {result['table_mib']:.0f} MiB"
    )
    print(f"  a row   {result['bytes_per_row']:.1f} bytes, formula {result['bytes_per_row_by_formula']:.1f}")
    print(f"  million rows/s  {result['million_rows_per_second']}, of a core {result['million_rows_per_core_second']}")
    print(f"  rows that were not exact: {result['num_wrong']}")


if __name__ == "__main__":
    sys.exit(app())
