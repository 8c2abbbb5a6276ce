"""Fixed shares of a source that is fed: each sample once for any number of workers, in turn and read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import EpochOrder
from paceline.data.partition import Sharding
from paceline.data.slicing import Slicing
from paceline.data.source_loader import FedLoader, FeedPlan
from paceline.data.sources.batch import Batch, BatchRequest, SkippedRecords
from paceline.observe.trace import Trace

SEED = 3
Event = tuple[str, Any]
Stage = Callable[[Iterator[Any]], Iterator[Any]]


class Spotty:
    """Reads numbers, some of which cannot be decoded."""

    def __init__(self, num_samples: int, bad: frozenset[int]) -> None:
        self.num_samples = num_samples
        self._bad = bad

    def expect(self, asks: Sequence[BatchRequest]) -> None:
        pass

    def read(self, ask: BatchRequest) -> Batch:
        good = [index for index in ask.indices if index not in self._bad]
        return Batch(good or None, len(good), len(ask.indices) - len(good))

    def skipped(self) -> SkippedRecords:
        return SkippedRecords(0, ("it is bad",))

    def close(self) -> None:
        pass


class Worker:
    """A loader of one worker, and what happens to it."""

    def __init__(self, rank: int, size: int, reader: Spotty, plan: FeedPlan) -> None:
        self.events: list[Event] = []
        self.lines: list[str] = []
        sharding = Sharding(
            rank,
            size,
            SEED,
            on_samples=lambda num: self.events.append(("samples", num)),
            on_missing=lambda: self.events.append(("missing", 1)),
            tell=self.lines.append,
        )
        slicing = Slicing(size, calls=None, optimizers=[], clock=int)  # pyright: ignore[reportArgumentType] - nothing is dealt
        self.loader = FedLoader(reader, plan, sharding, slicing, Trace(None))

    def read(self, stage: Stage) -> list[Event]:
        for content in self.loader.through(stage):
            self.events.append(("batch", content))
        return self.events


def ahead(num: int) -> Stage:
    """Read so many batches before the first is handed out."""

    def stage(batches: Iterator[Any]) -> Iterator[Any]:
        held = list(islice(batches, num))
        for following in batches:
            held.append(following)
            yield held.pop(0)
        yield from held

    return stage


@given(
    num=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    num_ahead=st.integers(0, 4),
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
)
def test_each_sample_comes_once_and_clocks_go_on_in_turn_however_much_is_read_ahead(
    num: int, batch_size: int, size: int, shuffle: bool, drop_last: bool, num_ahead: int, seed: int, share: float
) -> None:
    order = EpochOrder(num, batch_size, drop_last, shuffle)
    if not order.num_batches:
        return
    draws = torch.rand(num, generator=torch.Generator().manual_seed(seed))
    bad = frozenset(index for index in range(num) if draws[index] < share)
    plan = FeedPlan(batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, leases=False, prefetch=num_ahead)
    workers = [Worker(rank, size, Spotty(num, bad), plan) for rank in range(size)]
    batches, num_clocks = order.batches(SEED, 0), -(-order.num_batches // size)
    for rank, worker in enumerate(workers):
        own = [[index for index in batch if index not in bad] for batch in batches[rank::size]]
        expected: list[Event] = []
        for good in own + [[]] * (num_clocks - len(own)):
            expected += [("samples", len(good)), ("batch", good)] if good else [("missing", 1)]
        assert worker.read(ahead(num_ahead)) == expected
        num_left_out = sum(index in bad for batch in batches[rank::size] for index in batch)
        told = [line for line in worker.lines if "left out" in line]
        assert len(told) == (num_left_out > 0)
        assert not told or f"left out {num_left_out} of " in told[0]
    assert len({sum(kind != "batch" for kind, _ in worker.events) for worker in workers}) == 1, (
        "all have as many clocks"
    )
