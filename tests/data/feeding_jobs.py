"""Jobs whose workers are fed: from data servers that are threads of the test, or by reading themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from tests.jobs import Job, job, join_all
from tests.training.recipes import loss_of, mlp, parameters, sgd
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import sources
from paceline.api.session import Session
from paceline.data.service.server import DataServer
from paceline.job.carriers import listen_address
from paceline.job.spec import ClusterSpec

BATCH_SIZE = 6


def numbers(num: int) -> tuple[Tensor, Tensor]:
    """Which sample this is, and what to compute with."""
    generator = torch.Generator().manual_seed(7)
    return torch.arange(num), torch.randn(num, 9, generator=generator, dtype=torch.float64)


def write_numbers(folder: Path, num: int) -> sources.Source:
    """The same as arrays."""
    for name, column in zip(("indices", "values"), numbers(num), strict=True):
        np.save(folder / f"{name}-{num}.npy", column.numpy())
    return sources.arrays(indices=folder / f"indices-{num}.npy", values=folder / f"values-{num}.npy")


@contextmanager
def fed_job(directory: Path, *, data_servers: int = 0, carrier: str = "memory", **settings: Any) -> Iterator[Job]:
    """Start a job, with data servers if there are to be any; nothing is left of them afterwards."""
    with job(directory, carrier=carrier, **settings) as started:
        listeners = [started.transport.listen(_place(carrier, started.spec, rank)) for rank in range(data_servers)]
        nodes = [
            DataServer(rank, one, started.transport, generation=1, checks_memory=True)
            for rank, one in enumerate(listeners)
        ]
        threads = [threading.Thread(target=node.run, name="test-data-server", daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        addresses = tuple(listener.address for listener in listeners)
        started.spec = replace(started.spec, num_data_servers=data_servers, data_addresses=addresses)
        try:
            yield started
        finally:
            for node in nodes:
                node.stop()
            join_all(threads)


def _place(carrier: str, spec: ClusterSpec, rank: int) -> str:
    return f"memory://data-{rank}" if carrier == "memory" else listen_address(spec, rank, role="data")


@dataclass
class Training:
    """An ordinary loop over what `make` returns; the result is losses, values and the clock at the end.

    `before` is called with the worker and the number of its batch in the clock.
    """

    make: Callable[[], Any]
    num_epochs: int = 1
    consistency: str = "bsp"
    before: Callable[[Session, int], None] = lambda worker, number: None
    # The samples that each worker was given in clocks that it has finished.
    counted: dict[int, list[int]] = field(default_factory=dict)

    def __call__(self, worker: Session) -> tuple[list[float], Tensor, int]:
        model = mlp().double()
        optimizer = paceline.distributed(sgd(model), consistency=self.consistency)
        loader = self.make()
        counted, pending, losses = self.counted.setdefault(worker.rank, []), list[int](), list[float]()
        number = 0
        for _ in range(self.num_epochs):
            for batch in loader:
                indices, values = batch.values() if isinstance(batch, dict) else batch
                self.before(worker, number)
                clock = worker.node.clock
                optimizer.zero_grad()
                loss = loss_of(model, values)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                pending += indices.tolist()
                number += 1
                if worker.node.clock > clock:
                    counted += pending
                    pending, number = [], 0
        worker.barrier()
        with optimizer.snapshot():
            return losses, parameters(model), worker.node.clock

    def all_counted(self) -> list[int]:
        return sorted(index for own in self.counted.values() for index in own)


def partitioned(num: int, **options: Any) -> Callable[[], Any]:
    """A loader of torch's, cut over the workers."""
    dataset = TensorDataset(*numbers(num))
    return lambda: paceline.shard(DataLoader(dataset, **{"batch_size": BATCH_SIZE, **options}), seed=3)


def fed(source: sources.Source, **options: Any) -> Callable[[], Any]:
    return lambda: paceline.feed(source, **{"batch_size": BATCH_SIZE, "seed": 3, **options})
