"""Workers that do not come, leave, fail or come back: the others are told which in time, nothing is left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.jobs import job, run_job
from torch import nn

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, PeerError

ONE = torch.ones(1)
ADVICE = "Every worker has to make the same number of steps"


class ScriptFailed(Exception):
    """A mistake in a user's script."""


def test_a_worker_that_does_not_come_is_named_at_the_deadline(tmp_path: Path) -> None:
    together, gave_up = threading.Barrier(2), threading.Barrier(3)

    def work(worker: Session) -> str:
        paceline.all_reduce(ONE)
        if worker.rank == 1:
            gave_up.wait(120)
            with pytest.raises(PeerError, match=r"gave up: it waited|gave up, as worker") as late:
                paceline.all_reduce(ONE)
            return str(late.value)
        together.wait(120)  # so that both are in the call at its deadline
        with pytest.raises(PeerError, match="worker 1") as failure:
            paceline.reduce(ONE, timeout_s=1.0)
        gave_up.wait(120)
        with pytest.raises(PeerError, match="an earlier call has failed"):
            paceline.broadcast(ONE)
        return f"{type(failure.value).__name__} {failure.value}"

    first, _, third = run_job(tmp_path, work, workers=3)
    said = "DeadlineExceeded worker {}, call 2, reduce: waited 1 s for worker 1, which did not come in time"
    assert first.startswith(said.format(0)) or third.startswith(said.format(2))
    assert all("worker 1" in words for words in (first, third))


def test_a_worker_that_does_not_even_come_to_the_first_call_is_named(tmp_path: Path) -> None:
    asked = threading.Barrier(2)

    def work(worker: Session) -> None:
        if worker.rank == 0:
            with pytest.raises(DeadlineExceeded, match=r"worker 0, all_gather: waited 0.3 s for worker 1, which did"):
                paceline.all_gather(ONE, timeout_s=0.3)
        asked.wait(120)

    run_job(tmp_path, work, workers=2)


def test_a_worker_that_has_left_is_named(tmp_path: Path) -> None:
    told: dict[int, str] = {}

    def work(worker: Session) -> None:
        if worker.rank == 2:
            return  # before its first call
        with pytest.raises(PeerError, match=rf"worker 2 has left the job or has died before .*\. {ADVICE}") as early:
            paceline.all_reduce(ONE)
        told[worker.rank] = str(early.value)

    run_job(tmp_path, work, workers=3)
    assert len(told) == 2

    def again(worker: Session) -> None:
        paceline.all_reduce(ONE)
        if worker.rank == 0:
            with pytest.raises(PeerError, match=rf"worker 0, call 2, all_reduce: worker 1 has left the job. {ADVICE}"):
                paceline.all_reduce(ONE)

    (tmp_path / "again").mkdir()
    run_job(tmp_path / "again", again, workers=2)


def test_a_script_that_fails_with_calls_under_way_ends_at_once_and_is_named(tmp_path: Path) -> None:
    told: list[str] = []
    failed = threading.Event()

    def work(worker: Session) -> None:
        paceline.all_reduce(ONE)
        if worker.rank == 1:
            paceline.all_reduce(ONE, later=True)  # worker 0 does not come to this call in time
            failed.set()
            raise ScriptFailed
        assert failed.wait(120)
        try:
            paceline.all_reduce(ONE)
            paceline.all_reduce(ONE)
        except PeerError as error:
            told.append(str(error))

    with pytest.raises(ScriptFailed):
        run_job(tmp_path, work, workers=2)
    assert "worker 1 has ended with an error" in told[0]


def test_backward_tells_which_worker_is_gone(tmp_path: Path) -> None:
    told: list[str] = []

    def work(worker: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = paceline.distributed(
            torch.optim.SGD(model.parameters(), lr=0.1), strategy="all-reduce", model=model
        )
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if worker.rank == 1:
            raise ScriptFailed
        try:
            model(torch.ones(1, 2)).sum().backward()
        except PeerError as error:
            told.append(str(error))

    with pytest.raises(ScriptFailed):
        run_job(tmp_path, work, workers=2)
    assert "worker 1 has ended with an error" in told[0]


def test_a_worker_that_was_started_again_is_told_that_it_cannot_join(tmp_path: Path) -> None:
    with job(tmp_path, workers=1) as started:
        first = started.join(0)
        first.exchange.finish(first.exchange.all_reduce(ONE, "sum", None), "all_reduce", None)
        started.kill(first)
        with started.join(0, incarnation=1) as second, pytest.raises(PeerError, match="in an earlier life"):
            second.exchange.finish(second.exchange.all_reduce(ONE, "sum", None), "all_reduce", None)


def test_a_wait_may_be_given_up_and_taken_up_again(tmp_path: Path) -> None:
    waited = threading.Event()

    def work(worker: Session) -> float:
        if worker.rank == 1:
            assert waited.wait(120)
        total = paceline.all_reduce(ONE, later=True)
        if worker.rank == 0:
            with pytest.raises(DeadlineExceeded, match=r"worker 0 waited 0.1 s for call 1 of 1"):
                paceline.wait(total, timeout_s=0.1)
            waited.set()
        return paceline.wait(total).item()

    assert run_job(tmp_path, work, workers=2) == [2.0, 2.0]
