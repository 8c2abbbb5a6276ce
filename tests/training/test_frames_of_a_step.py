"""A step of a small model costs one frame each way where there is one server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.server.node import ServerNode
from paceline.worker.node import FrameHandler


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What arrives at the server and at the worker from here on."""
    seen: list[str] = []
    dispatch, process = ServerNode._dispatch, FrameHandler._process

    def at_server(node: ServerNode, hello: Any, connection: Any, message: object, frame: Any) -> None:
        seen.append(type(message).__name__)
        dispatch(node, hello, connection, message, frame)

    def at_worker(handler: FrameHandler, message: object, frame: Any) -> None:
        seen.append(type(message).__name__)
        process(handler, message, frame)

    monkeypatch.setattr(ServerNode, "_dispatch", at_server)
    monkeypatch.setattr(FrameHandler, "_process", at_worker)
    return seen


@pytest.fixture
def session(frames: list[str]) -> Iterator[paceline.Session]:
    with paceline.init() as made:
        made.node._periodic.stop()  # which sends what has waited long: on a busy machine, that may be soon
        yield made


def steps(model: nn.Module, frames: list[str], consistency: str) -> list[str]:
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.5), model=model, consistency=consistency)
    frames.clear()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert optimizer.num_refused == 0
    return frames


@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "asynchronous"])
@pytest.mark.usefixtures("session")
def test_a_step_of_a_small_model_is_one_frame_each_way(frames: list[str], consistency: str) -> None:
    assert steps(nn.Linear(3, 1), frames, consistency) == ["StepFrame", "Fetched"] * 3


@pytest.mark.usefixtures("session")
def test_values_of_steps_are_those_of_plain_torch(frames: list[str]) -> None:
    torch.manual_seed(3)
    model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    steps(model, frames, "bsp")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        plain(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, plain.weight)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "asynchronous"])
def test_buffers_travel_with_the_parameters(frames: list[str], consistency: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert steps(model, frames, consistency) == ["StepFrame", "Fetched", "Fetched"] * 3


def test_tables_of_a_script_share_frames_and_each_keeps_its_values(
    frames: list[str], session: paceline.Session
) -> None:
    sgd = paceline.update.SGD(lr=1.0)
    tables = [session.table(f"t{number}", shape=(number,), update=sgd, consistency="bsp") for number in range(1, 6)]
    frames.clear()
    for clock in range(3):
        values = session.pull(*tables)
        assert [found.tolist() for found in values] == [[-clock * table.shape[0]] * table.shape[0] for table in tables]
        for table in tables:
            table.push(torch.full(table.shape, float(table.shape[0])))
        session.clock()
    session.barrier()
    assert frames.count("StepFrame") == 6, "one for the values, one for the pushes and the clock"
    assert not {"PushFrame", "PullFrame", "Clock", "Held"} & set(frames)


def test_one_table_of_a_step_is_refused_and_the_others_are_not(session: paceline.Session) -> None:
    update = paceline.update.Add()
    tables = [session.table(name, shape=(2,), update=update, consistency="bsp", nonfinite="ignore") for name in "ab"]
    bad = session.table("bad", shape=(2,), update=paceline.update.SGD(lr=1.0), consistency="bsp")
    pushed = [tables[0].push([1.0, 2.0]), bad.push([1.0, 1.0], absent=(7,)), tables[1].push([3.0, 4.0])]
    session.clock()
    assert [found.tolist() for found in session.pull(*tables, bad)] == [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]
    assert [each.result(30.0).applied for each in pushed] == [True, False, True]


@pytest.mark.usefixtures("session")
def test_a_step_of_tables_that_is_too_large_for_one_frame_goes_in_parts(frames: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 1 << 14), nn.BatchNorm1d(1 << 14))
    found = steps(model, frames, "bsp")
    assert "StepFrame" not in found
    assert found.count("PushFrame") == 6


