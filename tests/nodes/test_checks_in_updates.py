"""A server looks for NaN in large pushes as it adds them: what it then takes out again is as if it had never come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distant import push_to_read
from tests.nodes.cluster import read_values, table
from tests.nodes.test_faults import NUM_WORKERS
from tests.nodes.test_successors import KillableServer, Killed, killable
from torch import Tensor, nn

from paceline.core.events import NotFinite
from paceline.update.lasting import ChunkMemory, ShardMemory, UpdateProgress
from paceline.update.named_rules import SGD
from paceline.update.shard import Shard
from paceline.wire.requests import AwaitValues, Initialise
from paceline.worker.dense import DenseClient
from paceline.worker.node import WorkerNode
from paceline.worker.pushes import PushOutcome

SIZE, NUM_CLOCKS = 257, 15
# By clock and worker. A trial needs an update of the same workers before it, and one more before the first.
BAD = {5: {1: torch.nan}, 8: dict.fromkeys(range(NUM_WORKERS), -torch.inf), 11: {0: torch.inf}}


def gradient_of(rank: int, clock: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * clock + rank)
    gradient = torch.randn(SIZE, generator=generator)
    if clock == NUM_CLOCKS - 1:
        gradient[7] = 3e38  # finite, though the sum is not
    if rank in BAD.get(clock, {}):
        gradient[SIZE - 2] = BAD[clock][rank]
    return gradient


def expected() -> Tensor:
    value = nn.Parameter(torch.linspace(-1, 1, SIZE))
    optimizer = torch.optim.SGD([value], lr=0.1, momentum=0.9, foreach=False)
    for clock in range(NUM_CLOCKS):
        ranks = [rank for rank in range(NUM_WORKERS) if rank not in BAD.get(clock, {})]
        if ranks:
            total = gradient_of(ranks[0], clock)
            for rank in ranks[1:]:
                total += gradient_of(rank, clock)
            value.grad = total / len(ranks)
            optimizer.step()
    return value.detach()


class Trained:
    """What workers end with, and how their pushes ended."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.outcomes: dict[int, list[PushOutcome]] = {}

    def work(self, node: WorkerNode) -> None:
        spec, rank = (
            table("model", SIZE, "bsp", rule=SGD(lr=0.1, momentum=0.9), scale="mean"),
            node.settings.sender.worker,
        )
        client = DenseClient.open(node.context, spec, live=True)
        if rank == 0:
            first = memoryview(torch.linspace(-1, 1, SIZE).numpy()).cast("B")
            node.rpc.call_all(lambda number: Initialise(number, "model"), "initialise", [first])
        node.rpc.call_all(lambda number: AwaitValues(number, "model"), "first values")
        pushed, seen = [], torch.empty(SIZE)
        for clock in range(NUM_CLOCKS):
            pushed.append(push_to_read(client, gradient_of(rank, clock), count=1.0, ends_clock=True))
            node.tick()
            read_values(node, "model", seen, refresh=True)
        self.values[rank] = seen
        self.outcomes[rank] = [each.result(timeout=60) for each in pushed]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Check pushes of any size in updates, and save ahead before the next comes; return how trials ended."""
    monkeypatch.setattr("paceline.worker.dense._MOST_STEP_BYTES", 0)
    monkeypatch.setattr("paceline.update.lasting._LEAST_AHEAD_BYTES", 0)
    monkeypatch.setattr("paceline.update.lasting.CHUNK", 128)
    monkeypatch.setattr("paceline.update.chunked.CHUNK", 128)

    def saving_at_once(memory: ShardMemory, chunks: Any) -> Callable[[], object]:
        return partial(memory.progress.save_ahead, chunks, memory.progress.epoch)

    monkeypatch.setattr(ShardMemory, "saving", saving_at_once)
    ended: list[bool] = []
    begin, end = UpdateProgress.begin_trial, UpdateProgress.end_trial

    def beginning(progress: UpdateProgress, *args: Any) -> bool:
        ended.append(True)
        return begin(progress, *args) or not ended.pop()

    def ending(progress: UpdateProgress, update: int, *args: Any) -> None:
        if progress.is_tried(update):
            ended[-1:] = [False]
        end(progress, update, *args)

    monkeypatch.setattr(UpdateProgress, "begin_trial", beginning)
    monkeypatch.setattr(UpdateProgress, "end_trial", ending)
    return ended


def require_promised(trained: Trained) -> None:
    wanted = expected()
    for rank in range(NUM_WORKERS):
        assert torch.equal(trained.values[rank].nan_to_num(7), wanted.nan_to_num(7)), rank
        refused = [clock for clock, outcome in enumerate(trained.outcomes[rank]) if not outcome.applied]
        assert refused == [clock for clock, bad in BAD.items() if rank in bad]
        assert all(
            outcome.reason.startswith("1 of 257 elements of the gradient for table 'model' are NaN or infinite; it was")
            for outcome in trained.outcomes[rank]
            if not outcome.applied
        )


def test_a_push_that_is_not_finite_is_left_out_with_all_that_it_had_changed(trials: list[bool], tmp_path: Path) -> None:
    trained = Trained()
    with killable("shm", tmp_path, (0,)) as (servers, _):
        servers.run(NUM_WORKERS, trained.work)
    require_promised(trained)
    assert trials.count(False) == len(BAD) + 1
    assert trials.count(True) > 3


@dataclass
class Kill:
    """Ends the server at a call of a method, once; counts only calls that `counts`."""

    owner: type
    name: str
    number: int
    is_before: bool
    counts: Callable[..., bool] = lambda *_: True
    num_calls: int = 0
    is_done: bool = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = getattr(self.owner, self.name)

        def wrapped(*args: Any, **named: Any) -> Any:
            is_due = self.counts(*args)
            self.num_calls += is_due
            is_due = is_due and self.num_calls == self.number
            if is_due and self.is_before:
                self.is_done = True
                raise Killed
            result = call(*args, **named)
            if is_due:
                self.is_done = True
                raise Killed
            return result

        monkeypatch.setattr(self.owner, self.name, wrapped)


def is_trial(progress: UpdateProgress, update: int, *_: object) -> bool:
    return progress.is_tried(update)


def says_not_finite(_: KillableServer, written: object, *__: object) -> bool:
    return isinstance(written, NotFinite)


def test_a_server_that_is_killed_anywhere_in_a_trial_leaves_out_the_same(
    trials: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [
        Kill(UpdateProgress, "begin_trial", 2, is_before=False),
        Kill(UpdateProgress, "finish", 2, is_before=False, counts=is_trial),
        Kill(ChunkMemory, "copy_from", 2, is_before=True),  # in the middle of taking a trial back
        Kill(UpdateProgress, "end_trial", 2, is_before=True, counts=is_trial),
        Kill(UpdateProgress, "end_trial", 4, is_before=False, counts=is_trial),
        Kill(KillableServer, "_write_down", 1, is_before=True, counts=says_not_finite),
        Kill(KillableServer, "_write_down", 3, is_before=False, counts=says_not_finite),
        Kill(Shard, "pass_over", 1, is_before=True),
        Kill(Shard, "pass_over", 2, is_before=False),
    ]
    for kill in kills:
        kill.install(monkeypatch)
    trained = Trained()
    with killable("shm", tmp_path, (0,)) as (servers, _):
        servers.run(NUM_WORKERS, trained.work)
    require_promised(trained)
    assert [kill for kill in kills if not kill.is_done] == []
    assert trials != []


def test_without_memory_that_outlives_the_server_pushes_are_looked_at_as_they_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trials: list[bool]
) -> None:
    monkeypatch.setattr(ShardMemory, "__init__", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "none")))
    trained = Trained()
    with killable("shm", tmp_path, (0,)) as (servers, _):
        servers.run(NUM_WORKERS, trained.work)
    require_promised(trained)
    assert trials == []
