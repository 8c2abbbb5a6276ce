"""Slices of a clock go to workers with time for them: each counts once, and values are those of the run without."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.jobs import Job, job, run_job, start_and_join
from tests.training.recipes import adam, loss_of, mlp, parameters, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.api.script import bind
from paceline.api.session import Session
from paceline.errors import Refused, UsageError

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
BATCH_SIZE = 6
WAIT_S = 30.0


class Numbered(Dataset[tuple[int, Tensor]]):
    """Samples that say which one they are."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.data = torch.randn(num_samples, 9, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.data[index]


def loader_of(num_samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(num_samples), **{"batch_size": BATCH_SIZE, **options})


@dataclass
class Training:
    """An ordinary loop. `before` is called with the worker and the number of its slice in the clock."""

    num_samples: int
    slices: int = 1
    num_epochs: int = 1
    make: MakeOptimizer = sgd
    consistency: str = "bsp"
    shuffle: bool = False
    before: Callable[[Session, int], None] = lambda worker, number: None
    # The samples that a worker was given in clocks that it has finished.
    counted: dict[int, list[int]] = field(default_factory=dict)

    def __call__(self, worker: Session) -> tuple[Tensor, int]:
        """Return the values and the clock at the end."""
        model = mlp().double()
        optimizer = paceline.distributed(self.make(model), consistency=self.consistency)
        loader = paceline.shard(loader_of(self.num_samples, shuffle=self.shuffle), slices=self.slices)
        counted = self.counted.setdefault(worker.rank, [])
        pending: list[int] = []
        number = 0
        for _ in range(self.num_epochs):
            for indices, batch in loader:
                self.before(worker, number)
                clock = worker.node.clock
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                pending += indices.tolist()
                number += 1
                if worker.node.clock > clock:
                    counted += pending
                    pending, number = [], 0
        worker.barrier()
        with optimizer.snapshot():
            return parameters(model), worker.node.clock

    def all_counted(self) -> list[int]:
        return sorted(index for own in self.counted.values() for index in own)


