"""Loops that are fed: the same bits wherever batches are made, each sample once, whichever worker gets it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.feeding_jobs import BATCH_SIZE, Training, fed, fed_job, partitioned, write_numbers
from tests.data.test_reassignment import WAIT_S, Death, Lagging, run_until_death
from tests.jobs import run_job
from tests.training.recipes import mlp

import paceline
from paceline import sources
from paceline.api.script import bind
from paceline.api.session import Session
from paceline.data.slicing import SliceQueue
from paceline.data.sources.batch import Batch, BatchRequest
from paceline.data.sources.declared import BatchRecipe
from paceline.data.sources.reader import SessionReaders
from paceline.data.sources.records import LocalReader
from paceline.errors import RecordError
from paceline.observe.trace import Epoch, Trace

NUM_WORKERS = 3
OWN = "tests.data.sources.own"
Results = list[tuple[list[float], torch.Tensor, int]]


def together() -> Any:
    """Let all workers have a batch before one goes on, so that none is through early and takes another's."""
    gate = threading.Barrier(NUM_WORKERS)
    return lambda worker, number: gate.wait(WAIT_S)


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """What the same loop does over a loader of torch's own, by the number of samples."""
    return {
        num: run_job(
            tmp_path_factory.mktemp("plain"),
            Training(partitioned(num, shuffle=True), num_epochs=2),
            workers=NUM_WORKERS,
            servers=2,
        )
        for num in (36, 47)
    }


@pytest.mark.parametrize(
    ("data_servers", "carrier", "leases", "num"),
    [
        (0, "memory", False, 47),
        (0, "memory", True, 36),
        (1, "memory", True, 36),
        (2, "memory", False, 47),
        (2, "shm", True, 36),
        (2, "tcp", False, 47),
    ],
)
def test_fed_and_partitioned_runs_have_the_same_bits(
    data_servers: int, carrier: str, leases: bool, num: int, plain: dict[int, Results], tmp_path: Path
) -> None:
    source = write_numbers(tmp_path, num)
    before = together() if leases else lambda worker, number: None
    training = Training(fed(source, shuffle=True, leases=leases), num_epochs=2, before=before)

    with fed_job(tmp_path, data_servers=data_servers, carrier=carrier, workers=NUM_WORKERS, servers=2) as started:
        found = started.run(training)

    for (losses, values, clock), (expected_losses, expected, expected_clock) in zip(found, plain[num], strict=True):
        assert losses == expected_losses
        assert torch.equal(values, expected)
        assert clock == expected_clock
    assert training.all_counted() == sorted([*range(num)] * 2)


@pytest.mark.parametrize(("data_servers", "slices"), [(0, 3), (2, 3), (2, 1)])
def test_a_slow_worker_is_helped_and_values_are_the_same_to_rounding(
    data_servers: int, slices: int, plain: dict[int, Results], tmp_path: Path
) -> None:
    source = write_numbers(tmp_path, 47)
    training = Training(fed(source, shuffle=True, slices=slices), num_epochs=2, before=Lagging(47, slices))

    with fed_job(tmp_path, data_servers=data_servers, workers=NUM_WORKERS, servers=2) as started:
        found = started.run(training)

    for (_, values, clock), (_, expected, expected_clock) in zip(found, plain[47], strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)
        assert clock == expected_clock
    assert training.all_counted() == sorted([*range(47)] * 2)


def test_what_a_transform_draws_is_the_samples_own(tmp_path: Path) -> None:
    source = sources.dataset(f"{OWN}:pairs")
    options = {"batch_size": 2, "transform": f"{OWN}:noisy", "shuffle": True, "leases": False}

    def work(_: Session) -> list[list[torch.Tensor]]:
        loader = paceline.feed(source, **options)  # pyright: ignore[reportArgumentType]
        return [*loader, *loader]

    here = run_job(tmp_path, work)[0]
    with fed_job(tmp_path, data_servers=2) as started:
        there = started.run(work)[0]
    assert [[part.tolist() for part in batch] for batch in here] == [
        [part.tolist() for part in batch] for batch in there
    ]
    labels = torch.cat([batch[1] for batch in here])
    images = torch.cat([batch[0] for batch in here])[labels.argsort()]
    assert labels.bincount().tolist() == [2] * 6
    assert not torch.equal(images[0], images[1]), "another epoch, another draw"


