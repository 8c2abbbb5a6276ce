"""Pushes with factors count once, whatever the network does to frames and wherever a server is killed."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nodes.cluster import cluster
from tests.nodes.test_faults import FAULTS, NUM_CLOCKS, NUM_WORKERS, Ledger, assert_faults_happened
from tests.nodes.test_successors import ServerPlace, killable
from torch import Tensor

from paceline.core.messages import Push
from paceline.server.connections import Incoming, said_by
from paceline.server.repeated_pushes import RepeatedPushes
from paceline.server.tables import ServedTables
from paceline.transport.base import Frame
from paceline.update.factors import Factors
from paceline.update.named_rules import Add
from paceline.update.table import Segment, TableSpec
from paceline.wire.messages import FactoredPush
from paceline.worker.dense import DenseClient
from paceline.worker.pushes import PushOutcome


def push_factors(client: DenseClient, gradient: Tensor, **settings: Any) -> Future[PushOutcome]:
    """Push a matrix with a single 1, as the factors that have a single 1 each."""
    assert client.factored is not None or client.send_factors()
    matrix, buffer = gradient.view(NUM_WORKERS, NUM_CLOCKS), client.reserve()
    buffer.gradient.copy_(gradient)
    factors = Factors(matrix.sum(1)[None], matrix.sum(0)[None])
    return client.push_reserved(buffer, factors={0: factors}, **settings).future


class FactoredLedger(Ledger):
    """A matrix with a row for each worker and a column for each clock."""

    def __init__(self, consistency: str) -> None:
        super().__init__(consistency)
        segments = (Segment("ledger", (NUM_WORKERS, NUM_CLOCKS)),)
        self.spec = TableSpec("ledger", segments, "float32", Add(), consistency, "sum", "reject")


@pytest.fixture
def num_expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each push with factors that a server has multiplied."""
    seen, expand = list[int](), ServedTables.expand

    def count(tables: ServedTables, push: FactoredPush, frame: Frame) -> Frame:
        seen.append(len(frame.body))
        return expand(tables, push, frame)

    monkeypatch.setattr(ServedTables, "expand", count)
    monkeypatch.setattr(DenseClient, "push", push_factors)
    return seen


@pytest.mark.parametrize("policy", ["bsp", "ssp:2", "asynchronous", "backup:1"])
def test_every_push_counts_once_whatever_happens_to_frames(
    policy: str, tmp_path: Path, num_expanded: list[int]
) -> None:
    ledger = FactoredLedger(policy)
    with cluster("tcp", tmp_path, num_workers=NUM_WORKERS, plan=FAULTS, seed=len(policy)) as servers:
        servers.run(NUM_WORKERS, ledger.work)
        assert torch.equal(servers.values("ledger"), ledger.expected())
        assert policy == "backup:1" or ledger.expected().all()
        assert servers.num_waiting() == 0
        assert_faults_happened(servers)
    assert len(num_expanded) >= NUM_WORKERS * NUM_CLOCKS
    assert set(num_expanded) == {4 * (NUM_WORKERS + NUM_CLOCKS)}


def has_noted_a_push(place: ServerPlace) -> bool:
    """Return whether a server has just written a push down, which its successor needs again."""
    return place.server is not None and isinstance(place.server.written, Push)


@pytest.mark.parametrize("policy", ["bsp", "ssp:2"])
def test_a_successor_takes_factors_again(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_expanded: list[int]
) -> None:
    taken, take = list[object](), RepeatedPushes._take

    def note(repeated: RepeatedPushes, item: Incoming) -> bool:
        found, is_taken = said_by(item, repeated.num_servers), take(repeated, item)
        if found is not None and isinstance(found[1], FactoredPush) and is_taken:
            taken.append(found[1])
        return is_taken

    monkeypatch.setattr(RepeatedPushes, "_take", note)
    ledger = FactoredLedger(policy)
    with killable("tcp", tmp_path, (0,)) as (servers, places):
        fate = places[0].fate
        fate.may_kill, fate.stride = partial(has_noted_a_push, places[0]), 61
        servers.run(NUM_WORKERS, ledger.work)
    assert ledger.expected().all()
    assert places[0].fate.num_kills > 1
    assert taken
    assert num_expanded
