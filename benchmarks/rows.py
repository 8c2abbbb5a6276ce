"""Rows pulled and pushed in a second of one core, beside the same work on a table of the worker's own.

    python benchmarks/rows.py --rows 2000000

One worker and one server, two processes: rows of 16 float32 with plain SGD, of which every step draws 100,000 ids as
often as words of a text are (Zipf). The core seconds are those of both processes. `raw` pulls the rows of the ids and
pushes a gradient for each; `module` is `paceline.EmbeddingBag` with bags of 10, forward and backward; `local` is
`torch.nn.EmbeddingBag(sparse=True)` with `torch.optim.SGD` on the same ids. They take turns, and a number is the
median of the rounds. Then the store alone: the library and torch by turns, and the memory of a row by the formula.
Last a knowledge graph of the size of FB15k, see `rows_graph.py`: the triples that four workers and two servers train in
a second, as a multiple of those of one process of torch with two threads, with dense gradients and with sparse ones.
"""

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Final

import psutil
import torch
from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress
from memory import server_pid
from rows_worker import LR, WIDTH
from turns import BENCHMARKS, PlayFailed, Side, Stage
from zipf import Zipf

import paceline
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.layout import index_bytes, row_bytes
from paceline.update.rows.ops import row_ops
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rows.store import RowStore

STEPS: Final = 10  # a turn
WAYS: Final = ("raw", "module", "local")
NUM_GRAPH_WORKERS: Final = 4
GRAPH_STEPS: Final = 100  # a turn