# -- death -----------------------------------------------------------------------------------------------------------


def test_what_a_dead_worker_had_is_dealt_again_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told, is_dead, taken = list[Epoch](), threading.Event(), threading.Barrier(NUM_WORKERS)

    def before(worker: Session, number: int) -> None:
        if worker.node.clock == 1 and number == 0:
            taken.wait(WAIT_S)
            if worker.rank == 2:
                raise Death
            assert is_dead.wait(WAIT_S)

    source = write_numbers(tmp_path, 54)
    training = Training(fed(source), before=before)
    monkeypatch.setattr(Trace, "record", lambda _, record: told.append(record) if isinstance(record, Epoch) else None)
    with fed_job(tmp_path, data_servers=1, workers=NUM_WORKERS, servers=2) as started:
        run_until_death(started, training, is_dead.set)  # pyright: ignore[reportArgumentType]
    assert training.all_counted() == list(range(54))
    assert sum(epoch.again for epoch in told) == BATCH_SIZE
    assert sum(epoch.samples for epoch in told) == 54 + BATCH_SIZE, "the one that has died tells what it had, too"
    [line] = [line for line in capfd.readouterr().err.splitlines() if "again" in line]
    assert line.endswith("was dealt 6 samples of epoch 0 again, which a worker had that has died")


@pytest.mark.parametrize("between", [(0, 1), (1,)], ids=["all", "one"])
def test_a_worker_that_comes_back_while_others_are_between_two_clocks_is_in_step_with_them(
    between: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all would wait for each other at the end: it for a clock that they never begin."""
    is_dead, is_back, through = threading.Event(), threading.Event(), threading.Semaphore(0)
    has_something = threading.Event()  # the one that came back
    have_batches = threading.Barrier(NUM_WORKERS)  # else one takes what another is late to ask for
    source, answer = write_numbers(tmp_path, 72), SliceQueue.wait_answer
    counted, clocks = list[int](), list[int]()

    def answered(dealt: SliceQueue, asked: Any, place: Any) -> Any:
        dealing = answer(dealt, asked, place)
        if dealing.answer.word == "elsewhere":
            is_back.set()
        return dealing

    def work(worker: Session) -> None:
        optimizer = paceline.distributed(torch.optim.SGD(mlp().double().parameters(), lr=0.1))
        for batch in paceline.feed(source, batch_size=6):
            if worker.node.clock == 1 and not is_dead.is_set():
                have_batches.wait(WAIT_S)
                if worker.rank == 2:
                    raise Death
                assert is_dead.wait(WAIT_S)
            if is_back.is_set() and worker.rank == 2:
                has_something.set()
            if worker.node.clock == 3:  # the last one: others would have time for all of it
                assert has_something.wait(WAIT_S)
            optimizer.step()
            counted.extend(batch["indices"].tolist())
            if worker.node.clock == 2 and worker.rank in between:
                through.release()
                assert is_back.wait(WAIT_S)
        worker.barrier()
        clocks.append(worker.node.clock)

    def come_back() -> None:
        is_dead.set()
        for _ in between:
            assert through.acquire(timeout=WAIT_S)
        with started.join(2, incarnation=1) as worker:
            bind(worker)
            work(worker)

    monkeypatch.setattr(SliceQueue, "wait_answer", answered)
    with fed_job(tmp_path, workers=NUM_WORKERS, wait_timeout_s=30.0) as started:
        run_until_death(started, work, come_back)  # pyright: ignore[reportArgumentType]
    assert clocks == [4] * NUM_WORKERS
    assert sorted(counted) == list(range(72))


# -- records that cannot be decoded ----------------------------------------------------------------------------------


def write_lines(folder: Path, num: int, bad: set[int]) -> sources.Source:
    path = folder / "numbers.txt"
    path.write_text("".join(f"{'none' if number in bad else number}\n" for number in range(num)))
    return sources.lines(path)


@pytest.mark.parametrize(("leases", "slices"), [(False, 1), (True, 1), (True, 3)])
def test_records_that_cannot_be_decoded_are_left_out_counted_and_told(
    leases: bool, slices: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A whole batch, a whole slice at the end of a clock, one at its beginning, and a single record of another."""
    bad = {*range(6, 12), 16, 17, 18, 19, 33}
    source = write_lines(tmp_path, 36, bad)

    def work(worker: Session) -> tuple[list[int], torch.Tensor, int, int]:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0))
        loader = paceline.feed(
            source, batch_size=6, transform=f"{OWN}:number", on_error="skip", leases=leases, slices=slices
        )
        seen = list[int]()
        for batch in loader:
            optimizer.zero_grad()
            (weight * batch).mean().backward()
            optimizer.step()
            seen += batch.int().tolist()
        worker.barrier()
        with optimizer.snapshot():
            return seen, weight.detach().clone(), worker.node.clock, worker.num_samples

    with fed_job(tmp_path, data_servers=1, workers=2) as started:
        found = started.run(work)
    assert sorted(found[0][0] + found[1][0]) == [number for number in range(36) if number not in bad]
    assert sum(num for *_, num in found) == 36 - len(bad)
    means = [[number for number in range(clock * 12, clock * 12 + 12) if number not in bad] for clock in range(3)]
    expected = -sum(sum(numbers) / len(numbers) for numbers in means)
    for _, weight, clock, _ in found:
        assert weight.item() == pytest.approx(expected, rel=1e-12), "each clock is the mean of the records that it had"
        assert clock == 3
    told = [line for line in capfd.readouterr().err.splitlines() if "left out" in line]
    assert sum(int(line.split("left out ")[1].split()[0]) for line in told) == len(bad)
    assert all("could not be decoded: " in line and "numbers.txt" in line for line in told)


