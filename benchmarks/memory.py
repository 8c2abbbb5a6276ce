"""Peak memory of servers and workers while they train, beside what has to be there.

    python benchmarks/memory.py --workers 2

A table of N bytes needs, under bsp over shared memory: values, momentum, and the gradient of each of P workers, which
is also the message; nothing else, (2 + P) N on the whole host. Values are mapped by all, a gradient by its worker and
the server, and what is mapped by several counts in equal parts on each (PSS): the server has
(1 + 1/(1 + P) + P/2) N, a worker (1/(1 + P) + 1/2) N. Over tcp nothing is shared: on the server values and momentum,
what of both is saved for a successor, and a push of each worker, (4 + P) N; on a worker
parameters, gradient and the values that arrive, 3 N.
What a process of an almost empty table takes (the interpreter and torch) is measured in the same run and taken off.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import psutil
from cyclopts import App, Parameter
from measuring import machine, print_json, progress
from turns import BENCHMARKS, PlayFailed, Side, Stage

BASE_PARAMETERS: Final = 6400
NUM_STEPS: Final = 6
# glibc keeps freed memory below a limit that grows by itself. With this one it goes back, and is not counted.
GIVE_BACK: Final = {"MALLOC_MMAP_THRESHOLD_": "65536"}
SAMPLE_S: Final = 0.005
FIELDS: Final = {"pss": "Pss:", "private": "Private_Dirty:"}
MB: Final = 1e6

app = App(name="memory.py", help="Measure the peak memory of each role.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory of one process, in bytes: shared pages by halves, private pages alone, and ever resident."""

    pss: int
    private: int
    resident: int

    def __sub__(self, base: "Peak") -> "Peak":
        """Return what this is more than another."""
        return Peak(self.pss - base.pss, self.private - base.private, self.resident - base.resident)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of one job: the server, and the worker that took most."""

    server: Peak
    worker: Peak


@app.default
def memory(
    *,
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    parameters: int = 25_000_000,
    transport: Literal["shm", "tcp"] = "shm",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train and watch the memory; print each role's peak beside the formula.

    Parameters
    ----------
    workers
        Number of workers.
    parameters
        Number of float32 parameters.
    transport
        What the processes talk over.
    json
        Print only one line of JSON on stdout.
    """
    try:
        progress("Measuring an almost empty table, then the whole one")
        base = peaks(workers, BASE_PARAMETERS, transport)
        found = peaks(workers, parameters, transport)
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    server, worker = found.server - base.server, found.worker - base.worker
    tell(workers, 4 * parameters, transport, base, Peaks(server, worker), only_json=json)
    return 0


def peaks(num_workers: int, num_parameters: int, transport: str) -> Peaks:
    """Run a job of this size and return its peaks while it trains."""
    options = ["-n", str(num_workers), "--transport", transport, "--quiet"]
    script = [str(BENCHMARKS / "memory_worker.py"), "{stage}", str(num_parameters)]
    with Stage() as stage:
        command = [sys.executable, "-m", "paceline", "run", *options, *script]
        side = stage.start("paceline", command, num_workers, GIVE_BACK)
        side.ask("step", 1)
        server, *workers = watch(side, [server_pid(side), *side.pids])
        return Peaks(server, max(workers, key=lambda peak: peak.pss))


def server_pid(side: Side) -> int:
    """Return the process of the job's only server."""
    children = psutil.Process(side.process.pid).children(recursive=True)
    servers = [child.pid for child in children if "paceline.launch.server" in child.cmdline()]
    if len(servers) != 1:
        raise side.failure(f"expected one server process, found {servers}")
    return servers[0]


def watch(side: Side, pids: Sequence[int]) -> list[Peak]:
    """Look at the memory of some processes again and again while the side takes steps; return their peaks."""
    most: list[dict[str, int]] = [dict.fromkeys(FIELDS, 0) for _ in pids]
    with ThreadPoolExecutor(1) as threads:
        steps = threads.submit(side.ask, "step", NUM_STEPS)  # ends by its own deadline
        over = False
        while not over:
            over = bool(wait([steps], timeout=SAMPLE_S).done)  # quick steps are over before the first look
            for pid, known in zip(pids, most, strict=True):
                now = read_fields(Path(f"/proc/{pid}/smaps_rollup"), FIELDS)
                known.update({name: max(known[name], now[name]) for name in FIELDS})
        steps.result()
    resident = [read_fields(Path(f"/proc/{pid}/status"), {"resident": "VmHWM:"}) for pid in pids]
    return [Peak(**known, **ever) for known, ever in zip(most, resident, strict=True)]


def read_fields(path: Path, wanted: dict[str, str]) -> dict[str, int]:
    """Return some lines of a file of the kernel, "Name: number kB", in bytes."""
    found = dict(line.split()[:2] for line in path.read_text().splitlines() if len(line.split()) == 3)
    return {name: 1024 * int(found[label]) for name, label in wanted.items()}


def formula(num_workers: int, table_bytes: int, transport: str) -> tuple[float, float]:
    """Return the bytes that a server and a worker must have, of shared memory their part."""
    if transport == "tcp":
        return (4 + num_workers) * table_bytes, 3 * table_bytes
    values = 1 / (1 + num_workers)
    return (1 + values + num_workers / 2) * table_bytes, (values + 1 / 2) * table_bytes


def tell(num_workers: int, table_bytes: int, transport: str, base: Peaks, more: Peaks, *, only_json: bool) -> None:
    """Print what was measured."""
    server_bytes, worker_bytes = formula(num_workers, table_bytes, transport)
    total, total_formula = more.server.pss + num_workers * more.worker.pss, server_bytes + num_workers * worker_bytes
    rows = (("server", more.server, base.server, server_bytes), ("worker", more.worker, base.worker, worker_bytes))
    if not only_json:
        print(
            f"a table of {table_bytes / MB:.0f} MB, momentum SGD, {num_workers} workers over {transport}; {machine()}"
        )
        for role, peak, below, expected in rows:
            print(
                f"  {role}  peak {peak.pss / MB:.0f} MB over {below.pss / MB:.0f} MB of an almost empty one; formula "
                f"{expected / MB:.0f} MB, {peak.pss / expected - 1:+.1%} (private {peak.private / MB:.0f} MB, ever "
                f"resident {peak.resident / MB:.0f} MB)"
            )
        print(f"  host    {total / MB:.0f} MB; formula {total_formula / MB:.0f} MB, {total / total_formula - 1:+.1%}")
    print_json(
        {
            "name": "memory",
            "workers": num_workers,
            "transport": transport,
            "table_mb": table_bytes / MB,
            "server_mb": more.server.pss / MB,
            "server_formula_mb": server_bytes / MB,
            "server_ratio": more.server.pss / server_bytes,
            "worker_mb": more.worker.pss / MB,
            "worker_formula_mb": worker_bytes / MB,
            "worker_ratio": more.worker.pss / worker_bytes,
            "host_ratio": total / total_formula,
            "server_high_water_mb": more.server.resident / MB,
            "worker_high_water_mb": more.worker.resident / MB,
        }
    )


if __name__ == "__main__":
    sys.exit(app())
