"""Over a network, values come while gradients still leave: with the same bits, and of whole clocks alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distant import make_distant, push_to_read
from tests.jobs import DEADLINE_S, job, run_job
from tests.training.recipes import Recipe, accumulate, adam, mlp, one_batch, sgd
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.server.node import ServerNode
from paceline.wire.messages import PushPiece
from paceline.worker.dense import DenseClient, EarlyPart, PendingRead
from paceline.worker.node import FrameHandler
from paceline.worker.pushes import Outgoing

NUM_STEPS = 4
Trained = tuple[dict[str, Tensor], dict[str, Any]]  # values by name, and the state of the optimizer


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


@pytest.fixture(autouse=True)
def distant(monkeypatch: pytest.MonkeyPatch) -> None:
    make_distant(monkeypatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what servers and workers receive, by its class."""
    seen, dispatch, process = list[str](), ServerNode._dispatch, FrameHandler._process

    def count(node: ServerNode, hello: Any, connection: Any, message: object, frame: Any) -> None:
        seen.append(type(message).__name__)
        dispatch(node, hello, connection, message, frame)

    def note(handler: FrameHandler, message: object, frame: Any) -> None:
        seen.append(type(message).__name__)
        process(handler, message, frame)

    monkeypatch.setattr(ServerNode, "_dispatch", count)
    monkeypatch.setattr(FrameHandler, "_process", note)
    return seen


def train(worker: Session, make: Any, *, overlap: bool = False) -> Trained:
    model = mlp()
    optimizer = paceline.distributed(make(model), model=model, overlap=overlap, name=make.__name__)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        one_batch(model, worker.rank, step)
        optimizer.step()
    optimizer.wait_for_values()
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    worker.barrier()
    return values, optimizer.state_dict()


def train_alone(make: Any, num_workers: int) -> Trained:
    model = mlp()
    optimizer = make(model)
    for step in range(NUM_STEPS):
        accumulate(model, Recipe(optimizer=make), num_workers, step)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}, optimizer.state_dict()


def assert_same(found: Trained, alone: Trained) -> None:
    for name, values in alone[0].items():
        assert torch.equal(found[0][name], values), name
    for index, state in alone[1]["state"].items():
        for key, value in state.items():
            assert torch.equal(found[1]["state"][index][key], torch.as_tensor(value)), (index, key)


@pytest.mark.parametrize(("workers", "servers", "overlap"), [(3, 1, False), (2, 2, True)])
def test_steps_have_the_bits_and_the_state_of_plain_torch(
    tmp_path: Path, said: list[str], workers: int, servers: int, overlap: bool
) -> None:
    found = run_job(
        tmp_path,
        lambda worker: [train(worker, make, overlap=overlap) for make in (sgd, adam)],
        workers=workers,
        servers=servers,
        carrier="tcp",
    )
    for each in found:
        for make, got in zip((sgd, adam), each, strict=True):
            assert_same(got, train_alone(make, workers))
    assert said.count("FetchedRest") == 2 * NUM_STEPS * workers * servers
    assert said.count("EarlyValues") >= 2 * said.count("FetchedRest")


def test_a_rule_that_updates_whole_tensors_has_its_pushes_in_pieces_and_its_values_in_one(
    tmp_path: Path, said: list[str]
) -> None:
    (found,) = run_job(tmp_path, lambda worker: train(worker, adafactor), carrier="tcp")
    assert_same(found, train_alone(adafactor, 1))
    assert said.count("PushPiece")
    assert not said.count("EarlyValues")


class Dense:
    """A worker's table of 256 ones, which adds the mean of what is pushed to it, clock by clock."""

    def __init__(self, worker: Session) -> None:
        self.worker = worker
        rule = paceline.update.SGD(lr=1.0)
        self.table = worker.table("w", shape=(256,), update=rule, scale="mean", consistency="bsp", init=torch.ones(256))
        self.client = self.table.client

    def push(self, value: float) -> None:
        push_to_read(self.client, torch.full((256,), -value), count=1.0)

    def start_step(self, value: float) -> PendingRead:
        self.push(value)
        self.worker.clock()
        return self.table.start_read()

    def cached(self) -> set[float]:
        found: list[float] = []
        self.client.use_cache(lambda cache: found.extend(cache.readable().slice(0, 256).tolist()))
        return set(found)

    def wait_for_early_values(self, clock: int) -> None:
        """Wait until every server has sent values ahead of this clock."""
        lock, parts = self.client.context.lock, self.client._early
        with lock.changed:
            lock.wait(
                lambda: (
                    len(parts) == self.worker.node.num_servers
                    and all(part.clock == clock and part.num_bytes > 0 for part in parts.values())
                ),
                "early values",
            )


@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_dies_in_the_middle_of_its_push_is_in_nothing_of_the_clock(
    tmp_path: Path, servers: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = DenseClient._send_pieces

    def send_half(client: DenseClient, server: int, outgoing: Outgoing) -> None:
        push, body = outgoing.frame.push, outgoing.bodies[server]
        if (push.id.worker, push.clock) != (2, 1):
            send(client, server, outgoing)
            return
        for at in range(0, body.nbytes // 2, 64):
            client.context.send(server, PushPiece(outgoing.frame, at), body[at : at + 64])

    monkeypatch.setattr(DenseClient, "_send_pieces", send_half)
    seen = threading.Barrier(3, timeout=DEADLINE_S)
    with job(tmp_path, workers=3, servers=servers, carrier="tcp") as started:

        def work(worker: Session) -> list[float]:
            dense = Dense(worker)
            first = dense.table.finish_pull(dense.start_step(worker.rank + 1.0))
            assert set(first.tolist()) == {3.0}
            if worker.rank == 2:
                dense.push(3.0)
                seen.wait()
                started.kill(worker)
                return []
            read = dense.start_step(worker.rank + 1.0)
            dense.wait_for_early_values(1)
            assert dense.cached() == {3.0}
            seen.wait()
            found = [*dense.table.finish_pull(read).tolist()]
            return [*found, *dense.table.finish_pull(dense.start_step(1.0)).tolist()]

        found = started.run(work)
    assert found == [[4.5] * 256 + [5.5] * 256] * 2 + [[]]
    assert said.count("FetchedRest") == servers * (3 + 2)  # of the first clock and of the last


def test_values_of_which_some_were_lost_are_asked_for_again(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = EarlyPart.place
    monkeypatch.setattr(EarlyPart, "place", lambda part, clock, at, size: place(part, clock, at, size) if at else None)

    def work(worker: Session) -> list[float]:
        dense = Dense(worker)
        return [float(dense.table.finish_pull(dense.start_step(1.0)).unique()) for _ in range(3)]

    assert run_job(tmp_path, work, workers=2, carrier="tcp") == [[2.0, 3.0, 4.0]] * 2
    assert said.count("FetchedRest") == 6
    assert said.count("PullFrame") >= 12


@pytest.mark.parametrize("consistency", ["ssp:1", "asynchronous", "backup:1"])
def test_nothing_is_sent_ahead_where_workers_are_not_in_lockstep(
    tmp_path: Path, said: list[str], consistency: str
) -> None:
    def step(worker: Session) -> None:
        table = worker.table("w", shape=(256,), update=paceline.update.Add(), consistency=consistency)
        push_to_read(table.client, torch.ones(256), count=1.0)
        worker.clock()
        table.pull()

    run_job(tmp_path, step, carrier="tcp")
    assert not said.count("PushPiece") + said.count("EarlyValues")
