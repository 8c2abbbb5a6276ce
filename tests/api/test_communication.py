"""Every call of the loop that talks to servers is counted as communication of the clock under way."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job

import paceline
from paceline.api.session import Session
from paceline.observe.runs import read_run
from paceline.worker.table import Table

ADD = paceline.update.Add()
Call = Callable[[Session, Table], object]


@pytest.mark.parametrize(
    "call",
    [
        lambda _, w: w.push([1.0, 2.0]),
        lambda _, w: w.pull(),
        lambda _, w: w.pull(refresh=False),
        lambda _, w: w.pull(exact=True),
        lambda _, w: w.view(),
        lambda _, w: w.finish_read(w.start_read(), lambda cache: None),
        lambda ps, _: ps.clock(),
    ],
    ids=["push", "pull", "cached", "exact", "view", "later", "clock"],
)
def test_a_call_is_communication(tmp_path: Path, call: Call) -> None:
    def work(ps: Session) -> tuple[float, float]:
        w = ps.table("w", shape=(2,), update=ADD, view=True)
        before_s = ps.metrics.comm_s
        call(ps, w)
        return before_s, ps.metrics.comm_s

    [(before_s, after_s)] = run_job(tmp_path, work, carrier="shm")
    assert before_s == 0.0 < after_s


def test_a_barrier_is_communication_once_the_training_has_begun(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[float, float]:
        ps.barrier()
        before_s = ps.metrics.comm_s
        ps.clock()
        clock_s = ps.metrics.comm_s
        ps.barrier()
        return before_s, ps.metrics.comm_s - clock_s

    [(before_s, barrier_s)] = run_job(tmp_path, work)
    assert before_s == 0.0 < barrier_s


def test_a_step_is_longer_than_its_communication_which_contains_the_waiting(tmp_path: Path) -> None:
    num_clocks = 5

    def work(ps: Session) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=0.1), consistency="bsp")
        for _ in range(num_clocks):
            weight.grad = torch.ones(3)
            optimizer.step()

    run_job(tmp_path, work, workers=2)
    steps = read_run(tmp_path).steps
    assert len(steps) == 2 * num_clocks
    assert all(0.0 <= step.wait_s <= step.comm_s <= step.step_s for step in steps)
    assert all(step.comm_s > 0.0 for step in steps)