@pytest.mark.parametrize(("leases", "line"), [(False, "left out 1 of 4"), (True, "left out 2 of 3")])
def test_an_epoch_that_is_left_is_told_as_far_as_it_went(
    leases: bool, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With leases the next slice was read already, for step() to know of it."""
    told, source = list[Epoch](), write_lines(tmp_path, 12, {1, 2} if leases else {1, 5})
    monkeypatch.setattr(Trace, "record", lambda _, record: told.append(record) if isinstance(record, Epoch) else None)

    def work(_: Session) -> tuple[int, int]:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0))
        options = {"leases": leases, "slices": 2 if leases else 1, "transform": f"{OWN}:number", "on_error": "skip"}
        loader = paceline.feed(source, batch_size=4, **options)  # pyright: ignore[reportArgumentType]
        for _batch in loader:
            optimizer.step()
            break
        state = loader.state_dict()
        return state["epoch"], state["num_done"]

    assert run_job(tmp_path, work) == [(0, 0 if leases else 1)]
    assert f"worker 0 {line} records of epoch 0 that could not be decoded: " in capfd.readouterr().err
    assert [(epoch.samples, epoch.skipped) for epoch in told] == [(1, 2) if leases else (3, 1)]


def test_a_record_that_cannot_be_decoded_ends_the_loop_where_none_is_skipped(tmp_path: Path) -> None:
    source = write_lines(tmp_path, 12, {7})

    def work(_: Session) -> int:
        batches = iter(paceline.feed(source, batch_size=3, transform=f"{OWN}:number", leases=False))
        read = list(islice(batches, 2))
        with pytest.raises(RecordError, match=r"numbers\.txt"):
            next(batches)
        return len(read)

    for data_servers in (0, 1):
        with fed_job(tmp_path, data_servers=data_servers) as started:
            assert started.run(work) == [2]


# -- reading ---------------------------------------------------------------------------------------------------------


def test_evaluation_has_whole_batches_and_leaves_no_trace(tmp_path: Path) -> None:
    source = write_numbers(tmp_path, 20)

    def work(worker: Session) -> tuple[list[int], Any, int, int]:
        loader = paceline.feed(source, batch_size=6, slices=3)
        with torch.no_grad():
            sizes = [len(batch["indices"]) for batch in loader for _ in range(1)]
        return sizes, loader.state_dict()["epoch"], worker.node.clock, worker.num_samples

    with fed_job(tmp_path, data_servers=1, workers=2) as started:
        assert started.run(work) == [([6, 6], 0, 0, 0), ([6, 2], 0, 0, 0)]


def test_fewer_batches_than_workers_leave_some_without(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_numbers(tmp_path, 8)
    training = Training(fed(source, leases=False))
    with fed_job(tmp_path, data_servers=1, workers=3) as started:
        assert [clock for *_, clock in started.run(training)] == [1, 1, 1]
    assert training.all_counted() == list(range(8))
    assert capfd.readouterr().err.count("1 of 3 workers get nothing") == 1


@pytest.mark.parametrize("leases", [False, True])
def test_reading_goes_on_where_it_was_left_with_another_number_of_workers(leases: bool, tmp_path: Path) -> None:
    source = write_numbers(tmp_path, 47)

    def work(state: dict[str, int] | None, num_clocks: int | None) -> Any:
        def live(worker: Session) -> tuple[list[int], dict[str, int]]:
            optimizer = paceline.distributed(torch.optim.SGD(mlp().double().parameters(), lr=0.1))
            loader = paceline.feed(source, batch_size=6, shuffle=True, leases=leases)
            loader.load_state_dict(state or loader.state_dict())
            seen = list[int]()
            for batch in loader:
                if worker.node.clock == num_clocks:
                    break
                seen += batch["indices"].tolist()
                optimizer.step()
            return seen, loader.state_dict()

        return live

    with fed_job(tmp_path, data_servers=1, workers=2) as started:
        first = started.run(work(None, 2))
    if not leases:  # the batch of the loop that was left counts, and is what the state says
        first = [(seen, {**state, "num_done": 4}) for seen, state in first]
    assert [state["num_done"] for _, state in first] == [4, 4]
    with fed_job(tmp_path, data_servers=2, workers=3) as started:
        rest = started.run(work(first[0][1], None))
    assert Counter(index for seen, _ in first + rest for index in seen) == Counter(range(47))
    assert [(state["epoch"], state["num_done"]) for _, state in rest] == [(1, 0)] * 3


# -- what is expected ------------------------------------------------------------------------------------------------


class Foretold(LocalReader):
    """Counts what was read without having been expected."""

    num_surprises = 0
    most_expected = 0

    def expect(self, asks: Sequence[BatchRequest]) -> None:
        self._expected = list(asks)
        self.most_expected = max(self.most_expected, len(self._expected))

    def read(self, ask: BatchRequest) -> Batch:
        self.num_surprises += ask not in self._expected
        return super().read(ask)


@pytest.mark.parametrize("options", [{"leases": False}, {}, {"slices": 3}], ids=["fixed", "leases", "slices"])
def test_what_is_read_was_expected_unless_it_is_another_workers(options: dict[str, Any], tmp_path: Path) -> None:
    source = write_numbers(tmp_path, 36)

    def work(worker: Session) -> tuple[int, int]:
        reader = Foretold(BatchRecipe(source))
        worker.readers = SessionReaders(lambda recipe, prefetch: reader)
        Training(fed(source, shuffle=True, prefetch=3, **options), num_epochs=2)(worker)
        return reader.num_surprises, reader.most_expected

    assert run_job(tmp_path, work) == [(0, 4)]
