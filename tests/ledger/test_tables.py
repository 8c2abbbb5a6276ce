"""A ledger over real nodes: every acknowledged push counts once, at every place of every table, on both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distant import make_distant, push_to_read
from tests.ledger.pairs import Choice, all_of, name_of, pairwise
from tests.ledger.tables import CARRIERS, KINDS, NAMED, NUM_WORKERS, POLICIES, SIZES, Cell, Counting, Ledger
from tests.nodes.cluster import cluster, counts_of

from paceline.transport import FaultPlan
from paceline.worker.dense import DenseClient

AXES: dict[str, Any] = {
    "carrier": CARRIERS,
    "policy": POLICIES,
    "kind": KINDS,
    "size_bytes": SIZES,
    "num_servers": (1, 3),
    "num_tables": (1, 2),
}
QUICK_SIZES = (1 << 10, (16 << 10) + 4, (64 << 10) + 4, (256 << 10) - 4, 256 << 10, (2 << 20) + 4)
LARGEST = {"size_bytes": SIZES[-2:], "num_servers": (1,), "num_tables": (1,)}  # seconds each
# By the name under which they are counted: what befalls one frame in seven.
FAULTS = {
    "dropped": FaultPlan(drop=0.15),
    "duplicated": FaultPlan(duplicate=0.15),
    "delayed": FaultPlan(delay=0.15, delay_s=(0.001, 0.005)),
    "reordered": FaultPlan(reorder=0.15, delay_s=(0.001, 0.005)),
    "cut": FaultPlan(cut=0.15),
}
WITH_FAULTS = AXES | {"size_bytes": (1 << 10, (64 << 10) + 4, 256 << 10), "fault": tuple(FAULTS)}


def run(choice: Choice, directory: Path, seed: int = 0) -> None:
    fault = str(choice.get("fault", ""))
    cell = Cell(**{axis: choice[axis] for axis in AXES})  # pyright: ignore[reportArgumentType]
    ledger, counting = Ledger(cell), [Counting() for _ in range(cell.num_servers)]
    with cluster(
        cell.carrier,
        directory,
        num_workers=NUM_WORKERS,
        num_servers=cell.num_servers,
        plan=FAULTS.get(fault),
        seed=seed,
        retry_s=cell.retry_s,
        traces=counting,
    ) as servers:
        servers.run(NUM_WORKERS, ledger.work)
        ledger.check(servers, counting)
        assert not fault or getattr(counts_of(servers.transport), fault) > 0


@pytest.mark.parametrize("choice", pairwise(AXES | {"size_bytes": QUICK_SIZES}), ids=name_of)
def test_every_acknowledged_push_counts_once(choice: Choice, tmp_path: Path) -> None:
    run(choice, tmp_path)


@pytest.mark.parametrize("choice", pairwise(WITH_FAULTS | {"policy": NAMED}), ids=name_of)
def test_every_acknowledged_push_counts_once_whatever_happens_to_frames(choice: Choice, tmp_path: Path) -> None:
    run(choice, tmp_path)


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_every_acknowledged_push_counts_once_where_values_leave_ahead_of_their_clock(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_early(monkeypatch, tmp_path, 1 << 10, fault)


@pytest.mark.parametrize("fault", ["", "dropped", "cut"])
def test_every_acknowledged_push_counts_once_where_large_tables_leave_in_pieces(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_early(monkeypatch, tmp_path, (256 << 10) + 4, fault)


@pytest.mark.campaign
@pytest.mark.parametrize("fault", ["", *FAULTS])
@pytest.mark.parametrize("size_bytes", [size for size in SIZES if size > 256 << 10])
def test_every_acknowledged_push_counts_once_in_all_sizes_that_leave_in_pieces(
    size_bytes: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_early(monkeypatch, tmp_path, size_bytes, fault)


def run_early(monkeypatch: pytest.MonkeyPatch, folder: Path, size_bytes: int, fault: str) -> None:
    make_distant(monkeypatch, small=size_bytes <= 1 << 10)
    monkeypatch.setattr(DenseClient, "push", push_to_read)
    place = {"carrier": "tcp", "policy": "bsp", "kind": "dense", "size_bytes": size_bytes, "fault": fault}
    run(place | {"num_servers": 2, "num_tables": 2}, folder)


@pytest.mark.campaign
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_combination(carrier: str, policy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    here = AXES | {"carrier": (carrier,), "policy": (policy,)}
    for choice in all_of(here | {"size_bytes": SIZES[:-2]}) + all_of(here | LARGEST):
        run(choice, tmp_path_factory.mktemp("cell"))


@pytest.mark.campaign
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_combination_with_faults(carrier: str, policy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for choice in all_of(WITH_FAULTS | {"carrier": (carrier,), "policy": (policy,), "num_tables": (2,)}):
        run(choice, tmp_path_factory.mktemp("cell"), seed=1)
