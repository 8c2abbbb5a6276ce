"""What a loop reads from data servers: the same wherever it is made, ahead of time, and in memory that is reused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.service.feeders import (
    DEADLINE_S,
    MISSING,
    NUM_SAMPLES,
    ODD,
    ODD_SKIPPED,
    RECIPE,
    Feeders,
    Numbers,
    ask,
    feeders,
    hello,
    is_right,
    until,
)
from tests.nodes.cluster import CARRIERS, counts_of

from paceline import sources
from paceline.data.service.client import ReaderOptions
from paceline.data.service.messages import MAX_RECIPE_BYTES, SourceOpened, encode
from paceline.data.sources.declared import BatchRecipe
from paceline.errors import DataError, DeadlineExceeded, PeerError, RecordError, UsageError
from paceline.transport import FaultPlan, MemoryTransport
from paceline.transport.base import EMPTY, Connection, Frame
from paceline.wire.connection import PersistentConnection

FEW = settings(max_examples=12)


@pytest.mark.parametrize("kind", CARRIERS)
def test_batches_are_those_that_were_asked_for(kind: str, tmp_path: Path) -> None:
    with feeders(kind, tmp_path, num=2) as running, running.reader() as reader:
        assert reader.num_samples == NUM_SAMPLES
        for number in range(20):
            asked = ask(number, epoch=number % 3)
            reader.expect([asked, ask(number + 1, epoch=(number + 1) % 3)])
            assert is_right(reader.read(asked), asked)


@pytest.mark.parametrize("kind", CARRIERS)
def test_what_a_loop_keeps_stays_as_it_is_while_others_are_read(kind: str, tmp_path: Path) -> None:
    with feeders(kind, tmp_path) as running, running.reader() as reader:
        kept = [(ask(number), reader.read(ask(number))) for number in range(12)]
        parts = [(ask(number), reader.read(ask(number)).content[2:4]) for number in range(20, 24)]
        for number in range(100):
            reader.expect([ask(number, 1), ask(number + 1, 1)])
            assert is_right(reader.read(ask(number, 1)), ask(number, 1))
        assert all(is_right(batch, asked) for asked, batch in kept)
        assert all(part[:, 0].tolist() == list(asked.indices[2:4]) for asked, part in parts)
    assert all(is_right(batch, asked) for asked, batch in kept), "they outlive reader and data server"


@pytest.mark.parametrize("kind", CARRIERS)
def test_a_loop_may_write_into_its_batches(kind: str, tmp_path: Path) -> None:
    with feeders(kind, tmp_path) as running, running.reader() as reader:
        for number in range(30):
            batch = reader.read(ask(number))
            assert is_right(batch, ask(number))
            batch.content.fill_(-1.0)


def test_the_memory_of_batches_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with feeders("shm", tmp_path) as running, running.reader(prefetch=3) as reader:
        made: list[int] = []
        allocate = running.transport.allocate
        monkeypatch.setattr(running.transport, "allocate", lambda size: made.append(size) or allocate(size))
        for number in range(1000):
            reader.expect([ask(number + ahead) for ahead in range(4)])
            assert is_right(reader.read(ask(number)), ask(number))
        assert len(made) <= 8


def test_a_loop_that_does_not_read_has_no_more_made_than_it_has_credit_for(tmp_path: Path) -> None:
    numbers = Numbers(RECIPE)
    with (
        feeders("memory", tmp_path, open_records=lambda *_: numbers) as running,
        running.reader(prefetch=2) as reader,
        running.reader(rank=1, prefetch=0) as other,
    ):
        reader.expect([ask(number) for number in range(10)])
        until(lambda: len(numbers.asked) == 3)
        for number in range(5):  # which has its turn after whatever else was asked for
            other.read(ask(number, epoch=1))
        assert [asked.epoch for asked in numbers.asked] == [0] * 3 + [1] * 5
        assert is_right(reader.read(ask(0)), ask(0))
        assert is_right(reader.read(ask(1)), ask(1))
        until(lambda: len(numbers.asked) == 9)
        assert numbers.asked[-1] == ask(3)


def test_what_was_expected_in_vain_costs_nothing_but_time(tmp_path: Path) -> None:
    with feeders("memory", tmp_path, num=2) as running, running.reader() as reader:
        for number in range(20):
            reader.expect([ask(number + 100), ask(number + 200), ask(number + 300)])
            assert is_right(reader.read(ask(number)), ask(number))


def test_the_same_batch_can_be_read_again(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, running.reader() as reader:
        reader.expect([ask(1), ask(1), ask(1)])
        assert all(is_right(reader.read(ask(1)), ask(1)) for _ in range(3))


def test_the_work_is_shared_out(tmp_path: Path) -> None:
    shares = [Numbers(RECIPE), Numbers(RECIPE)]
    opening = iter(shares)
    with (
        feeders("memory", tmp_path, num=2, open_records=lambda *_: next(opening)) as running,
        running.reader() as reader,
    ):
        reader.read(ask(0))
        until(lambda: all(source.is_open for source in reader._states))
        for number in range(40):
            reader.expect([ask(number + ahead) for ahead in range(3)])
            reader.read(ask(number))
        assert all(len(numbers.asked) >= 10 for numbers in shares)


# -- data servers that are lost --------------------------------------------------------------------------------------


@given(st.data())
@FEW
def test_batches_are_the_same_whenever_a_data_server_is_killed(tmp_path: Path, data: st.DataObject) -> None:
    at, comes_back = data.draw(st.integers(0, 15)), data.draw(st.integers(0, 10))
    with feeders("memory", tmp_path, num=2) as running, running.reader() as reader:
        for number in range(16):
            reader.expect([ask(number + ahead) for ahead in range(3)])
            if number == at:
                running.end(0)
            if number == at + comes_back:
                running.start(0)
            assert is_right(reader.read(ask(number)), ask(number))


@pytest.mark.parametrize("kind", CARRIERS)
def test_a_data_server_that_was_started_again_is_found_where_it_is_then(kind: str, tmp_path: Path) -> None:
    with feeders(kind, tmp_path) as running, running.reader() as reader:
        kept = reader.read(ask(0))
        for number in range(1, 4):
            reader.expect([ask(number), ask(number + 1)])
            running.end(0)
            running.start(0)
            assert is_right(reader.read(ask(number)), ask(number))
        assert is_right(kept, ask(0))


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_batches_are_the_same_over_a_line_that_breaks_again_and_again(kind: str, tmp_path: Path) -> None:
    plan = FaultPlan(cut=0.1, delay=0.2, delay_s=(0.0, 0.002))
    with feeders(kind, tmp_path, num=2, plan=plan) as running, running.reader() as reader:
        for number in range(60):
            reader.expect([ask(number + ahead) for ahead in range(3)])
            assert is_right(reader.read(ask(number)), ask(number))
        assert counts_of(running.transport).cut >= 5


def test_when_none_is_left_the_loop_is_told_what_it_waited_for_and_what_to_do(tmp_path: Path) -> None:
    with feeders("memory", tmp_path, num=2) as running, running.reader(rank=3) as reader:
        reader.read(ask(0))
        reader._options = ReaderOptions(timeout_s=0.3)
        running.end(0)
        running.end(1)
        with pytest.raises(PeerError, match="no data server can be reached") as caught:
            reader.read(ask(1))
    for words in (
        "worker 3 waited 0.3 s for a batch of 8 samples of epoch 0",
        *running.addresses,
        "--on-crash restart",
    ):
        assert words in str(caught.value)


def test_a_wait_ends_at_its_deadline(tmp_path: Path) -> None:
    gate = threading.Event()
    with (
        feeders("memory", tmp_path, open_records=lambda *_: Numbers(RECIPE, gate)) as running,
        running.reader(rank=3) as reader,
    ):
        assert reader.num_samples == NUM_SAMPLES
        reader._options = ReaderOptions(timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=r"worker 3 waited 0\.2 s for a batch of 8 .* data server 0 at"):
            reader.read(ask(1))
        gate.set()
        until(lambda: bool(reader._pending._of[ask(1)].outcome))
        reader._options = ReaderOptions(timeout_s=DEADLINE_S)
        assert is_right(reader.read(ask(1)), ask(1)), "what comes late is there for a later request"


def test_what_is_not_waited_for_any_more_gives_way(tmp_path: Path) -> None:
    gate = threading.Event()
    numbers = Numbers(RECIPE, gate)
    with (
        feeders("memory", tmp_path, open_records=lambda *_: numbers) as running,
        running.reader(prefetch=0) as reader,
    ):
        assert reader.num_samples == NUM_SAMPLES
        reader._options = ReaderOptions(timeout_s=0.1)
        with pytest.raises(PeerError):
            reader.read(ask(1))
        gate.set()
        until(lambda: bool(reader._pending._of[ask(1)].outcome))
        reader.expect([ask(2)])
        until(lambda: ask(2) in numbers.asked)


def test_a_machine_that_is_short_of_something_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with feeders("memory", tmp_path) as running, running.reader() as reader:
        connect, refused = running.transport.connect, list[str]()

        def refuse(address: str, identity: bytes, *, timeout_s: float) -> Connection:
            if len(refused) < 2:
                refused.append(address)
                raise OSError(24, "Too many open files")
            return connect(address, identity, timeout_s=timeout_s)

        monkeypatch.setattr(running.transport, "connect", refuse)
        assert is_right(reader.read(ask(0)), ask(0))
        assert len(refused) == 2


class Patience(threading.Event):
    """Lasts for six pauses, which it notes and does not make."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def is_set(self) -> bool:
        return len(self.pauses) == 6

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        return False


