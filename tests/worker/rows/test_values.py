"""What row tables hold and hand out: the values of a plain model, for any ids, rows and policies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.nodes.cluster import CARRIERS, Work, cluster
from tests.worker.rows.tables import open_rows, rows_of, stored

from paceline.errors import UsageError
from paceline.update.named_rules import SGD
from paceline.worker.node import WorkerNode
from paceline.worker.rows.state import CacheOptions
from paceline.worker.validation import row_ids

POLICIES = ("bsp", "ssp:0", "ssp:2", "essp:1", "asynchronous", "bound=1,visible=on_clock,deliver=on_clock")
NUM_WORKERS, NUM_CLOCKS, NUM_IDS = 2, 4, 12
IDS = (torch.arange(NUM_IDS) - 5) * 1_000_003


def gradient(worker: int, clock: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a worker pushes at a clock: ids that repeat, and whole numbers, whose sums are exact in any order."""
    dice = torch.Generator().manual_seed(100 * worker + clock)
    ids = IDS[torch.randint(NUM_IDS, (9,), generator=dice)]
    return ids, torch.randint(-8, 8, (9, 2), generator=dice).double()


def plain_model(scale: float) -> torch.Tensor:
    values = torch.zeros(NUM_IDS, 2, dtype=torch.float64)
    for worker in range(NUM_WORKERS):
        for clock in range(NUM_CLOCKS):
            ids, rows = gradient(worker, clock)
            for row, change in zip(ids.tolist(), rows, strict=True):
                values[IDS.tolist().index(row)] += scale * change
    return values


def train(policy: str, keep: bool | None, problems: list[str]) -> Work:
    spec = rows_of(consistency=policy, rule=SGD(lr=0.5))

    def work(node: WorkerNode) -> None:
        table = open_rows(node, spec, CacheOptions(keep))
        for clock in range(NUM_CLOCKS):
            later = table.pull_later(IDS, ahead=1)
            table.push(*gradient(node.settings.sender.worker, clock))
            node.tick()
            if not torch.equal(table.pull(IDS, exact=True), later.result()) and policy == "bsp":
                problems.append(f"clock {clock}: a read for later shows another clock")
        if not torch.equal(table.pull(IDS, exact=True), plain_model(-0.5)):
            problems.append(f"worker {node.settings.sender.worker} ends with {table.pull(IDS)}")

    return work


@pytest.mark.parametrize("policy", POLICIES)
def test_all_end_with_the_values_of_a_plain_model(policy: str, tmp_path: Path) -> None:
    problems = list[str]()
    for number, (keep, num_servers) in enumerate((k, s) for k in (True, None) for s in (1, 3)):
        kind = CARRIERS[(number + POLICIES.index(policy)) % 3]
        folder = tmp_path / str(number)
        folder.mkdir()
        with cluster(kind, folder, num_workers=NUM_WORKERS, num_servers=num_servers) as servers:
            servers.run(NUM_WORKERS, train(policy, keep, problems))
            assert torch.equal(stored(servers, IDS), plain_model(-0.5))
    assert problems == []


def test_ids_may_repeat_be_negative_huge_and_in_any_order_and_shape(tmp_path: Path) -> None:
    huge = 2**63 - 1
    with cluster("memory", tmp_path, num_workers=1, num_servers=3) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of())
        table.push([huge, -1, -(2**63), huge, 0], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [10.0, 20.0], [7.0, 8.0]])
        asked = torch.tensor([[0, huge], [-(2**63), -1], [huge, 12]])
        assert table.pull(asked).tolist() == [
            [[7.0, 8.0], [11.0, 22.0]],
            [[5.0, 6.0], [3.0, 4.0]],
            [[11.0, 22.0], [0.0, 0.0]],
        ]
        assert table.pull(np.array([-1], dtype=np.int16)).tolist() == [[3.0, 4.0]]
        assert table.pull(torch.tensor(0)).tolist() == [7.0, 8.0]


def test_nothing_may_be_pulled_and_pushed(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of())
        assert table.pull([]).shape == (0, 2)
        assert table.pull(torch.empty(3, 0, dtype=torch.int64)).shape == (3, 0, 2)
        assert table.push([], []).result(timeout=30).applied
        assert table.push(torch.empty(0), torch.empty(0, 2)).result(timeout=30).applied
        assert table.flush().result(timeout=30).applied


def test_ids_that_are_no_integers_of_64_bits_are_refused(tmp_path: Path) -> None:
    wrong: list[Any] = [[1.5], torch.ones(2), np.ones(2), torch.tensor([True]), np.array([True]), [True]]
    wrong += [[2**63], [-1, 2**63], ["a"], [[1], [2, 3]], [None], np.array([1], dtype=object)]
    wrong += [np.ma.masked_equal([1, 2], 2)]
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of())
        for ids in wrong:
            with pytest.raises(UsageError, match="table 'r', worker 0, clock 0: ids are"):
                table.pull(ids)
            with pytest.raises(UsageError, match="ids are"):
                table.push(ids, [[1.0, 1.0]])


def test_unsigned_ids_that_do_not_fit_are_refused_with_the_number_and_a_way_out() -> None:
    for ids in (np.array([1, 2**63], dtype=np.uint64), torch.tensor([1, 2**63], dtype=torch.uint64)):
        with pytest.raises(UsageError, match=r"here: ids are signed 64-bit .* 9223372036854775808 is above .*view\("):
            row_ids(ids, "here")


