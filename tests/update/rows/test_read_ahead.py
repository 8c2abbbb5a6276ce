"""Reading ahead in a table beyond its memory: bits stay, memory is bounded, and what comes next is there before it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.update.rows.stores import rows_of, store_of
from tests.update.rows.test_spill import mapped_bytes

from paceline.errors import DeadlineExceeded
from paceline.update.named_rules import SGD
from paceline.update.rows import read_ahead
from paceline.update.rows.column import Stretch
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.spec import Lifecycle
from paceline.update.rows.store import RowStore

WIDTH = 256  # 64 rows lie in a window
LAYER_ROWS = 512
NUM_LAYERS = 24
BUDGET = 5 * 2**20  # of 12 MiB


class Inline(ThreadPoolExecutor):
    """Reads at once, so that what is counted depends on the order alone."""

    def submit(self, work: Callable[..., None], /, *arguments: object, **named: object) -> Future[None]:  # type: ignore[override]
        done: Future[None] = Future()
        try:
            done.set_result(work(*arguments, **named))
        except OSError as error:
            done.set_exception(error)
        return done


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", Inline)


def layer(number: int) -> torch.Tensor:
    return torch.arange(number * LAYER_ROWS, (number + 1) * LAYER_ROWS)


def gradient(number: int, seed: int) -> RowContribution:
    random = torch.Generator().manual_seed(1000 * seed + number)
    return RowContribution(layer(number), torch.randn(LAYER_ROWS, WIDTH, generator=random))


class Pair:
    """A table beyond its memory beside one that fits, which get the same."""

    def __init__(self, folder: Path, num_layers: int = NUM_LAYERS) -> None:
        self.others = mapped_bytes()
        self.spilled = store_of(rows_of(SGD(lr=0.5), Lifecycle(memory_bytes=BUDGET, spill=str(folder)), WIDTH), "")
        self.plain = store_of(rows_of(SGD(lr=0.5), width=WIDTH), "")
        for number in range(num_layers):
            self.push(number, 0)

    def push(self, number: int, seed: int) -> None:
        for store in (self.spilled, self.plain):
            store.apply([gradient(number, seed)], seed)
        self.check()

    def read(self, number: int) -> None:
        """Read a layer, and find the bits of the table that fits."""
        assert torch.equal(self.spilled.read(layer(number), 0), self.plain.read(layer(number), 0))

    def use(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.read(number)
        self.check()

    def check(self) -> None:
        found = self.spilled.statistics()
        assert mapped_bytes() - self.others <= found.column_bytes <= BUDGET - found.index_bytes

    def train(self, numbers: Sequence[int], seed: int) -> tuple[int, int]:
        """Read and update each of these layers; return the bytes that were read ahead, and those waited for."""
        before = self.spilled.spill_reads
        for number in numbers:
            self.read(number)
            self.push(number, seed)
        after = self.spilled.spill_reads
        return after.ahead_bytes - before.ahead_bytes, after.waited_bytes - before.waited_bytes

    def close(self) -> None:
        self.spilled.close()
        self.plain.close()


@contextmanager
def pair_of(folder: Path, num_layers: int = NUM_LAYERS) -> Iterator[Pair]:
    pair = Pair(folder, num_layers)
    try:
        yield pair
    finally:
        pair.close()


@pytest.mark.usefixtures("inline")
def test_all_is_read_ahead_once_the_order_has_repeated(tmp_path: Path) -> None:
    with pair_of(tmp_path) as pair:
        assert pair.train(range(NUM_LAYERS), 1)[1] > 0
        ahead, waited = [sum(each) for each in zip(*(pair.train(range(NUM_LAYERS), 2) for _ in range(3)), strict=True)]
        assert waited <= 2 * LAYER_ROWS * WIDTH * 4  # the first two layers, before the order was known
        assert ahead > 2 * NUM_LAYERS * LAYER_ROWS * WIDTH * 4


@pytest.mark.usefixtures("inline")
def test_an_order_that_changes_is_read_ahead_again(tmp_path: Path) -> None:
    forward, back = range(NUM_LAYERS), [*range(NUM_LAYERS - 1, -1, -1)]
    with pair_of(tmp_path) as pair:
        for seed in range(1, 4):
            pair.train(forward, seed)
        assert pair.train(back, 4)[1] > 0
        pair.train(back, 5)
        assert pair.train(back, 6)[1] == 0


def test_a_thread_reads_ahead_and_ends_with_its_table(tmp_path: Path) -> None:
    with pair_of(tmp_path) as pair:
        for seed in range(1, 4):
            pair.train(range(NUM_LAYERS), seed)
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("paceline-read-ahead") for name in names) == 1
        reads = pair.spilled.spill_reads  # how much of it was late depends on the machine
        assert reads.ahead_bytes + reads.late_bytes > 2 * (NUM_LAYERS - 2) * LAYER_ROWS * WIDTH * 4
    assert not any(thread.name.startswith("paceline-read-ahead") for thread in threading.enumerate())
    assert mapped_bytes() <= pair.others


Step = tuple[str, list[int]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["train", "read", "scattered", "grow", "export"]),
        st.lists(st.integers(0, 19), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=8)
@given(steps=STEPS, rounds=st.integers(2, 3), other=STEPS)
def test_bits_and_memory_do_not_depend_on_the_order(steps: list[Step], rounds: int, other: list[Step]) -> None:
    """Whatever repeats, changes, or comes in between."""
    with TemporaryDirectory() as folder, pair_of(Path(folder), 16) as pair:
        for seed, (kind, numbers) in enumerate([*steps * rounds, *other, *steps], start=1):
            if kind == "train":
                pair.train([number % 16 for number in numbers], seed)
            elif kind == "read":
                pair.use(numbers)  # some have no rows
            elif kind == "grow":
                pair.push(16 + numbers[0] % 8, seed)
            elif kind == "export":
                pieces = [store.rows(64 * numbers[0], 700) for store in (pair.spilled, pair.plain)]
                assert torch.equal(pieces[0].ids, pieces[1].ids)
                assert torch.equal(pieces[0].values, pieces[1].values)
            else:
                ids = torch.randint(24 * LAYER_ROWS, (300,), generator=torch.Generator().manual_seed(numbers[0]))
                assert torch.equal(pair.spilled.read(ids, 0), pair.plain.read(ids, 0))
            pair.check()


@pytest.mark.usefixtures("inline")
def test_a_file_that_cannot_be_read_ahead_is_read_as_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = list[int]()

    def refuse(stretch: Stretch) -> None:
        refusals.append(stretch.start_byte)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Stretch, "read", refuse)
    with pair_of(tmp_path) as pair:
        for seed in range(1, 4):
            pair.train(range(NUM_LAYERS), seed)
        assert refusals
        num_refusals = len(refusals)
        pair.train(range(NUM_LAYERS), 4)
        assert len(refusals) == num_refusals  # it is not tried again


def test_a_disk_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, may_go_on, read = Event(), Event(), Stretch.read

    def hang(stretch: Stretch) -> None:
        is_reading.set()
        assert may_go_on.wait(300)
        read(stretch)

    monkeypatch.setattr(Stretch, "read", hang)
    monkeypatch.setattr(read_ahead, "_DEADLINE_S", 0.01)
    store: RowStore
    with pair_of(tmp_path) as pair:
        store = pair.spilled
        for number in range(NUM_LAYERS):
            store.read(layer(number), 0)
        store.read(layer(0), 0)
        assert is_reading.wait(300)
        with pytest.raises(DeadlineExceeded, match=r"'rows': rows that are read ahead did not come from the disk"):
            store.read(layer(9), 0)
        may_go_on.set()
        monkeypatch.setattr(read_ahead, "_DEADLINE_S", 300.0)
        pair.use([9, 3])