@pytest.mark.usefixtures("session")
def test_a_refused_gradient_is_told_and_the_next_step_counts(frames: list[str]) -> None:
    model = nn.Linear(3, 1)
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.5), consistency="bsp")
    before = model.weight.clone()
    for number in (float("nan"), 1.0):
        optimizer.zero_grad()
        (number * model(torch.ones(2, 3))).sum().backward()
        optimizer.step()
    assert optimizer.num_refused == 1
    assert torch.equal(model.weight, before - 1.0)  # 0.5 for each of two samples
    assert frames.count("StepFrame") == 1, "the worker does not send what is not finite"


def test_rows_that_were_pushed_travel_with_the_end_of_their_clock(frames: list[str], session: paceline.Session) -> None:
    sgd = paceline.update.SGD(lr=1.0)
    tables = [session.table(name, rows=2, update=sgd, consistency="bsp") for name in "ab"]
    dense = session.table("d", shape=(3,), update=sgd, consistency="bsp")
    ids = torch.tensor([7, -3])
    for clock in range(3):
        frames.clear()
        pushed = [tables[0].push(ids, torch.ones(2, 2)), dense.push(torch.ones(3))]
        pushed.append(tables[1].push(ids.flip(0), torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
        session.clock()
        values = [table.pull(ids).tolist() for table in tables]
        assert values == [
            [[-clock - 1.0] * 2] * 2,
            [[-3.0 * (clock + 1), -4.0 * (clock + 1)], [-clock - 1.0, -2.0 * (clock + 1)]],
        ]
        assert dense.pull().tolist() == [-clock - 1.0] * 3
        assert all(each.result(30.0).applied for each in pushed)
        assert frames.count("StepFrame") == 1
        assert not {"PushFrame", "RowPushFrame", "Clock", "Held"} & set(frames)


def test_rows_of_one_table_are_refused_and_those_of_others_in_their_message_are_not(session: paceline.Session) -> None:
    good = session.table("good", rows=2, update=paceline.update.SGD(lr=1.0), consistency="bsp")
    bad = session.table("bad", rows=2, update=paceline.update.SGD(lr=1.0), consistency="bsp")
    pushed = [
        good.push([1], [[1.0, 1.0]]),
        bad.push([1], [[1.0, 1.0]], hyper=({"lr": -1.0},)),
        good.push([1], [[3.0, 1.0]]),
    ]
    session.clock()
    assert good.pull([1]).tolist() == [[-2.0, -1.0]]
    assert bad.pull([1]).tolist() == [[0.0, 0.0]]
    assert [each.result(30.0).applied for each in pushed] == [True, False, True]


def test_many_pushes_go_in_as_few_messages_as_they_fit_into(frames: list[str], session: paceline.Session) -> None:
    ids, rows = torch.arange(1000), torch.ones(1000, 16)
    tables = [
        session.table(str(number), rows=16, update=paceline.update.Add(), consistency="bsp") for number in range(4)
    ]
    tables += [session.table("one", rows=16, update=paceline.update.Add(), consistency="bsp")]
    frames.clear()
    for table in tables[:4]:
        table.push(ids[:500], rows[:500])  # 36 KB
    tables[4].push(ids, rows)
    session.clock()
    assert all(torch.equal(table.pull(ids[:500]), rows[:500]) for table in tables)
    assert [frames.count(kind) for kind in ("StepFrame", "RowPushFrame")] == [2, 1], "halves, and halves of these"
    assert frames.count("Clock") == 1, "once the server has all of them"


def test_what_lies_between_the_bodies_of_pushes_counts(frames: list[str], session: paceline.Session) -> None:
    tables = [
        session.table(f"t{number}", rows=1, update=paceline.update.Add(), consistency="bsp") for number in range(21)
    ]
    frames.clear()
    for table, num_rows in zip(tables, (10900, *[1] * 20), strict=True):  # 32 bytes less than fit, in rows of 12
        table.push(torch.arange(num_rows), torch.ones(num_rows, 1))
    session.clock()
    assert all(table.pull([0]).item() == 1.0 for table in tables)
    assert [frames.count(kind) for kind in ("StepFrame", "RowPushFrame")] == [2, 0]
