"""Workers come and go while a job runs: clocks have the batches of all places, and those that are there share them."""

from __future__ import annotations

import threading
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.test_reassignment import WAIT_S, Training, loader_of
from tests.jobs import Job, job, join_all, run_job
from tests.training.recipes import sgd

import paceline
from paceline.api.script import bind
from paceline.api.session import Session
from paceline.data.source_loader import FedLoader
from paceline.errors import UsageError

PLACES = 4
NUM_SAMPLES = 47


class Newcomers:
    """Has worker 0 of a job wait in one clock until others have come; one of them may die over its first batch."""

    def __init__(self, job: Job, training: Training, *ranks: int, dies: int = -1) -> None:
        self.job, self.training, self.dies = job, training, dies
        self.threads = [
            threading.Thread(target=Context().run, args=(self.live, rank), name=f"test-worker-{rank}", daemon=True)
            for rank in ranks
        ]
        self.here = threading.Barrier(len(ranks) + 1)
        self.came: list[int] = []

    def __call__(self, worker: Session, number: int) -> None:
        if worker.rank == 0 and worker.node.clock == 2 and number == 0 and not self.came:
            self.came.append(worker.rank)
            for thread in self.threads:
                thread.start()
            self.here.wait(WAIT_S)
        elif worker.rank and worker.rank not in self.came:
            self.came.append(worker.rank)
            self.here.wait(WAIT_S)
            if worker.rank == self.dies:
                raise DiesHereError

    def live(self, rank: int) -> None:
        worker = self.job.join(rank, incarnation=1)
        bind(worker)
        try:
            self.training(worker)
        except DiesHereError:
            worker.close(politely=False)
            self.job.report_death(rank, incarnation=1)
        else:
            worker.close()


class DiesHereError(Exception):
    """A worker dies."""


def elastic(directory: Path, **settings: Any) -> Any:
    return job(directory, workers=PLACES, num_at_start=1, **settings)


@pytest.mark.parametrize("dies", [-1, 2], ids=["all stay", "one dies"])
def test_values_and_counts_are_those_of_as_many_workers_as_places_whichever_are_there(
    tmp_path_factory: pytest.TempPathFactory, dies: int
) -> None:
    plain = Training(NUM_SAMPLES, num_epochs=5, shuffle=True)
    expected = run_job(tmp_path_factory.mktemp("plain"), plain, workers=PLACES, servers=2)
    training = Training(NUM_SAMPLES, num_epochs=5, shuffle=True)

    with elastic(tmp_path_factory.mktemp("elastic"), servers=2) as started:
        training.before = newcomers = Newcomers(started, training, 1, 2, dies=dies)
        first = started.join(0)
        bind(first)
        values, clock = training(first)
        join_all(newcomers.threads)
        first.close()

    if dies < 0:  # else what it had may count in the next clock
        torch.testing.assert_close(values, expected[0][0], rtol=1e-10, atol=1e-12)
    assert clock == expected[0][1]
    assert training.all_counted() == plain.all_counted()
    assert [bool(training.counted[rank]) for rank in range(3)] == [True, True, dies < 0]


def test_nothing_waits_for_a_worker_that_has_begun_and_needs_no_server_yet(tmp_path: Path) -> None:
    with elastic(tmp_path) as started:
        [server] = started.servers
        first, later = started.join(0), started.join(1, incarnation=1)
        table = first.table("w", shape=(2,), update=paceline.update.Add())
        for _ in range(3):
            table.push([1.0, 1.0])
            first.clock()
        assert table.pull().tolist() == [3.0, 3.0]
        assert server._core.members == [0]

        again = later.table("w", shape=(2,), update=paceline.update.Add())
        assert (later.node.clock, server._core.members) == (3, [0, 1])
        assert again.pull().tolist() == [3.0, 3.0]
        later.close()
        first.close()


def test_a_worker_that_never_needed_a_server_leaves_without_a_word(tmp_path: Path) -> None:
    with elastic(tmp_path) as started:
        started.join(1, incarnation=1).close()
        with started.join(2, incarnation=1) as worker:
            worker.clock()  # which needs them


def test_an_evaluation_has_all_batches(tmp_path: Path) -> None:
    with elastic(tmp_path) as started, started.join(0) as worker:
        bind(worker)
        with torch.no_grad():
            found = [index for indices, _ in paceline.shard(loader_of(NUM_SAMPLES)) for index in indices.tolist()]
    assert found == list(range(NUM_SAMPLES))


def test_what_needs_all_workers_is_refused(tmp_path: Path) -> None:
    with elastic(tmp_path) as started, started.join(0) as worker:
        bind(worker)
        with pytest.raises(UsageError, match="a part of this list would not be read while its worker is not there"):
            paceline.shard([1, 2, 3])
        with pytest.raises(UsageError, match=r"no other workers to call: the workers of this job come and go"):
            paceline.all_reduce(torch.ones(2))
        model = torch.nn.Linear(9, 1).double()
        _ = paceline.distributed(sgd(model), model=model, overlap=True)
        with pytest.raises(UsageError, match=r"come and go, and share batches as slices: .* overlap=True"):
            next(iter(paceline.shard(loader_of(NUM_SAMPLES))))


def test_a_source_is_fed_by_leases_alone(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("a\nb\nc\n")
    with elastic(tmp_path) as started, started.join(0) as worker:
        bind(worker)
        with pytest.raises(UsageError, match="leave out leases=False"):
            paceline.feed(paceline.sources.lines(lines), batch_size=1, leases=False)
        loader = paceline.feed(paceline.sources.lines(lines), batch_size=1)
        assert isinstance(loader, FedLoader)
        with torch.no_grad():
            assert list(loader) == [["a"], ["b"], ["c"]]