def ignore(_: object) -> None:
    pass


def out_of_memory(_: object) -> None:
    raise MemoryError("no room for a batch")


@pytest.mark.parametrize(("answers", "on_frame"), [(False, ignore), (True, ignore), (True, out_of_memory)])
def test_a_client_that_is_turned_away_or_fails_comes_again_less_and_less_often(
    answers: bool, on_frame: Callable[[object], None]
) -> None:
    transport, patience = MemoryTransport(), Patience()
    listener = transport.listen("memory://server-0")

    def meet() -> None:
        for _ in range(6):
            met = listener.accept(timeout_s=DEADLINE_S)
            if answers:
                met.send(b"welcome", timeout_s=DEADLINE_S)
                met.receive(timeout_s=DEADLINE_S)
            met.close()

    problems: list[str] = []
    line = PersistentConnection(
        "data", 0, lambda: listener.address, hello(), transport, (b"hello", EMPTY), on_frame, problems.append
    )
    line._closing = patience
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    line._run()
    thread.join(DEADLINE_S)
    listener.close()
    assert len(problems) == 6
    fails = on_frame is out_of_memory
    assert patience.pauses == ([0.02] * 6 if answers and not fails else [0.04, 0.08, 0.16, 0.32, 0.64, 1.0])
    assert ("MemoryError: no room for a batch" in problems) is fails