class Lagging:
    """In each clock, worker 0 goes on with its first slice when the others have taken all but two of the clock's."""

    def __init__(self, num_samples: int, slices: int, workers: int = 3) -> None:
        self.slices, self.workers = slices, workers
        self.num_batches = -(-num_samples // BATCH_SIZE)
        self.num_taken: Counter[int] = Counter()  # by the others, by clock
        self.changed = threading.Condition()

    def __call__(self, worker: Session, number: int) -> None:
        clock = worker.node.clock
        with self.changed:
            if worker.rank:
                self.num_taken[clock] += 1
                self.changed.notify_all()
            elif number == 0:
                assert self.changed.wait_for(lambda: self.num_taken[clock] >= self.num_slices(clock) - 2, WAIT_S)

    def num_slices(self, clock: int) -> int:
        """How many slices a clock has: the last one of an epoch may lack batches for some workers."""
        in_epoch = clock % -(-self.num_batches // self.workers)
        return self.slices * min(self.workers, self.num_batches - in_epoch * self.workers)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("num_samples", [36, 47], ids=["even", "uneven"])
def test_values_equal_those_without_slices_whichever_worker_took_them(
    tmp_path_factory: pytest.TempPathFactory, num_samples: int, make: MakeOptimizer
) -> None:
    plain = Training(num_samples, num_epochs=2, make=make, shuffle=True)
    sliced = Training(num_samples, slices=3, num_epochs=2, make=make, shuffle=True, before=Lagging(num_samples, 3))
    expected = run_job(tmp_path_factory.mktemp("plain"), plain, workers=3, servers=2)
    found = run_job(tmp_path_factory.mktemp("sliced"), sliced, workers=3, servers=2)
    for (values, clock), (values_before, clock_before) in zip(found, expected, strict=True):
        torch.testing.assert_close(values, values_before, rtol=1e-10, atol=1e-12)
        assert clock == clock_before, "all are in step, as without slices"
    assert sliced.all_counted() == sorted([*range(num_samples)] * 2)
    assert len(sliced.counted[0]) < len(plain.counted[0]), "no worker has helped"


def test_a_slow_worker_is_helped_and_none_runs_ahead(tmp_path: Path) -> None:
    training = Training(72, slices=6, consistency="ssp:10", before=Lagging(72, 6))
    found = run_job(tmp_path, training, workers=3)
    assert len(training.counted[0]) <= 2 * 4, training.counted
    assert [clock for _, clock in found] == [4, 4, 4]
    assert training.all_counted() == list(range(72))


# -- death -----------------------------------------------------------------------------------------------------------


class Death(Exception):
    """Ends a worker without a word."""


def run_until_death(started: Job, training: Training, on_death: Callable[[], object]) -> dict[int, tuple[Tensor, int]]:
    """Run three workers, some of which die; `on_death` is called when the servers are told."""
    results: dict[int, tuple[Tensor, int]] = {}

    def live(rank: int) -> None:
        torch.set_num_threads(1)
        worker = started.join(rank)
        bind(worker)
        try:
            results[rank] = training(worker)
            worker.close()
        except Death:
            started.kill(worker)
            on_death()

    threads = [threading.Thread(target=Context().run, args=(live, rank), daemon=True) for rank in range(3)]
    start_and_join(threads)
    return results


@pytest.mark.parametrize("consistency", ["bsp", "ssp:2"])
def test_what_a_dead_worker_had_taken_others_do_in_the_same_clock(
    tmp_path_factory: pytest.TempPathFactory, consistency: str
) -> None:
    is_dead = threading.Event()

    def before(worker: Session, number: int) -> None:
        if worker.node.clock == 1 and worker.rank == 2 and number == 1:
            raise Death
        if worker.node.clock == 1 and worker.rank != 2:
            assert is_dead.wait(WAIT_S)

    training = Training(54, slices=3, consistency=consistency, before=before)
    with job(tmp_path_factory.mktemp("sliced"), workers=3, servers=2) as started:
        results = run_until_death(started, training, is_dead.set)
    assert sorted(results) == [0, 1]
    assert training.all_counted() == list(range(54))
    if consistency == "bsp":
        plain = run_job(tmp_path_factory.mktemp("plain"), Training(54), workers=3, servers=2)
        torch.testing.assert_close(results[0][0], plain[0][0], rtol=1e-10, atol=1e-12)


def test_what_comes_back_when_the_others_are_through_counts_in_their_next_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last round of the epoch, so that their next clock is one more."""
    ticks, finish = threading.Semaphore(0), Session.finish_clock
    holds_two = threading.Event()  # of its three slices: the others would take them while it sleeps

    def clock(worker: Session, samples: float | None) -> int:
        finished = finish(worker, samples)
        ticks.release()
        return finished

    def before(worker: Session, number: int) -> None:
        if worker.node.clock == 1 and worker.rank != 2:
            assert holds_two.wait(WAIT_S)
        if worker.node.clock == 1 and worker.rank == 2 and number == 1:
            holds_two.set()
            for _ in range(3 + 2):  # all of the first clock, the others of the second
                assert ticks.acquire(timeout=WAIT_S)
            raise Death

    monkeypatch.setattr(Session, "finish_clock", clock)
    training = Training(36, slices=3, before=before)
    with job(tmp_path, workers=3, servers=2) as started:
        results = run_until_death(started, training, lambda: None)
    assert [clock for _, clock in results.values()] == [3, 3]
    assert training.all_counted() == list(range(36))


@pytest.mark.parametrize(("num_samples", "clock"), [(36, 0), (36, 1), (47, 1), (47, 2)])
@pytest.mark.parametrize(("is_fed", "slices"), [(False, 3), (True, 1)])
def test_each_sample_weighs_as_much_as_without_a_death(
    num_samples: int, clock: int, is_fed: bool, slices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dead worker had counts in the next clock of the others, or in one more behind the last."""
    ticks, finish = threading.Semaphore(0), Session.finish_clock
    has_taken = threading.Event()
    np.save(tmp_path / "numbers.npy", np.arange(num_samples))

    def tick(worker: Session, samples: float | None) -> int:
        finished = finish(worker, samples)
        ticks.release()
        return finished

    def work(worker: Session) -> Tensor:
        weight = nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0))
        rows = paceline.Embedding(None, 1, update=paceline.update.SGD(lr=1.0), init=0.0, dtype=torch.float64)
        options = {"batch_size": BATCH_SIZE}
        source = paceline.sources.arrays(tmp_path / "numbers.npy")
        sharded = DataLoader(list(range(num_samples)), **options)
        # Others ask for work of that clock only then: its last one has less than a batch for each worker.
        assert worker.rank == 2 or clock > 0 or has_taken.wait(WAIT_S)
        for indices in paceline.feed(source, **options) if is_fed else paceline.shard(sharded, slices=slices):
            if worker.node.clock == clock and worker.rank == 2:
                has_taken.set()
                for _ in range(3 * clock + 2):  # all of the clocks before, the others of this one
                    assert ticks.acquire(timeout=WAIT_S)
                raise Death
            optimizer.zero_grad()
            (weight[indices].mean() + rows(indices).mean()).backward()
            optimizer.step()
            assert worker.rank == 2 or worker.node.clock != clock or has_taken.wait(WAIT_S)
        worker.barrier()
        with optimizer.snapshot():
            return torch.stack((weight.detach().clone(), rows(torch.arange(num_samples)).detach().view(-1)))

    monkeypatch.setattr(Session, "finish_clock", tick)
    with job(tmp_path, workers=3, servers=2) as started:
        results = run_until_death(started, work, lambda: None)  # pyright: ignore[reportArgumentType]
    assert sorted(results) == [0, 1]
    share = torch.tensor([-1 / 18 if index < 36 else -1 / 11 for index in range(num_samples)], dtype=torch.float64)
    torch.testing.assert_close(results[0], torch.stack((share, share)), rtol=1e-10, atol=0)  # pyright: ignore


