"""Tensors by name on the servers, without a declaration."""

from pathlib import Path

import pytest
import torch
from tests.jobs import job, run_job

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, Refused, UsageError


def test_pushes_of_all_workers_add_up_in_any_order(tmp_path: Path) -> None:
    def work(worker: Session) -> list[float]:
        if worker.rank != 1:  # one that only reads waits until it is made
            for _ in range(3):
                paceline.push("counts", torch.tensor([1.0, float(worker.rank), 0.0]))
            ended = paceline.push("scalar", torch.tensor(2.0, dtype=torch.float64), later=True)
            assert paceline.wait(ended).applied
        assert paceline.pull("counts").shape == (3,)
        paceline.barrier()
        assert paceline.pull("scalar") == torch.tensor(4.0, dtype=torch.float64)
        return paceline.wait(paceline.pull("counts", later=True)).tolist()

    assert run_job(tmp_path, work, workers=3, servers=2) == [[6.0, 6.0, 0.0]] * 3


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        if worker.rank == 0:
            paceline.push("w", torch.ones(2))
            for bad, message in (
                (torch.ones(3), r"got float32 \(3,\), expected float32 \(2,\)"),
                (torch.ones(2).double(), r"got float64 \(2,\), expected float32"),
                (torch.ones(2).long(), "a tensor of int64, expected a dense one"),
                (torch.ones(2).to_sparse(), "got a sparse tensor"),
                (torch.tensor([1.0, float("nan")]), "NaN|not finite"),
            ):
                with pytest.raises(UsageError, match=message):
                    paceline.push("w", bad)
        paceline.barrier()
        if worker.rank == 1:
            with pytest.raises(Refused, match=r"\(3,\) here and .* \(2,\) there"):
                paceline.push("w", torch.ones(3))
        assert paceline.pull("w").tolist() == [1.0, 1.0]

    run_job(tmp_path, work, workers=2)


def test_a_name_without_a_push_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    slow = pytest.raises(DeadlineExceeded, match="the first push to 'nothing'")
    with job(tmp_path) as started, started.join(0) as worker, slow:
        worker.node.waits.set_timeout(0.3)
        worker.named.pull("nothing")
