"""Real data servers as threads of the test, over any carrier, with records that say what they were asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.nodes.cluster import address_of, make_transport
from torch import Tensor

from paceline import sources
from paceline.data.service.client import ReaderOptions, RemoteReader
from paceline.data.service.server import DataServer
from paceline.data.service.source_cache import RecipeOpener
from paceline.data.sources.batch import Batch, BatchRequest, PreparedBatch, SkippedRecords, TensorColumn
from paceline.data.sources.declared import BatchRecipe
from paceline.errors import DataError, RecordError
from paceline.transport import FaultPlan, FaultyTransport, Transport
from paceline.wire.messages import Hello

NUM_SAMPLES = 10_000
DEADLINE_S = 30.0  # by then whatever a test waits for has happened, or the test fails
WIDTH = 600  # elements of a sample: batches are larger than what a carrier takes at once
GENERATION = 1
RECIPE = BatchRecipe(sources.arrays("numbers.npy"))
ODD = BatchRecipe(sources.arrays("odd.npy"))  # of which no sample that is a multiple of 7 can be decoded
ODD_SKIPPED = BatchRecipe(sources.arrays("odd.npy"), on_error="skip")
MISSING = BatchRecipe(sources.arrays("missing.npy"))


@dataclass
class Numbers:
    """An open recipe: sample i of epoch e is full of i + e / 10. Shared by the servers that a test counts over."""

    recipe: BatchRecipe
    gate: threading.Event | None = None  # batches are made once this is set
    asked: list[BatchRequest] = field(default_factory=list)
    is_closed: bool = False
    num_samples: int = NUM_SAMPLES
    num_skipped: int = 0
    label: str = "numbers"

    def fingerprint(self) -> str:
        return self.label

    def prepare(self, ask: BatchRequest, max_bytes: int | None = None) -> PreparedBatch:
        self.asked.append(ask)
        if self.gate is not None:
            assert self.gate.wait(DEADLINE_S)
        bad = [index for index in ask.indices if self.recipe.source == ODD.source and index % 7 == 0]
        if bad and self.recipe.on_error == "raise":
            raise RecordError(f"sample {bad[0]} is odd")
        indices = [index for index in ask.indices if index not in bad]
        self.num_skipped += len(bad)
        if not indices:
            return PreparedBatch(None, 0, len(bad))
        column = TensorColumn(torch.float64, (len(indices), WIDTH), lambda out: out.copy_(values(ask.epoch, indices)))
        return PreparedBatch(column, len(indices), len(bad))

    def skipped(self) -> SkippedRecords:
        return SkippedRecords(self.num_skipped, ("sample 0 is odd",) if self.num_skipped else ())

    def close(self) -> None:
        self.is_closed = True


def open_numbers(recipe: BatchRecipe, allowed_paths: object) -> Numbers:
    if recipe == MISSING:
        raise DataError("missing.npy is not there")
    return Numbers(recipe)


def values(epoch: int, indices: Sequence[int]) -> Tensor:
    column = torch.tensor(indices, dtype=torch.float64) + epoch / 10
    return column[:, None].expand(-1, WIDTH)


def ask(number: int, epoch: int = 0, num: int = 8) -> BatchRequest:
    """The number-th batch of an epoch."""
    return BatchRequest(epoch, tuple(range(number * num, (number + 1) * num)))


def is_right(batch: Batch, asked: BatchRequest) -> bool:
    return torch.equal(batch.content, values(asked.epoch, asked.indices)) and batch.num_samples == len(asked.indices)


def until(happened: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    give_up, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not happened():
        assert time.monotonic() < give_up, "it never happened"
        pause.wait(0.002)


@dataclass
class Feeders:
    """Data servers that run, and what it takes to read from them."""

    kind: str
    directory: Path
    transport: Transport
    nodes: dict[int, DataServer] = field(default_factory=dict)
    addresses: list[str] = field(default_factory=list)
    _threads: dict[int, threading.Thread] = field(default_factory=dict)
    _num_started: int = 0

    def start(self, server: int, open_records: RecipeOpener = open_numbers, **options: Any) -> DataServer:
        """Run a data server, at an address that no earlier one had."""
        listener = self.transport.listen(address_of(self.kind, self.directory, self._num_started))
        self._num_started += 1
        node = DataServer(
            server, listener, self.transport, GENERATION, open_records=open_records, checks_memory=True, **options
        )
        self.addresses[server : server + 1] = [listener.address]
        self.nodes[server] = node
        thread = self._threads[server] = threading.Thread(target=node.run, daemon=True)
        thread.start()
        return node

    def end(self, server: int) -> None:
        """End a data server, as if it had been killed: no reader is told."""
        node, thread = self.nodes.pop(server), self._threads.pop(server)
        node.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a data server hangs"

    def new_reader(self, recipe: BatchRecipe = RECIPE, rank: int = 0, **options: Any) -> RemoteReader:
        patience = ReaderOptions(**{"timeout_s": DEADLINE_S, **options})
        return RemoteReader(recipe, lambda: tuple(self.addresses), self.transport, hello(rank), patience)

    @contextmanager
    def reader(self, recipe: BatchRecipe = RECIPE, rank: int = 0, **options: Any) -> Iterator[RemoteReader]:
        with closing(self.new_reader(recipe, rank, **options)) as opened:
            yield opened


def hello(rank: int = 0) -> Hello:
    return Hello("worker", rank, 0, GENERATION)


@contextmanager
def feeders(
    kind: str,
    directory: Path,
    num: int = 1,
    open_records: RecipeOpener = open_numbers,
    plan: FaultPlan | None = None,
    **options: Any,
) -> Iterator[Feeders]:
    """Run data servers; everything has ended afterwards."""
    transport = make_transport(kind, directory)
    running = Feeders(kind, directory, transport if plan is None else FaultyTransport(transport, plan, seed=0))
    try:
        for server in range(num):
            running.start(server, open_records, **options)
        yield running
    finally:
        for server in list(running.nodes):
            running.end(server)
