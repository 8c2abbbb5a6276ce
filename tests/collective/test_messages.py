"""Tensors from one worker to another: in order, of any kind, and what is said when the other end is not there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.jobs import job, run_job

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, PeerError, UsageError

EVERY = (
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(True),
    torch.zeros(0, 3),
    torch.ones(5, dtype=torch.bfloat16),
    torch.ones(2, dtype=torch.complex64),
    torch.arange(1 << 20),
)


@pytest.mark.parametrize("asked", ["shm", "gloo"])
def test_two_workers_exchange_tensors_in_order_while_a_third_takes_no_part(
    tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_COLLECTIVES", asked)

    def work(worker: Session) -> None:
        if worker.rank == 2:
            return
        other = 1 - worker.rank
        sent = [paceline.send(tensor + worker.rank, to=other, later=True) for tensor in EVERY if tensor.numel()]
        for tensor in EVERY:
            if tensor.numel():
                found = paceline.receive(source=other)
                torch.testing.assert_close(found, (tensor + other).contiguous(), rtol=0, atol=0)
        for one in sent:
            assert paceline.wait(one) is None
        if worker.rank == 0:
            paceline.send(EVERY[2], to=1)
            paceline.send(torch.ones(3, dtype=torch.float64), to=1)
            paceline.send(torch.ones(2), to=1)
            return
        assert paceline.receive(0).shape == (0, 3)
        with pytest.raises(UsageError, match=r"receive from worker 0: expected float32 \(2,\), got float64 \(3,\)"):
            paceline.receive(0, torch.ones(2))
        assert paceline.wait(paceline.receive(0, torch.ones(2), later=True)).tolist() == [1.0, 1.0]

    run_job(tmp_path, work, workers=3)


def test_the_other_end_is_named_when_it_does_not_come_leaves_or_dies(tmp_path: Path) -> None:
    late = threading.Event()

    def work(worker: Session) -> None:
        if worker.rank == 1:
            assert late.wait(120)
            paceline.send(torch.ones(1), to=2)
            return
        if worker.rank == 0:
            try:
                with pytest.raises(DeadlineExceeded, match=r"receive from worker 1: waited 0.3 s for worker 1, which"):
                    paceline.receive(1, timeout_s=0.3)
            finally:
                late.set()
            with pytest.raises(PeerError, match="an earlier message has failed"):
                paceline.send(torch.ones(1), to=1)
            return
        paceline.receive(1)
        with pytest.raises(PeerError, match=r"worker 2, receive from worker 1: worker 1 has left the job"):
            paceline.receive(1)

    run_job(tmp_path, work, workers=3)


def test_each_call_has_its_own_deadline_also_while_the_other_direction_connects(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        if worker.rank == 0:
            waiting = paceline.receive(1, later=True)
            with pytest.raises(DeadlineExceeded, match=r"send to worker 1: waited 0.2 s for worker 1"):
                paceline.send(torch.ones(1), to=1, timeout_s=0.2)
            with pytest.raises(PeerError):
                paceline.wait(waiting)

    run_job(tmp_path, work, workers=2)


def test_what_cannot_be_sent_is_refused_at_once(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        for other in (0, 2, "1"):
            with pytest.raises(UsageError, match="expected another one of the 1 workers"):
                paceline.send(torch.ones(1), to=other)  # pyright: ignore[reportCallIssue, reportArgumentType]
        with pytest.raises(UsageError, match="expected a tensor"):
            paceline.send(3, to=0)  # pyright: ignore[reportCallIssue, reportArgumentType]
        with pytest.raises(UsageError, match="expected a dense tensor"):
            paceline.send(torch.ones(2).to_sparse(), to=0)

    with job(tmp_path) as started:
        started.run(work)