# -- embeddings ------------------------------------------------------------------------------------------------------


def test_embeddings_weigh_their_slices_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    def work(worker: Session, slices: int) -> Tensor:
        model = nn.Linear(2, 1, dtype=torch.float64)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
        rows = paceline.Embedding(None, 2, update=paceline.update.SGD(lr=0.5), init=1.0, dtype=torch.float64)
        for indices, batch in paceline.shard(loader_of(23, batch_size=5), slices=slices):
            optimizer.zero_grad()
            (model(rows(indices % 7)) - batch[:, :1]).square().mean().backward()
            optimizer.step()
        worker.barrier()
        return torch.cat([rows(torch.arange(7)).detach().reshape(-1), parameters(model)])

    plain = run_job(tmp_path_factory.mktemp("plain"), lambda worker: work(worker, 1), workers=2)
    sliced = run_job(tmp_path_factory.mktemp("sliced"), lambda worker: work(worker, 3), workers=2)
    torch.testing.assert_close(sliced[0], plain[0], rtol=1e-10, atol=1e-12)


# -- what does not go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "slices", "message"),
    [
        ([1, 2, 3], 2, "slices are parts of the batches of a DataLoader, and this is a list"),
        (loader_of(12), 7, "slices is 7, expected 1 to 6: a slice has a sample at least"),
        (loader_of(12), 0, "slices is 0, expected 1 to 6"),
        (loader_of(12, num_workers=2), 2, "num_workers=2, but which samples a worker gets is known only when"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, source: Any, slices: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_job(tmp_path, lambda worker: paceline.shard(source, slices=slices))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "needs an optimizer from paceline.distributed"),
        ({"overlap": True}, "does not go with overlap=True"),
        ({"scale": "mean"}, 'does not go with scale="mean", as workers do not do the same number of slices'),
        ({"strategy": "all-reduce"}, "does not go with all-reduce, which combines gradients in every backward"),
        ({"strategy": {"*bias": "bsp", "*": "all-reduce"}}, "does not go with all-reduce"),
    ],
)
def test_a_loop_whose_gradients_cannot_be_added_up_is_refused(
    tmp_path: Path, settings: dict[str, Any] | None, message: str
) -> None:
    def work(worker: Session) -> None:
        model = mlp().double()
        optimizer = settings and paceline.distributed(sgd(model), model=model, **settings)
        next(iter(paceline.shard(loader_of(12), slices=2)))
        del optimizer

    with pytest.raises(UsageError, match=message):
        run_job(tmp_path, work)


