"""What a data server owes to many workers at once, and what a faulty or hostile one of them cannot do to it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.data.service.feeders import (
    DEADLINE_S,
    GENERATION,
    ODD,
    RECIPE,
    Numbers,
    ask,
    feeders,
    hello,
    is_right,
    open_numbers,
    until,
)
from tests.data.service.speaking import Caller, body_of, caller, recipe_body

from paceline import sources
from paceline.data.service.messages import (
    MAX_RECIPE_BYTES,
    MAX_SAMPLES,
    MAX_UNANSWERED,
    BatchAnswer,
    BatchFailed,
    Message,
    OpenSource,
    ReadBatches,
    SourceOpened,
    encode,
)
from paceline.data.service.server import _place
from paceline.data.service.source_cache import MAX_OPEN, MAX_OPEN_BY_WORKER, CachedSource, SourceCache
from paceline.data.sources.batch import PreparedBatch
from paceline.data.sources.declared import BatchRecipe, encode_recipe
from paceline.errors import PeerError, UsageError
from paceline.server.connections import Incoming
from paceline.transport.base import EMPTY, Frame
from paceline.transport.deadline import Deadline
from paceline.wire.messages import Hello
from paceline.wire.messages import encode as encode_hello

OPEN = OpenSource(0)


def recipe_of(number: int) -> BatchRecipe:
    return BatchRecipe(sources.arrays("numbers.npy"), seed=number)


# -- many at once ----------------------------------------------------------------------------------------------------


def test_a_reader_that_asks_for_much_does_not_keep_others_waiting(tmp_path: Path) -> None:
    gate = threading.Event()
    numbers = Numbers(RECIPE, gate)
    with feeders("memory", tmp_path, open_records=lambda *_: numbers) as running:
        node = running.nodes[0]
        with caller(running, hello(0)) as greedy, caller(running, hello(1)) as modest:
            assert greedy.opens() == modest.opens()
            for number in range(1, 21):
                greedy.reads(ask(number), number)
            until(lambda: sum(map(len, node._queue._waiting.values())) == 19)
            modest.reads(ask(100))
            until(lambda: sum(map(len, node._queue._waiting.values())) == 20)
            gate.set()
            modest.hear(BatchAnswer)
            assert numbers.asked.index(ask(100)) <= 2
            for _ in range(20):
                greedy.hear(BatchAnswer)


def test_what_a_loop_waits_for_goes_before_what_it_has_made_ahead(tmp_path: Path) -> None:
    gate = threading.Event()
    with feeders("memory", tmp_path, open_records=lambda *_: Numbers(RECIPE, gate)) as running:
        node = running.nodes[0]
        with caller(running) as worker:
            worker.opens()
            for number in range(1, 6):
                worker.reads(ask(number), number)
            until(lambda: sum(map(len, node._queue._waiting.values())) == 4)
            worker.reads(ask(9), 9, urgent=True)
            until(lambda: sum(map(len, node._queue._waiting.values())) == 5)
            gate.set()
            assert [worker.hear(BatchAnswer).number for _ in range(6)] == [1, 9, 2, 3, 4, 5]


def test_a_reader_that_takes_in_nothing_does_not_keep_others_waiting(tmp_path: Path) -> None:
    with feeders("tcp", tmp_path) as running, running.reader(rank=1) as reader, caller(running) as stalled:
        stalled.opens()
        large = ask(0, num=1000)  # 5 MB, more than the line holds
        for number in range(1, MAX_UNANSWERED + 1):
            stalled.reads(large, number)
        for number in range(20):
            assert is_right(reader.read(ask(number)), ask(number))
        assert running.nodes[0]._builder.num_batches <= 20 + 8


def test_a_source_that_takes_long_to_open_holds_up_no_other(tmp_path: Path) -> None:
    gate, opened = threading.Event(), threading.Event()

    def open_slowly(recipe: BatchRecipe, _: object) -> Numbers:
        if recipe == ODD:
            opened.set()
            assert gate.wait(DEADLINE_S)
        return Numbers(recipe)

    with (
        feeders("memory", tmp_path, open_records=open_slowly) as running,
        running.reader(rank=1) as reader,
        caller(running) as slow,
    ):
        slow.say(OPEN, recipe_body(ODD))
        assert opened.wait(DEADLINE_S)
        assert is_right(reader.read(ask(0)), ask(0))
        gate.set()
        slow.hear(SourceOpened)


def test_what_all_workers_read_is_open_once_and_closed_in_the_end(tmp_path: Path) -> None:
    opened: list[Numbers] = []

    def opening(recipe: BatchRecipe, _: object) -> Numbers:
        opened.append(Numbers(recipe))
        return opened[-1]

    with feeders("memory", tmp_path, open_records=opening) as running:
        for rank in range(5):
            with running.reader(rank=rank) as reader:
                reader.read(ask(rank))
        assert len(opened) == 1
        assert not opened[0].is_closed
    assert opened[0].is_closed


def test_a_connection_that_ends_is_forgotten(tmp_path: Path) -> None:
    gate = threading.Event()
    with feeders("memory", tmp_path, open_records=lambda *_: Numbers(RECIPE, gate)) as running:
        node = running.nodes[0]
        with caller(running) as worker:
            worker.opens()
            for number in range(1, 6):
                worker.reads(ask(number), number)
            until(lambda: bool(node._queue._waiting))
        [source] = node._source_cache._sources.values()
        until(lambda: not (node._readers or node._queue._waiting or source.readers))
        gate.set()


# -- what may not be said --------------------------------------------------------------------------------------------

READ = ReadBatches(1, 0, 0, 2, urgent=False, returned=())
TWO = body_of([3, 4])
HOSTILE: list[tuple[Message | bytes, memoryview]] = [
    (b"", EMPTY),
    (b"\xff nonsense", EMPTY),
    (encode(READ)[:-1], TWO),
    (SourceOpened(0, 10, "f00d"), EMPTY),
    (BatchFailed(0, "usage", "no"), EMPTY),
    (OPEN, recipe_body(RECIPE)),
    (OpenSource(1), memoryview(b"no recipe")),
    (OpenSource(1), recipe_body(RECIPE)[:-1]),
    (OpenSource(1), EMPTY),
    (OpenSource(1), memoryview(bytes(MAX_RECIPE_BYTES + 1))),
    (ReadBatches(1, 5, 0, 2, urgent=False, returned=()), TWO),
    (ReadBatches(1, 0, 0, 3, urgent=False, returned=()), TWO),
    (ReadBatches(1, 0, 0, -2, urgent=False, returned=()), TWO),
    (ReadBatches(1, 0, 0, MAX_SAMPLES + 1, urgent=False, returned=()), body_of(range(MAX_SAMPLES + 1))),
    (ReadBatches(1, 0, 0, 2, urgent=False, returned=(0,)), TWO),
    (READ, memoryview(bytes(100_000))),
]


@pytest.mark.parametrize(("message", "body"), HOSTILE)
def test_a_reader_that_breaks_the_rules_is_cut_off_and_the_others_go_on(
    message: Message | bytes, body: memoryview, tmp_path: Path
) -> None:
    with feeders("memory", tmp_path) as running, running.reader() as reader, caller(running) as rogue:
        reader.read(ask(0))
        rogue.opens()
        rogue.say(message, body)
        assert rogue.is_cut_off()
        assert is_right(reader.read(ask(1)), ask(1))


@pytest.mark.parametrize(
    "identity",
    [
        b"absent",
        Hello("server", 0, 0, GENERATION),
        Hello("data", 0, 0, GENERATION),
        Hello("worker", 0, 0, 9),
        hello(8),
        hello(-1),
    ],
)
def test_a_peer_that_is_not_a_worker_of_this_job_is_cut_off(identity: Hello | bytes, tmp_path: Path) -> None:
    with feeders("memory", tmp_path, num_workers=8) as running, caller(running, identity) as stranger:
        stranger.say(OPEN, recipe_body(RECIPE))
        assert stranger.is_cut_off()


def test_a_reader_that_asks_too_much_at_once_is_cut_off(tmp_path: Path) -> None:
    gate = threading.Event()
    with feeders("memory", tmp_path, open_records=lambda *_: Numbers(RECIPE, gate)) as running:
        with caller(running) as rogue:
            rogue.opens()
            for number in range(1, MAX_UNANSWERED + 2):
                rogue.reads(ask(0), number)
            assert rogue.is_cut_off()
        with caller(running) as rogue:
            rogue.opens()
            for number in range(1, MAX_OPEN_BY_WORKER + 1):
                rogue.say(OpenSource(number), recipe_body(RECIPE))
            assert rogue.is_cut_off()
        gate.set()


def test_a_worker_that_calls_again_and_again_is_cut_off(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, running.reader(rank=1) as reader:
        connect = running.transport.connect
        calls = [connect(running.addresses[0], encode_hello(hello(7)), timeout_s=1) for _ in range(65)]
        for connection in calls:
            Caller(connection).say(OPEN, recipe_body(RECIPE))
        assert Caller(calls[-1]).is_cut_off()
        assert is_right(reader.read(ask(1)), ask(1))
        for connection in calls:
            connection.close()


def test_what_was_said_before_an_end_means_nothing_after_it(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, caller(running) as rogue:
        node = running.nodes[0]
        rogue.opens()
        (connection,) = node._acceptor.connections()
        rogue.say(b"")
        assert rogue.is_cut_off()
        node._handle(Incoming(connection, Frame(encode(OPEN), EMPTY)))
        assert not node._readers


def test_large_bodies_are_refused_before_they_come() -> None:
    _place(encode(ReadBatches(1, 0, 0, MAX_SAMPLES, urgent=False, returned=())), MAX_SAMPLES * 8)
    _place(encode(OPEN), MAX_RECIPE_BYTES)
    for message, size_bytes in (
        (OPEN, MAX_RECIPE_BYTES + 1),
        (SourceOpened(0, 1, ""), 1 << 17),
        (READ, 1 << 20),
        (ReadBatches(1, 0, 0, 1 << 40, urgent=False, returned=()), 8 << 40),
    ):
        with pytest.raises(PeerError, match="came with"):
            _place(encode(message), size_bytes)


def test_a_batch_that_is_too_large_is_refused_to_its_reader(tmp_path: Path) -> None:
    with feeders("memory", tmp_path, max_batch_bytes=100_000) as running, running.reader() as reader:
        with pytest.raises(UsageError, match="at most 100000 are served: choose a smaller batch size"):
            reader.read(ask(0, num=1000))
        assert is_right(reader.read(ask(0)), ask(0))


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("bad\udcff.txt"), MemoryError(), OSError("no")])
def test_whatever_happens_to_a_batch_the_next_one_is_made(error: BaseException, tmp_path: Path) -> None:
    numbers = Numbers(RECIPE)

    def fail(*_: object) -> PreparedBatch:
        raise error

    with feeders("memory", tmp_path, open_records=lambda *_: numbers) as running, running.reader() as reader:
        prepare, numbers.prepare = numbers.prepare, fail  # type: ignore[method-assign]
        with pytest.raises(PeerError, match=f"data server 0 at memory://server-0: {type(error).__name__}"):
            reader.read(ask(0))
        numbers.prepare = prepare  # type: ignore[method-assign]
        assert is_right(reader.read(ask(0)), ask(0))


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("bad\udcff.txt")])
def test_whatever_happens_as_a_source_is_opened_is_told(error: BaseException, tmp_path: Path) -> None:
    def fail(_: object, __: object) -> Numbers:
        raise error

    with (
        feeders("memory", tmp_path, open_records=fail) as running,
        running.reader() as reader,
        pytest.raises(PeerError, match=f"data server 0 at memory://server-0: {type(error).__name__}"),
    ):
        reader.read(ask(0))


# -- sources ---------------------------------------------------------------------------------------------------------


def library(told: list[CachedSource]) -> SourceCache:
    return SourceCache(open_numbers, None, told.append)


def settle_all(cache: SourceCache, told: list[CachedSource]) -> None:
    for thread in cache._threads:
        thread.join(DEADLINE_S)
    while told:
        cache.settle(told.pop())


def full_library(told: list[CachedSource]) -> tuple[SourceCache, list[CachedSource]]:
    """A cache that has as many sources open as it takes, and these."""
    cache = library(told)
    opened = [cache.open(encode_recipe(recipe_of(n)), n // 8, lambda _: None) for n in range(MAX_OPEN)]
    settle_all(cache, told)
    return cache, opened


def test_what_is_not_read_is_closed_where_there_is_no_room() -> None:
    told: list[CachedSource] = []
    cache, opened = full_library(told)
    first = opened[5].records
    assert isinstance(first, Numbers)
    with pytest.raises(UsageError, match="the workers read 64 sources"):
        cache.open(encode_recipe(recipe_of(MAX_OPEN)), 99, lambda _: None)
    cache.leave(opened[5], 0)
    cache.open(encode_recipe(recipe_of(MAX_OPEN)), 99, lambda _: None)
    settle_all(cache, told)
    assert first.is_closed
    assert len(cache._sources) == MAX_OPEN
    cache.close(Deadline.after(DEADLINE_S))


def test_what_is_not_closed_where_no_thread_can_be_started_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[CachedSource] = []
    cache, opened = full_library(told)
    first = opened[5].records
    assert isinstance(first, Numbers)
    cache.leave(opened[5], 0)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(PeerError, match="the system refuses a thread"):
            cache.open(encode_recipe(recipe_of(MAX_OPEN)), 99, lambda _: None)
    cache.close(Deadline.after(DEADLINE_S))
    assert first.is_closed


def test_one_worker_cannot_take_all_the_room() -> None:
    told: list[CachedSource] = []
    cache = library(told)
    for number in range(MAX_OPEN_BY_WORKER):
        source = cache.open(encode_recipe(recipe_of(number)), 7, lambda _: None)
        cache.leave(source, 7)  # over a connection that has ended, which does not end the opening
    with pytest.raises(UsageError, match="worker 7 reads more than 16 sources"):
        cache.open(encode_recipe(recipe_of(99)), 7, lambda _: None)
    cache.open(encode_recipe(recipe_of(99)), 8, lambda _: None)
    settle_all(cache, told)
    cache.open(encode_recipe(recipe_of(100)), 7, lambda _: None)
    settle_all(cache, told)
    cache.close(Deadline.after(DEADLINE_S))


def test_a_reader_of_too_many_sources_is_told_so(tmp_path: Path) -> None:
    with (
        feeders("memory", tmp_path) as running,
        caller(running) as reading,
        running.reader(recipe_of(99), rank=7) as one_more,
    ):
        for number in range(MAX_OPEN_BY_WORKER):
            reading.opens(recipe_of(number), number)
        with pytest.raises(UsageError, match="worker 7 reads more than 16 sources at once: close the loaders"):
            _ = one_more.num_samples


def test_nothing_of_the_users_that_takes_long_holds_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.service.server._CLOSING_TIMEOUT_S", 0.1)
    gate, opening, before = threading.Event(), list[BatchRecipe](), set(threading.enumerate())

    def open_slowly(recipe: BatchRecipe, _: object) -> Numbers:
        if recipe != RECIPE:
            opening.append(recipe)
            assert gate.wait(DEADLINE_S)
        return Numbers(recipe, gate)

    with feeders("memory", tmp_path, open_records=open_slowly) as running, caller(running) as worker:
        worker.opens()
        worker.reads(ask(0))
        for number in range(1, 4):
            worker.say(OpenSource(number), recipe_body(recipe_of(number)))
        until(lambda: len(opening) == 3)
        running.end(0)
        assert not gate.is_set()
        gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE_S)