# -- what cannot be read ---------------------------------------------------------------------------------------------


def test_a_record_that_cannot_be_decoded_fails_its_reader_alone(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, running.reader(ODD) as reader, running.reader(RECIPE, rank=1) as other:
        with pytest.raises(RecordError, match="data server 0 at memory://server-0: sample 7 is odd"):
            reader.read(ask(1, num=6))
        assert reader.read(ask(2, num=2)).num_samples == 2
        assert is_right(other.read(ask(0)), ask(0))


def test_records_that_are_skipped_are_counted_and_the_first_reason_told(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, running.reader(ODD_SKIPPED) as reader:
        batch = reader.read(ask(0))
        assert (batch.num_samples, batch.num_skipped) == (6, 2)
        nothing = reader.read(ask(7, num=1))
        assert (nothing.content, nothing.num_samples, nothing.num_skipped) == (None, 0, 1)
        assert reader.skipped().num_skipped == 3
        assert reader.skipped().reasons == ("sample 0 is odd",)


def test_what_cannot_be_opened_is_said_by_name(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, running.reader(MISSING) as reader:
        for _ in range(2):
            with pytest.raises(DataError, match=r"data server 0 at memory://server-0: missing\.npy is not there"):
                _ = reader.num_samples


def test_a_source_may_name_very_many_files(tmp_path: Path) -> None:
    many = BatchRecipe(sources.lines([f"a/folder/with/a/rather/long/name/{number:06}.txt" for number in range(70_000)]))
    asked: list[BatchRecipe] = []

    def opening(recipe: BatchRecipe, _: object) -> Numbers:
        asked.append(recipe)
        return Numbers(recipe)

    with feeders("tcp", tmp_path, open_records=opening) as running, running.reader(many) as reader:
        assert is_right(reader.read(ask(0)), ask(0))
        assert asked == [many]


def test_a_source_that_no_data_server_would_take_is_refused_at_once(tmp_path: Path) -> None:
    with feeders("memory", tmp_path, num=0) as running:
        huge = BatchRecipe(sources.dataset("a:b", names=["x" * 1024] * (MAX_RECIPE_BYTES >> 10)))
        with pytest.raises(UsageError, match=r"takes \d+ bytes to describe, data servers take at most .* by patterns"):
            running.new_reader(huge)
        with pytest.raises(UsageError, match=r"'odd.udcff.txt', which is not valid UTF-8 .* by a pattern"):
            running.new_reader(BatchRecipe(sources.lines("odd\udcff.txt")))


def test_data_servers_that_see_different_files_are_told_apart(tmp_path: Path) -> None:
    different = iter([Numbers(RECIPE, label="five files"), Numbers(RECIPE, label="six files")])
    with (
        feeders("memory", tmp_path, num=2, open_records=lambda *_: next(different)) as running,
        running.reader() as reader,
    ):
        reader.expect([ask(0)])
        until(lambda: reader._failure is not None)
        with pytest.raises(UsageError, match=r"(five|six) files.*(five|six) files.*the same files") as caught:
            reader.read(ask(0))
    assert "data server 0" in str(caught.value)
    assert "data server 1" in str(caught.value)


def test_an_index_that_is_no_sample_is_refused_and_the_next_is_read(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, running.reader() as reader:
        for number in (NUM_SAMPLES, -1):
            with pytest.raises(UsageError, match="outside of the 10000 samples"):
                reader.read(ask(number))
        assert is_right(reader.read(ask(0)), ask(0))


def test_a_closed_reader_says_so(tmp_path: Path) -> None:
    with feeders("memory", tmp_path) as running, running.reader() as reader:
        reader.read(ask(0))
        reader.close()
        reader.close()
        with pytest.raises(UsageError, match="closed"):
            reader.read(ask(1))


def test_an_answer_that_is_read_while_a_reader_closes_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with feeders("memory", tmp_path) as running, running.reader() as reader:
        reader.read(ask(0))
        monkeypatch.setattr(reader, "_outcome", lambda *_: reader.close())  # as another thread does
        reader._on_frame(0, Frame(encode(SourceOpened(0, NUM_SAMPLES, "0")), EMPTY))
        with pytest.raises(UsageError, match="closed"):
            reader.read(ask(1))


def test_closing_ends_a_wait(tmp_path: Path) -> None:
    gate, errors = threading.Event(), list[str]()
    with (
        feeders("memory", tmp_path, open_records=lambda *_: Numbers(RECIPE, gate)) as running,
        running.reader() as reader,
    ):

        def wait() -> None:
            with pytest.raises(UsageError) as caught:
                reader.read(ask(0))
            errors.append(str(caught.value))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        until(lambda: bool(reader._pending._of))
        reader.close()
        thread.join(10.0)
        gate.set()
    assert len(errors) == 1


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="prefetch is 33, expected 0 to 32"):
        ReaderOptions(prefetch=33)
    running = Feeders("memory", tmp_path, None)  # type: ignore[arg-type]
    with running.reader() as reader, pytest.raises(UsageError, match="--data-servers"):
        reader.expect([ask(0)])


def test_batches_that_are_not_there_any_more_are_not_kept_alive(tmp_path: Path) -> None:
    with feeders("shm", tmp_path) as running, running.reader() as reader:
        batch = reader.read(ask(0))
        (source,) = reader._states
        content: torch.Tensor = batch.content
        del batch
        assert not source.returned
        part = content[3]
        del content
        assert not source.returned
        del part
        assert len(source.returned) == 1
