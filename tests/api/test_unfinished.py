"""What a worker says that leaves, or goes on and on, in a clock that it does not finish."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline
from paceline.api.session import Session
from paceline.update.filters import Cast, TopK
from paceline.update.rows.spec import FilterSpec
from paceline.worker import metrics as metrics


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_held_pushes_of_tables_and_rows_are_told_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with paceline.connect() as ps:
        add = paceline.update.Add()
        w, users = ps.table("w", shape=(2,), update=add), ps.table("users", rows=1, update=add)
        ps.clock()
        for _ in range(3):
            w.push([1.0, 2.0])
        users.push([7], [[1.0]])
    [line] = told(capsys)
    assert line.startswith(
        "paceline: worker 0 leaves in the middle of clock 1 with 3 pushes of table 'w' and 1 push of table 'users': "
        "they take effect only now, all in one clock, and no read of this worker has seen them. Call clock() once"
    )


def test_one_of_a_kind_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    with paceline.connect() as ps:
        paceline.init(ps)
        ps.table("w", shape=(2,), update=paceline.update.Add()).push([1.0, 2.0])
        paceline.Embedding(10, 2, name="words", update=paceline.update.SGD(lr=0.1))(torch.tensor([1])).sum().backward()
    push, gradient = told(capsys)
    assert "with 1 push of table 'w': it takes effect only now, and no read of this worker has seen it." in push
    assert "with 1 gradient of embedding 'words' that was never pushed: it is lost." in gradient


@pytest.mark.parametrize("consistency", ["bsp", "asynchronous"])
def test_gradients_of_embeddings_are_told_as_lost(capsys: pytest.CaptureFixture[str], consistency: str) -> None:
    with paceline.connect() as ps:
        paceline.init(ps)
        layer = paceline.Embedding(10, 2, name="words", update=paceline.update.SGD(lr=0.1), consistency=consistency)
        for _ in range(2):
            layer(torch.tensor([1, 2])).sum().backward()
    [line] = told(capsys)
    assert line.startswith(
        "paceline: worker 0 leaves in the middle of clock 0 with 2 gradients of embedding 'words' that were never "
        "pushed: they are lost. Call clock() once a step"
    )


def finish_the_clock(ps: Session) -> None:
    ps.table("w", shape=(1,), update=paceline.update.Add()).push([1.0])
    ps.clock()


def push_on_arrival(ps: Session) -> None:
    ps.table("w", shape=(1,), update=paceline.update.Add(), consistency="asynchronous").push([1.0])


@pytest.mark.parametrize("work", [finish_the_clock, push_on_arrival])
def test_nothing_is_told_where_nothing_waits(
    capsys: pytest.CaptureFixture[str], work: Callable[[Session], None]
) -> None:
    with paceline.connect() as ps:
        work(ps)
    assert told(capsys) == []


def test_a_script_that_fails_says_only_why(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with paceline.connect() as ps:
            ps.table("w", shape=(1,), update=paceline.update.Add()).push([1.0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert told(capsys) == []


def test_a_clock_that_goes_on_and_on_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MANY_PUSHES", 10)
    with paceline.connect() as ps:
        w = ps.table("w", shape=(1,), update=paceline.update.Add())
        fast = ps.table("fast", shape=(1,), update=paceline.update.Add(), consistency="asynchronous")
        for table in (w, fast):
            for _ in range(12):
                table.push([1.0])
        [line] = told(capsys)
        assert line.startswith(
            "paceline: worker 0 has made 10 pushes of table 'w' in clock 0 and has not finished that clock: until then "
            "no read sees them, and they take memory. Call clock() once a step"
        )
        ps.clock()
        w.push([1.0])
        ps.clock()
        assert told(capsys) == []


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        (paceline.strategies.downpour(push_every=4), 4),
        (paceline.strategies.local_sgd(3), 3),
        (paceline.strategies.diloco(4), 4),
    ],
)
@pytest.mark.parametrize("num_steps", [1, 5, 12])
def test_steps_that_were_never_pushed_are_told(
    capsys: pytest.CaptureFixture[str], strategy: Any, every: int, num_steps: int
) -> None:
    with paceline.connect() as ps:
        paceline.init(ps)
        model = torch.nn.Linear(2, 1)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, name="net")
        for _ in range(num_steps):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        del optimizer  # the script may have dropped it
    left = num_steps % every
    assert [re.split(" that (was|were) never pushed", line)[0] for line in told(capsys)] == (
        [f"paceline: worker 0 leaves at clock {num_steps} with {left} step{'s' * (left > 1)} of 'net'"] if left else []
    )


def leave_with_rows(*filters: FilterSpec) -> None:
    with paceline.connect() as ps:
        table = ps.table("t", rows=1, update=paceline.update.Add(), consistency="ssp:1", filters=filters)
        table.push([0, 1, 2, 3], [[4.1], [3.1], [2.1], [1.1]])
        ps.clock()


def test_rows_that_filters_keep_back_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    leave_with_rows(TopK(0.25), Cast("bfloat16"))
    assert told(capsys) == [
        "paceline: worker 0 leaves at clock 1 with 3 rows of table 't' that filters keep back: the servers do not have "
        "them. Call table.flush() and clock() before the end."
    ]


def test_mere_rounding_errors_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    leave_with_rows(Cast("bfloat16"))
    leave_with_rows(TopK(1.0))
    assert told(capsys) == []


def test_rows_that_were_flushed_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with paceline.connect() as ps:
        table = ps.table("t", rows=1, update=paceline.update.Add(), filters=(TopK(0.5), Cast("bfloat16")))
        table.push([0, 1], [[4.1], [3.1]])
        ps.clock()
        table.flush()
        ps.clock()
    assert told(capsys) == []


def test_a_preempted_worker_tells_the_rows_that_go_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        with paceline.connect() as ps:
            table = ps.table("t", rows=1, update=paceline.update.Add(), filters=(TopK(0.5),))
            table.push([0, 1], [[4.0], [3.0]])
            signal.raise_signal(signal.SIGTERM)
            ps.clock()

    with pytest.raises(SystemExit):
        train()
    assert [line for line in told(capsys) if "leaves at clock 1 with 1 row of table 't' that filters keep back" in line]
