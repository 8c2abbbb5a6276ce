"""How long an all-reduce on one machine takes: the backend "paceline" beside Gloo, in turns in the same processes.

python benchmarks/all_reduce.py [--workers 2] [--elements 1000 25000000] [--rounds 15] [--json]
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from measuring import Sample, machine, print_json
from peers.spawning import fair_share, run_all

import paceline  # noqa: F401 - makes its backend known to torch

BACKENDS: Final = ("gloo", "paceline")
SHORT_S: Final = 0.05  # a round of calls on a small tensor takes about as long


def worker(folder: str, rank: int, num_workers: int, elements: Sequence[int], num_rounds: int, as_json: bool) -> None:
    """Be one worker; the first prints."""
    torch.set_num_threads(fair_share(num_workers))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_workers)
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    sizes: list[dict[str, object]] = []
    for size in elements:
        times = measure(groups, size, num_rounds)
        found = {backend: Sample.of(each) for backend, each in times.items()}
        ratio = found["gloo"].median / found["paceline"].median
        medians = {f"{backend}_ms": one.median * 1e3 for backend, one in found.items()}
        sizes.append({"name": f"{num_workers}-{size}", "ratio": ratio, **medians})
        told = ", ".join(
            f"{backend} {Sample(one.median * 1e3, one.low * 1e3, one.high * 1e3).text(' ms', 3)}"
            for backend, one in found.items()
        )
        if not rank and not as_json:
            print(f"{num_workers} workers, {size} x float32: {told}; {ratio:.2f} times as fast", flush=True)
    if not rank and as_json:
        print_json({"name": "all-reduce", "workers": num_workers, "sizes": sizes})
    dist.barrier()
    dist.destroy_process_group()


def measure(groups: dict[str, dist.ProcessGroup], size: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds that a call takes in each round; the backends take turns."""
    tensor = torch.ones(size)
    times: dict[str, list[float]] = {backend: [] for backend in groups}
    num_calls = 1
    for round_ in range(num_rounds + 1):
        for backend, group in groups.items():
            tensor.fill_(1.0)
            took_s = call_for(lambda group=group: dist.all_reduce(tensor, group=group), num_calls)
            if round_:
                times[backend].append(took_s)
        if not round_:  # which has also touched all memory
            agreed = torch.tensor([max(1.0, SHORT_S / took_s)])
            dist.broadcast(agreed, 0)
            num_calls = min(500, int(agreed))
    return times


def call_for(call: Callable[[], object], num_calls: int) -> float:
    """Return how long one of several calls takes that all workers begin together."""
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - began_s) / num_calls


def main() -> None:
    """Run all workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--elements", type=int, nargs="+", default=[1_000, 100_000, 25_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if not asked.json:
        print(machine())
    with tempfile.TemporaryDirectory() as folder:
        arguments = (asked.workers, asked.elements, asked.rounds, asked.json)
        run_all(worker, [(str(Path(folder)), rank, *arguments) for rank in range(asked.workers)])


if __name__ == "__main__":
    main()
