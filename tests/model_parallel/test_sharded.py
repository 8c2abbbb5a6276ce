"""Fully sharded models: workers that keep slices learn what one process does with every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.faults.running import run_to_end, went_on_without
from tests.jobs import run_job
from torch import nn

import paceline
from paceline.api.session import Session
from paceline.errors import EXIT_LOST, UsageError

SCRIPTS = Path(__file__).with_name("scripts")


def test_the_launcher_can_say_fsdp_learning_is_that_of_one_process_and_a_dead_worker_is_named(tmp_path: Path) -> None:
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "fsdp.py", options=("-n", "2", "--strategy", "fsdp"))

    assert code == EXIT_LOST, run.output
    assert "Traceback" not in run.output
    assert run.told() == went_on_without("worker 1", needs_all="fsdp")
    assert len(run.saying("passed ")) == 2 * 14 + 1, run.output


def test_groups_that_keep_slices_learn_together_what_one_process_learns(tmp_path: Path) -> None:
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "hybrid.py", options=("-n", "4"))

    assert code == EXIT_LOST, run.output
    assert "Traceback" not in run.output
    assert run.told() == went_on_without("worker 3")
    assert len(run.saying("passed ")) == 4 * 8 - 1, run.output
    assert len(run.saying("no worker of this group pushed it")) == 1, run.output  # by the first worker of the group
    assert len(run.saying("each group of workers clips the mean of its own gradients")) == 4, run.output


def test_workers_that_are_threads_are_refused(tmp_path: Path) -> None:
    def work(_: Session) -> str:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="run with `paceline run --transport shm` or tcp") as refused:
            paceline.distributed(optimizer, strategy=paceline.strategies.fsdp(), model=model)
        return str(refused.value)

    assert "fsdp" in run_job(tmp_path, work)[0]
