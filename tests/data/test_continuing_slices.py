"""Slices go on behind the clock in which reading was left: each sample counts once, before or after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from tests.data.test_reassignment import BATCH_SIZE, WAIT_S, Death, Training, loader_of, run_until_death
from tests.jobs import job, run_job
from tests.training.recipes import loss_of, mlp, sgd

import paceline
from paceline.api.script import bind
from paceline.api.session import Session
from paceline.core.work_queue import WorkAnswer, WorkRound
from paceline.data.order import EpochOrder, EpochRounds
from paceline.data.slicing import SliceWalk
from paceline.errors import Refused, UsageError
from paceline.server.work_queue import WorkQueueEntry

NUM_SAMPLES = 47
BATCHES = EpochOrder(NUM_SAMPLES, BATCH_SIZE, drop_last=False, shuffled=True)
State = dict[str, int]
Work = Callable[[Session], tuple[list[int], State]]


def train(slices: int, *, state: State | None = None, num_clocks: int | None = None, num_epochs: int = 1) -> Work:
    """A loop that goes on from a state, and is left after so many clocks: returns what was counted, and the state."""

    def work(worker: Session) -> tuple[list[int], State]:
        model = mlp().double()
        optimizer = paceline.distributed(sgd(model))
        loader: Any = paceline.shard(loader_of(NUM_SAMPLES, shuffle=True), slices=slices, seed=1)
        if state is not None:
            loader.load_state_dict(state)
        counted = list[int]()
        while loader.epoch < num_epochs:
            for indices, batch in loader:
                if worker.node.clock == num_clocks:
                    return counted, loader.state_dict()
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
                counted += indices.tolist()
        return counted, loader.state_dict()

    return work


def samples(first: int, last: int | None = None, epoch: int = 0) -> list[int]:
    """Those of these batches, in ascending order."""
    return sorted(chain.from_iterable(BATCHES.batches(seed=1, epoch=epoch)[first:last]))


@pytest.mark.parametrize(("slices", "workers"), [(3, 2), (2, 3), (1, 3), (3, 1)])
def test_others_go_on_with_the_same_epoch_in_other_slices_or_none(
    tmp_path_factory: pytest.TempPathFactory, slices: int, workers: int
) -> None:
    before = run_job(tmp_path_factory.mktemp("before"), train(3, num_clocks=2), workers=2)
    assert sorted(chain(*(counted for counted, _ in before))) == samples(0, 4)
    states = [state for _, state in before]
    assert [(state["epoch"], state["num_done"]) for state in states] == [(0, 4)] * 2
    resumed = train(slices, state=states[0], num_epochs=2)
    after = run_job(tmp_path_factory.mktemp("after"), resumed, workers=workers)
    assert sorted(chain(*(counted for counted, _ in after))) == sorted(samples(4) + samples(0, epoch=1))
    assert [(state["epoch"], state["num_done"]) for _, state in after] == [(2, 0)] * workers


def test_a_clock_counts_when_its_last_slice_was_stepped_with(tmp_path: Path) -> None:
    def work(worker: Session) -> list[tuple[int, int]]:
        model = mlp().double()
        optimizer = paceline.distributed(sgd(model))
        loader: Any = paceline.shard(loader_of(12), slices=2)
        found = list[tuple[int, int]]()
        for _, batch in loader:
            before = loader.state_dict()["num_done"]
            loss_of(model, batch).backward()
            optimizer.step()
            found.append((before, loader.state_dict()["num_done"]))
        return found

    assert run_job(tmp_path, work) == [[(0, 0), (0, 1), (1, 1), (1, 2)]]


def test_what_was_done_of_a_clock_that_is_left_counts_when_it_is_done_again(tmp_path: Path) -> None:
    """And not twice: the state says that this clock is not finished."""

    def work(worker: Session) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.nn.Parameter(torch.zeros(12, dtype=torch.float64))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=6.0))
        rows = paceline.Embedding(12, 1, update=paceline.update.SGD(lr=6.0), init=0.0, dtype=torch.float64)
        loader: Any = paceline.shard(loader_of(12), slices=3)
        for left in (True, False):
            for indices, _ in loader:
                optimizer.zero_grad()
                (weight[indices] + rows(indices)[:, 0]).mean().backward()
                optimizer.step()
                if left:
                    break
            loader.load_state_dict(loader.state_dict())
        with optimizer.snapshot():
            return weight.detach().clone(), rows(torch.arange(12))[:, 0]

    for values in run_job(tmp_path, work)[0]:
        torch.testing.assert_close(values, -torch.ones(12, dtype=torch.float64))


def test_workers_with_different_states_are_told(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        state = {"epoch": 3, "num_done": worker.rank, "drop_last": False}
        state |= {"num_samples": NUM_SAMPLES, "batch_size": BATCH_SIZE, "shuffled": True, "seed": 1}
        train(2, state=state, num_epochs=4)(worker)

    message = r"do not begin the slices of loader 1 alike: after . batches of epoch 3 there and after . here"
    with pytest.raises(Refused, match=message):
        run_job(tmp_path, work, workers=2)


@pytest.mark.parametrize("cut", [{"partition": "contiguous"}, {"partition": "hashed"}, {"shuffle": True}])
def test_slices_are_cut_in_one_way(tmp_path: Path, cut: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"leave out partition|says itself whether it is shuffled"):
        run_job(tmp_path, lambda worker: paceline.shard(loader_of(12), slices=2, **cut))


@pytest.mark.parametrize("newer", [None, (1, 6), (0, 3), (1, 0)], ids=["none", "end", "middle", "beginning"])
def test_a_worker_that_is_started_again_goes_where_the_others_are_whatever_its_state_says(
    tmp_path: Path, newer: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job begins after two batches; one worker dies in the second epoch, and is back with another state."""
    is_dead, shard = threading.Event(), paceline.shard
    states: list[tuple[int, int] | None] = [(0, 2)]

    def before(worker: Session, number: int) -> None:
        if worker.rank == 2 and worker.node.clock == 3:
            raise Death
        if worker.node.clock == 3:
            assert is_dead.wait(WAIT_S)

    def loaded(source: Any, **options: Any) -> Any:
        loader: Any = shard(source, **options)
        if states[0] is not None:
            epoch, num_done = states[0]
            loader.load_state_dict(loader.state_dict() | {"epoch": epoch, "num_done": num_done})
        return loader

    monkeypatch.setattr(paceline, "shard", loaded, raising=False)
    training = Training(36, slices=3, num_epochs=3, before=before)
    with job(tmp_path, workers=3) as started:
        again: list[tuple[torch.Tensor, int]] = []

        def begin_again() -> None:
            with started.join(2, incarnation=1) as worker:
                bind(worker)
                states[0] = newer
                is_dead.set()
                training.before = lambda worker, number: None
                training.num_epochs = 3 - (newer or (0, 0))[0]
                again.append(training(worker))

        results = run_until_death(started, training, begin_again)
    assert training.all_counted() == sorted([*range(12, 36), *range(36), *range(36)])
    assert torch.equal(again[0][0], results[0][0])


class _NoSlices:
    """Answers of a server of which the other workers have taken all slices of a round, and then of the epoch."""

    def __init__(self, rounds: EpochRounds) -> None:
        self._words: list[Literal["rest", "over"]] = ["rest"] * len(rounds) + ["over"]

    def request(self, *_: object) -> Future[memoryview]:
        return Future()

    def wait_answer(self, _: object, place: WorkRound) -> WorkQueueEntry:
        return WorkQueueEntry(WorkAnswer(self._words.pop(0), place), 0)


def test_a_clock_without_a_slice_ends_behind_its_batches() -> None:
    rounds = EpochRounds(BATCHES.unshuffled(), 2, 3)
    reached = list[int]()
    walk = SliceWalk(cast("Any", _NoSlices(rounds)), rounds, 0, lambda: reached.append(walk.num_done), 2)
    assert list(walk) == []
    num_batches = BATCHES.num_batches
    assert reached == [min(2 * number, num_batches) for number in range(1, len(rounds) + 1)], "as a snapshot takes it"
    assert walk.num_done == num_batches
