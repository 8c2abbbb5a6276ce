"""A worker that reads data in one of the ways that benchmarks/data.py compares, and prints what it took."""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from data_records import Decoded
from reassignment_worker import SimulatedCompute, step
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session

MEMORY_BATCH = 256
DECODE_BATCH = 32
PACED_BATCH = 48
PACED_SLICES = 12
SLOW = 1

Batches = Iterable[list[Tensor]]


def say(**found: object) -> None:
    """Print a line for the benchmark to read."""
    print("found " + json.dumps(found), flush=True)


def in_memory(folder: Path, rounds: int) -> None:
    """Read all that is in memory, epoch by epoch: with a loader of torch's own, and from a data server."""
    images, labels = (torch.from_numpy(numpy.load(folder / f"{name}.npy")) for name in ("images", "labels"))
    ways: dict[str, Iterable[Any]] = {
        "DataLoader": DataLoader(TensorDataset(images, labels), batch_size=MEMORY_BATCH, shuffle=True),
        "data server": paceline.feed(
            paceline.sources.arrays(images=folder / "images.npy", labels=folder / "labels.npy"),
            batch_size=MEMORY_BATCH,
            shuffle=True,
            leases=False,
        ),
    }
    for number in range(rounds + 1):
        for way, batches in ways.items():
            start, num_samples = time.perf_counter(), 0
            for batch in batches:
                inputs, targets = batch.values() if isinstance(batch, dict) else batch
                inputs.sum(), targets.sum()
                num_samples += len(targets)
            if number:  # the first round is not counted: files are read, memory is touched
                say(way=way, samples_per_s=num_samples / (time.perf_counter() - start))


def decoding(rounds: int, num_samples: int, step_ms: float, names: list[str]) -> None:
    """Train on records that have to be decoded; computing is a sleep for each batch, as if on a device."""
    makes: dict[str, Callable[[], Batches]] = {
        "in the loop": lambda: DataLoader(Decoded(num_samples), batch_size=DECODE_BATCH, shuffle=True),
        "in 1 process of a DataLoader": lambda: _with_processes(num_samples, 1),
        "in 2 processes of a DataLoader": lambda: _with_processes(num_samples, 2),
        "on data servers": lambda: paceline.feed(
            paceline.sources.dataset("data_records:Packed", num_samples=num_samples),
            batch_size=DECODE_BATCH,
            shuffle=True,
            transform="data_records:decode",
            leases=False,
        ),
    }
    ways = {name: makes[name]() for name in names}
    for number in range(rounds + 1):
        for way, batches in ways.items():
            found = _with_pretended_steps(batches, step_ms / 1000)
            if number:
                say(way=way, **found)


def _with_processes(num_samples: int, num_workers: int) -> Batches:
    return DataLoader(
        Decoded(num_samples), batch_size=DECODE_BATCH, shuffle=True, num_workers=num_workers, persistent_workers=True
    )


def _with_pretended_steps(batches: Batches, step_s: float) -> dict[str, float]:
    compute, num_steps, waited_s = SimulatedCompute(step_s / DECODE_BATCH), 0, 0.0
    used_s, start = time.thread_time(), time.perf_counter()
    before = start
    for inputs, _ in batches:
        came = time.perf_counter()
        waited_s += came - before
        compute.finish(time.monotonic(), len(inputs))
        num_steps, before = num_steps + 1, time.perf_counter()
    seconds = time.perf_counter() - start
    return {
        "step_ms": 1000 * seconds / num_steps,
        "wait_ms": 1000 * waited_s / num_steps,
        "cpu_ms": 1000 * (time.thread_time() - used_s) / num_steps,
    }


def paced(ps: Session, rounds: int, num_clocks: int, sample_ms: float) -> None:
    """Train where worker 1 takes twice as long for every sample: with fixed parts, and with leases."""
    source = paceline.sources.dataset("data_worker:numbers", num_samples=PACED_BATCH * ps.size * num_clocks)
    for number in range(rounds):
        for way, options in {"fixed parts": {"leases": False}, "leases": {"slices": PACED_SLICES}}.items():
            batches = paceline.feed(source, batch_size=PACED_BATCH, **options)
            seconds, num_samples = _train_paced(ps, batches, sample_ms / 1000, f"{way} {number}")
            say(way=way, rank=ps.rank, seconds=seconds, samples=num_samples)


def numbers(num_samples: int) -> TensorDataset:
    """Make samples to learn nothing from."""
    return TensorDataset(torch.ones(num_samples, 8))


def _train_paced(ps: Session, batches: Iterable[Any], sample_s: float, name: str) -> tuple[float, int]:
    model = nn.Linear(8, 1)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), consistency="bsp", name=name)
    compute, num_samples = SimulatedCompute(sample_s * (2 if ps.rank == SLOW else 1)), 0
    ps.barrier()
    start = time.monotonic()
    for (inputs,) in batches:
        began = time.monotonic()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        compute.finish(began, len(inputs))
        step(ps, optimizer)
        num_samples += len(inputs)
    ps.barrier()
    return time.monotonic() - start, num_samples


def main() -> None:
    """Do what the benchmark asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("in-memory", "decoding", "paced"))
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--ms", type=float, help="of a step (decoding) or a sample (paced)")
    parser.add_argument("--clocks", type=int)
    parser.add_argument("--ways", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    ps = paceline.init()
    match options.part:
        case "in-memory":
            in_memory(options.folder, options.rounds)
        case "decoding":
            decoding(options.rounds, options.samples, options.ms, options.ways)
        case _:
            paced(ps, options.rounds, options.clocks, options.ms)


if __name__ == "__main__":
    main()