app = App(name="rows.py", help="Measure row tables.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step takes, in milliseconds: on the clock, and of cores in all processes."""

    wall_ms: Sample
    core_ms: Sample


@app.default
def rows(
    *,
    rows: int = 2_000_000,
    ids: int = 100_000,
    rounds: int = 9,
    transport: str = "shm",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Measure and print.

    Parameters
    ----------
    rows:
        Rows of the tables.
    ids:
        Ids of a step.
    rounds:
        Turns of each way.
    transport:
        How worker and server talk.
    json:
        Print one JSON object as the last line.
    """
    try:
        costs = job(rows, ids, rounds, transport)
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    per_core = Sample.of([ids / costs["raw"].core_ms.median / 1e3])
    ratio = costs["module"].wall_ms.median / costs["local"].wall_ms.median
    core_ratio = costs["module"].core_ms.median / costs["local"].core_ms.median
    progress("the store alone, with the library and with torch")
    native_ms, torch_ms, bytes_per_row = store(rows, ids, rounds)
    try:
        graph_ms = graph(rounds, transport)
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    over_dense, over_sparse = (graph_ms[each].median / graph_ms["paceline"].median for each in ("dense", "sparse"))
    spec = table_spec()
    formula = row_bytes(spec, row_rule(spec.rule, None)) + index_bytes(rows) / rows
    if not json:
        print(machine())
        for way, cost in costs.items():
            print(f"{way:8} {cost.wall_ms.text(' ms')} a step, {cost.core_ms.text(' ms')} of cores")
        print(f"{per_core.median:.2f} M rows a second and core, pulled and pushed (target 1)")
        print(f"module against local: {ratio:.2f} times the time, {core_ratio:.2f} times the cores (target 2)")
        print(f"store: {native_ms.text(' ms')} a step with the library, {torch_ms.text(' ms')} with torch")
        print(f"memory: {bytes_per_row:.1f} bytes a row, {formula:.1f} by the formula")
        for name, each in graph_ms.items():
            print(f"knowledge graph, {name:8} {each.text(' ms')} for 256 triples")
        print(f"knowledge graph: {over_dense:.2f} times the triples of torch, {over_sparse:.2f} with sparse gradients")
    print_json(
        {
            "name": "rows",
            "million_rows_per_second_per_core": per_core.median,
            "ratio_to_local": ratio,
            "core_ratio_to_local": core_ratio,
            "native_over_torch": torch_ms.median / native_ms.median,
            "bytes_per_row": bytes_per_row,
            "bytes_per_row_by_formula": formula,
            "graph_ms": graph_ms["paceline"].median,
            "graph_over_torch": over_dense,
            "graph_over_sparse_torch": over_sparse,
        }
    )
    return 0


def job(num_rows: int, num_ids: int, rounds: int, transport: str) -> dict[str, Cost]:
    """Run one worker and one server, and let it step in each way by turns."""
    script = [str(BENCHMARKS / "rows_worker.py"), "{stage}", str(num_rows), str(num_ids)]
    command = [sys.executable, "-m", "paceline", "run", "-n", "1", "--transport", transport, "--quiet", *script]
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with Stage() as stage:
        side = stage.start("paceline", command, 1, {})
        server = psutil.Process(server_pid(side))
        for number in range(rounds + 1):
            for way in WAYS:
                found[way].append(turn(side, server, way))
            progress(f"round {number} of {rounds}: " + ", ".join(f"{way} {found[way][-1][0]:.1f} ms" for way in WAYS))
    return {
        way: Cost(Sample.of([wall for wall, _ in turns[1:]]), Sample.of([core for _, core in turns[1:]]))
        for way, turns in found.items()
    }


def turn(side: Side, server: psutil.Process, way: str) -> tuple[float, float]:
    """Let the worker step in one way; return milliseconds a step, on the clock and of cores."""
    before = server.cpu_times()
    [answer] = side.ask(way, STEPS).answers
    after = server.cpu_times()
    core_s = answer["cpu"] + after.user + after.system - before.user - before.system
    return 1e3 * answer["seconds"] / STEPS, 1e3 * core_s / STEPS


def graph(rounds: int, transport: str) -> dict[str, Sample]:
    """Let workers and torch step on a knowledge graph by turns; return the milliseconds of 256 triples, by side."""
    script = str(BENCHMARKS / "rows_graph.py")
    job = [sys.executable, "-m", "paceline", "run", "-n", str(NUM_GRAPH_WORKERS), "--servers", "2", "--quiet"]
    times: dict[str, list[float]] = {"paceline": [], "dense": [], "sparse": []}
    with Stage() as stage:
        sides = {
            name: stage.start(name, [sys.executable, script, "{stage}", name], 1, {}) for name in ("dense", "sparse")
        }
        command = [*job, "--transport", transport, script, "{stage}", "paceline"]
        sides["paceline"] = stage.start("paceline", command, NUM_GRAPH_WORKERS, {})
        for number in range(rounds + 1):
            for name, side in sides.items():
                seconds = max(side.ask("step", GRAPH_STEPS).answers)
                times[name].append(1e3 * seconds / GRAPH_STEPS / len(side.lines))
            progress(
                f"graph, round {number} of {rounds}: " + ", ".join(f"{name} {times[name][-1]:.2f} ms" for name in times)
            )
    return {name: Sample.of(each[1:]) for name, each in times.items()}


def table_spec() -> RowTableSpec:
    """Return the table that both parts of this benchmark use."""
    return RowTableSpec("rows", WIDTH, "float32", paceline.update.SGD(lr=LR), "asynchronous", "sum", "reject")


def store(num_rows: int, num_ids: int, rounds: int) -> tuple[Sample, Sample, float]:
    """Read and update rows of two stores by turns; return milliseconds a step of both, and bytes a row."""
    torch.set_num_threads(1)
    zipf, spec = Zipf(num_rows), table_spec()
    stores = {name: RowStore(spec, row_rule(spec.rule, None), row_ops(name)) for name in ("native", "torch")}
    times: dict[str, list[float]] = {name: [] for name in stores}
    for each in stores.values():
        for ids in zipf.ids.split(num_ids):
            each.apply([RowContribution(ids, torch.zeros(len(ids), WIDTH))], 0)
    for _ in range(rounds):
        ids = zipf.ids[zipf.draw(num_ids).unique()]
        gradient = torch.randn(len(ids), WIDTH)
        for name, each in stores.items():
            began = time.perf_counter()
            each.read(ids, 0)
            each.apply([RowContribution(ids, gradient)], 0)
            times[name].append(1e3 * (time.perf_counter() - began))
    bytes_per_row = stores["native"].statistics().memory_bytes / num_rows
    for each in stores.values():
        each.close()
    return Sample.of(times["native"]), Sample.of(times["torch"]), bytes_per_row


if __name__ == "__main__":
    app()