def test_reading_ahead_and_loops_within_loops_are_refused(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        optimizer = paceline.distributed(sgd(mlp().double()))
        loader = paceline.shard(loader_of(12), slices=2)
        with pytest.raises(UsageError, match="leave out prefetch or slices"):
            next(iter(paceline.prefetch(loader, {})))
        with pytest.raises(UsageError, match="is within another one"):
            next(iter(zip(loader, paceline.shard(loader_of(12), slices=3), strict=True)))
        del optimizer

    run_job(tmp_path, work)


def test_workers_with_different_loaders_are_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"do not cut the slices of loader 1 alike"):
        run_job(tmp_path, lambda worker: Training(36, slices=2 + worker.rank)(worker), workers=2)


# -- the rest of a loader --------------------------------------------------------------------------------------------


def test_evaluation_has_whole_batches_and_an_epoch_may_be_broken_off(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = mlp().double()
        optimizer = paceline.distributed(sgd(model))
        loader = paceline.shard(loader_of(13), slices=4)
        assert (len(loader), loader.batch_size, len(loader.dataset)) == (9, BATCH_SIZE, 13)
        with torch.no_grad():
            assert [len(indices) for indices, _ in loader] == [6, 6, 1]
        for indices, _ in loader:
            assert indices.tolist() == [0]
            break
        seen: list[int] = []
        for indices, batch in loader:
            seen += indices.tolist()
            loss_of(model, batch).backward()
            optimizer.step()
        assert (seen, worker.node.clock) == (list(range(13)), 3)

    run_job(tmp_path, work)


def test_a_slice_without_a_step_counts_for_nothing_and_the_clock_ends_all_the_same(tmp_path: Path) -> None:
    def work(worker: Session) -> int:
        model = mlp().double()
        optimizer = paceline.distributed(sgd(model))
        for number, (_, batch) in enumerate(paceline.shard(loader_of(12), slices=2)):
            if number != 1:  # the last of the first clock
                loss_of(model, batch).backward()
                optimizer.step()
        return worker.node.clock

    assert run_job(tmp_path, work) == [2]


def test_a_slice_without_a_step_counts_as_zeros_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used: list[Tensor] = []

    def work(worker: Session) -> Tensor:
        model = mlp().double()
        optimizer = paceline.distributed(sgd(model))
        for number, (_, batch) in enumerate(paceline.shard(loader_of(3 * BATCH_SIZE), slices=2)):
            if number % 2 == 1:  # the last of each clock
                used.append(batch)
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        return parameters(model)

    (found,) = run_job(tmp_path, work, workers=1)
    alone = mlp().double()
    optimizer = sgd(alone)
    for batch in used:
        optimizer.zero_grad()
        (loss_of(alone, batch) * len(batch) / BATCH_SIZE).backward()
        optimizer.step()
    torch.testing.assert_close(found, parameters(alone), rtol=1e-10, atol=1e-12)
    assert capsys.readouterr().err.count("a slice or a leased batch had no step() before the next one") == 1


def test_a_worker_that_was_started_again_goes_on_where_the_others_are(tmp_path: Path) -> None:
    is_dead = threading.Event()

    def before(worker: Session, number: int) -> None:
        if worker.rank == 2 and worker.node.clock == 3:
            raise Death
        if worker.node.clock == 3:
            assert is_dead.wait(WAIT_S)

    training = Training(36, slices=3, num_epochs=3, before=before)
    with job(tmp_path, workers=3) as started:
        again: list[tuple[Tensor, int]] = []

        def begin_again() -> None:
            with started.join(2, incarnation=1) as worker:
                bind(worker)
                is_dead.set()
                training.before = lambda worker, number: None
                again.append(training(worker))

        results = run_until_death(started, training, begin_again)
    assert training.all_counted() == sorted([*range(36)] * 3)
    assert torch.equal(again[0][0], results[0][0])
