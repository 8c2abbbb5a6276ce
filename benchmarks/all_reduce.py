"""How long an all-reduce takes: the backend "paceline" beside Gloo, in turns in the same processes.

    python benchmarks/all_reduce.py [--workers 2] [--elements 1000 25000000] [--rounds 15] [--json]
    python benchmarks/all_reduce.py --mbps 1000 [--workers 4]

With `--mbps`, each worker is on a host in a network namespace of its own, at a line of this rate, 0 for one without a
limit; ours goes over tcp and, encrypted, over tls, where Gloo goes in plain. That needs root, and `ip` and `tc`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from measuring import Sample, machine, print_json
from peers.spawning import fair_share, run_all
from shaped_network import CannotShapeError, Line, ShapedNetwork

import paceline  # noqa: F401 - makes its backend known to torch
from paceline.collective.meeting import FarAccess
from paceline.collective.torch_backend import connect
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.transport.base import Credentials
from paceline.transport.tcp import TcpTransport
from paceline.wire.messages import Hello

BACKENDS: Final = ("gloo", "paceline")
FAR_BACKENDS: Final = ("gloo", "tcp", "tls")
SHORT_S: Final = 0.05  # a round of calls on a small tensor takes about as long
TIMEOUT_S: Final = 550.0
MTU: Final = 9000
CREDENTIALS: Final = Credentials(token=bytes(range(32)), job="benchmark")


def worker(
    folder: str,
    rank: int,
    num_workers: int,
    elements: Sequence[int],
    num_rounds: int,
    as_json: bool,
    backends: Sequence[str] = BACKENDS,
) -> None:
    """Be one worker; the first prints."""
    torch.set_num_threads(fair_share(num_workers))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_workers)
    groups = {backend: dist.new_group(backend=backend) for backend in backends}
    sizes: list[dict[str, object]] = []
    for size in elements:
        times = measure(groups, size, num_rounds)
        found = {backend: Sample.of(each) for backend, each in times.items()}
        ratio = found["gloo"].median / found[backends[-1]].median
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


def far_worker(host: int, address: str, folder: str, num_workers: int, asked: argparse.Namespace) -> None:
    """Be one worker on a host of its own."""
    for carrier in FAR_BACKENDS[1:]:
        tls = tls_settings(Path(folder), Holder("worker", host)) if carrier == "tls" else None
        access = FarAccess(TcpTransport(CREDENTIALS, tls=tls), f"tcp://{address}:0", Hello("worker", host, 0, 1))
        make = partial(connect, find_access=lambda access=access: access)
        dist.Backend.register_backend(carrier, make, devices=["cpu"])
    worker(folder, host, num_workers, asked.elements, asked.rounds, asked.json, FAR_BACKENDS)


def run_on_hosts(folder: str, asked: argparse.Namespace) -> None:
    """Run each worker on a host of its own; blocks until all have ended."""
    authority, rate = Authority.make(CREDENTIALS.job), asked.mbps or None
    for rank in range(asked.workers):
        authority.issue(Path(folder), Holder("worker", rank))
    lines = [Line(rate, rate)] * asked.workers
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "line", "OMP_NUM_THREADS": "1"}
    with ShapedNetwork(lines, queue_ms=200.0, mtu=MTU, congestion="reno") as network:
        told = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        hosts = [(str(host), network.address(host)) for host in range(asked.workers)]
        commands = [network.command(int(host), *told, "--host", host, "--address", at) for host, at in hosts]
        running = [subprocess.Popen(command, env=environment) for command in commands]
        try:
            codes = [process.wait(TIMEOUT_S) for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
    if any(codes):
        sys.exit(f"all_reduce.py: workers ended with {codes}")


def main() -> None:
    """Run all workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--elements", type=int, nargs="+", default=[1_000, 100_000, 25_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mbps", type=float, help="put each worker on a host of its own, at a line of this rate")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.host is not None:
        far_worker(asked.host, asked.address, asked.folder, asked.workers, asked)
        return
    if not asked.json:
        print(machine())
    with tempfile.TemporaryDirectory() as folder:
        if asked.mbps is not None:
            try:
                run_on_hosts(folder, asked)
            except CannotShapeError as problem:
                sys.exit(f"all_reduce.py: {problem}")
            return
        arguments = (asked.workers, asked.elements, asked.rounds, asked.json)
        run_all(worker, [(str(Path(folder)), rank, *arguments) for rank in range(asked.workers)])


if __name__ == "__main__":
    main()