ACCEPTED: list[Any] = [
    np.arange(10)[::-1],
    np.arange(20).reshape(2, 10)[:, ::3],
    np.arange(6).reshape(2, 3).T,
    np.broadcast_to(np.int64(3), (2, 2)),
    np.array(7),
    np.arange(4).astype(">i4"),
    np.frombuffer(bytes(16), dtype=np.int32),
    *(np.array([0, 1, 100], dtype=f"{sign}{size}") for sign in "iu" for size in (1, 2, 4, 8)),
    np.array([2**63 - 1, 0], dtype=np.uint64),
    torch.tensor([2**63 - 1, 0], dtype=torch.uint64),
    *(torch.tensor([0, 1, 100], dtype=dtype) for dtype in (torch.uint32, torch.uint16, torch.int8, torch.int32)),
    torch.arange(12).view(4, 3)[:, 0],
    torch.arange(12).view(4, 3).t(),
    torch.tensor(5),
    range(4),
    (3, -1),
    [np.int64(4), 5],
    [],
    np.zeros((0, 3)),
]


@pytest.mark.parametrize("ids", ACCEPTED, ids=repr)
def test_integers_of_any_type_and_layout_are_ids(ids: Any) -> None:
    keys = row_ids(ids, "here")
    expected = np.asarray(ids if not isinstance(ids, torch.Tensor) else ids.to(torch.int64).numpy())
    assert keys.is_contiguous()
    assert keys.dtype == torch.int64
    assert keys.shape == expected.shape
    assert keys.tolist() == expected.tolist()


def test_rows_of_another_shape_or_of_no_numbers_are_refused(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of())
        for rows in (
            [[1.0]],
            [[1.0, 2.0, 3.0]],
            [1.0, 2.0],
            [[1.0, 2.0], [3.0, 4.0]],
            [["a", "b"]],
            [[1.0], [1.0, 2.0]],
        ):
            with pytest.raises(UsageError, match=r"table 'r', worker 0, clock 0: .*rows"):
                table.push([1], rows)  # type: ignore[arg-type]
        table.push([1], np.array([[1, 2]], dtype=np.int8))  # other numbers are converted
        assert table.pull([1]).tolist() == [[1.0, 2.0]]


def test_rows_that_are_not_finite_are_what_the_table_says(tmp_path: Path) -> None:
    rows, ids = [[1.0, float("nan")], [float("inf"), 2.0]], [1, 2]
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        reject, zero, halt, ignore = (
            open_rows(node, rows_of(name, nonfinite=name)) for name in ("reject", "zero", "halt", "ignore")
        )
        outcome = reject.push(ids, rows).result(timeout=30)
        assert (outcome.applied, reject.pull(ids).tolist()) == (False, [[0.0, 0.0], [0.0, 0.0]])
        assert "2 of 4 elements" in outcome.reason
        assert zero.push(ids, rows).result(timeout=30).applied
        assert zero.pull(ids).tolist() == [[1.0, 0.0], [0.0, 2.0]]
        with pytest.raises(UsageError, match="worker 0, clock 0: 2 of 4 elements"):
            halt.push(ids, rows)
        assert ignore.push(ids, rows).result(timeout=30).applied
        assert ignore.pull(ids).isfinite().tolist() == [[True, False], [False, True]]


def test_rows_that_are_handed_out_and_in_are_memory_of_their_owners(tmp_path: Path) -> None:
    """Under bsp a push waits on the server while its worker goes on to use the memory it came from."""
    for keep in (None, True):
        folder = tmp_path / str(keep)
        folder.mkdir()
        with cluster("memory", folder, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
            table = open_rows(node, rows_of(consistency="bsp"), CacheOptions(keep))
            ids, rows = torch.tensor([1, 2]), torch.ones(2, 2, dtype=torch.float64)
            table.push(ids, rows)
            rows.fill_(100.0)
            ids.fill_(7)
            node.tick()
            read = table.pull([1, 2, 7])
            assert read.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
            read.fill_(50.0)
            assert table.pull([1, 2, 7]).tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("keep", [None, True])
@pytest.mark.parametrize("ids", [[1, 2], [1, 2, 1]])
def test_a_later_read_gives_the_same_rows_each_time_in_memory_of_their_own(
    keep: bool | None, ids: list[int], tmp_path: Path
) -> None:
    with cluster("memory", tmp_path, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
        table = open_rows(node, rows_of(consistency="bsp"), CacheOptions(keep))
        table.push([1], [[5.0, 5.0]])
        node.tick()
        later = table.pull_later(ids)
        first, second = later.result(), later.result()
        first.fill_(9.0)
        assert second.tolist() == later.result().tolist() == [[5.0 * (key == 1)] * 2 for key in ids]


def test_hyperparameters_reach_every_server_however_few_rows_came_with_them(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1, num_servers=3) as servers, servers.joined(0) as node:
        spec = rows_of(rule=SGD(lr=1.0))
        table, ids = open_rows(node, spec, CacheOptions(keep=True)), torch.arange(20)
        table.pull(ids)
        table.push([0], [[0.0, 0.0]], hyper=({**spec.rule.groups[0], "lr": 0.25},))
        table.push(ids, torch.ones(20, 2)).result(timeout=30)
        assert torch.equal(table.pull(ids), torch.full((20, 2), -0.25, dtype=torch.float64)), "as this worker sees it"
        assert torch.equal(stored(servers, ids), torch.full((20, 2), -0.25, dtype=torch.float64))
