"""Each pattern against its definition, on dense and sparse tensors of every kind, over real process groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.collective.signature import MOVED_ALONE
from paceline.errors import UsageError

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


def tensor_of(rank: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 5)) -> Tensor:
    """What a worker has: small whole numbers, so that sums are exact in every dtype."""
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


def sparse_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A (6, 4) tensor with rows that other workers have too, and as many as the rank says; worker 0 has none."""
    rows = torch.arange(rank)
    return torch.sparse_coo_tensor(
        rows[None], torch.ones(rank, 4, dtype=dtype) * (rank + 1), (6, 4), check_invariants=False
    )


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_dense_patterns_give_what_they_are_defined_to_give(tmp_path: Path, num_workers: int) -> None:
    given = [tensor_of(rank) for rank in range(num_workers)]
    stacked = torch.stack(given)
    reductions = {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
        "product": stacked.prod(0),
    }

    def work(worker: Session) -> None:
        mine, last = tensor_of(worker.rank), num_workers - 1
        same(paceline.broadcast(mine, root=last), given[last])
        for op, expected in reductions.items():
            same(paceline.all_reduce(mine, op=op), expected)
            at_root = paceline.reduce(mine, root=last, op=op)
            assert (at_root is None) == (worker.rank != last)
            if at_root is not None:
                same(at_root, expected)
        for found, expected in zip(paceline.all_gather(mine), given, strict=True):
            same(found, expected)
        same(mine, given[worker.rank])  # what is given stays as it is

    run_job(tmp_path, work, workers=num_workers)


def test_every_dtype_shape_and_layout_comes_through(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        for dtype in DTYPES:
            both = [tensor_of(rank, dtype) for rank in range(2)]
            same(paceline.all_reduce(both[worker.rank]), both[0] + both[1])
            same(paceline.broadcast(both[worker.rank], root=1), both[1])
        for dtype in MOVED_ALONE:
            both = [tensor_of(rank, torch.int64).to(dtype) for rank in range(2)]
            assert paceline.broadcast(both[worker.rank], root=1).tolist() == both[1].tolist()
            assert [one.tolist() for one in paceline.all_gather(both[worker.rank])] == [one.tolist() for one in both]
            with pytest.raises(UsageError, match="convert it first"):
                paceline.all_reduce(both[worker.rank])
        flags = torch.tensor([True, worker.rank == 0])
        assert [flag.tolist() for flag in paceline.all_gather(flags)] == [[True, True], [True, False]]
        for shape in ((), (0,), (2, 0, 3), (1, 2, 1, 2)):
            own = tensor_of(worker.rank, torch.float32, shape)
            same(paceline.all_reduce(own), tensor_of(0, torch.float32, shape) + tensor_of(1, torch.float32, shape))
            assert [one.shape for one in paceline.all_gather(own)] == [own.shape] * 2
            assert paceline.broadcast(own).shape == own.shape
        turned = tensor_of(worker.rank).t()
        same(paceline.all_reduce(turned), (tensor_of(0) + tensor_of(1)).t())
        leaf = torch.ones(2, requires_grad=True)
        assert not paceline.all_reduce(leaf).requires_grad

    run_job(tmp_path, work, workers=2)


def test_half_precision_is_added_as_float32_and_rounded_once(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        return paceline.all_reduce(torch.tensor([[256.0, 1.0, 1.0][worker.rank]], dtype=torch.bfloat16))

    # One by one in bfloat16, 256 + 1 would be 256 each time.
    assert [found.item() for found in run_job(tmp_path, work, workers=3)] == [258.0] * 3


def test_sparse_patterns_give_what_they_are_defined_to_give(tmp_path: Path) -> None:
    given = [sparse_of(rank).to_dense() for rank in range(3)]
    total = torch.stack(given).sum(0)

    def work(worker: Session) -> None:
        mine = sparse_of(worker.rank)
        for op, expected in (("sum", total), ("mean", total / 3)):
            found = paceline.all_reduce(mine, op=op)
            assert found.is_sparse
            assert found.coalesce().indices().tolist() == [[0, 1]]  # only the rows that some worker has
            same(found.to_dense(), expected)
        at_root = paceline.reduce(mine, root=1)
        assert (at_root is None) == (worker.rank != 1)
        same(paceline.broadcast(mine, root=2).to_dense(), given[2])
        for found, expected in zip(paceline.all_gather(mine), given, strict=True):
            same(found.to_dense(), expected)
        half = paceline.all_reduce(sparse_of(worker.rank, torch.float16))
        assert half.dtype == torch.float16
        same(half.to_dense(), total.half())
        nothing = torch.sparse_coo_tensor(torch.zeros(2, 0), torch.zeros(0), (4, 4), check_invariants=False)
        same(paceline.all_reduce(nothing).to_dense(), torch.zeros(4, 4))

    run_job(tmp_path, work, workers=3)


def test_futures_end_in_order_and_with_what_was_given(tmp_path: Path) -> None:
    def work(worker: Session) -> list[float]:
        asked = [paceline.all_reduce(torch.full((2,), float(number)), later=True) for number in range(5)]
        gathered = paceline.all_gather(torch.tensor(worker.rank), later=True)
        assert [int(rank) for rank in paceline.wait(gathered)] == [0, 1]
        return [float(total[0]) for total in paceline.wait(*asked)]

    assert run_job(tmp_path, work, workers=2) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: paceline.broadcast(t, root=1), "root is worker 1, expected 0 to 0"),
        (lambda t: paceline.all_reduce(t > 0), "bool: convert it first"),
        (lambda t: paceline.all_reduce(t.long(), op="mean"), "int64: convert it first"),
        (lambda t: paceline.all_reduce(t, op="median"), "op 'median', expected one of sum"),
        (lambda t: paceline.all_reduce(t.to_sparse(), op="max"), "a sparse tensor, which has only sum and mean"),
        (lambda t: paceline.reduce(t, timeout_s=0.0), "timeout_s is 0"),
        (lambda t: paceline.all_gather(t.to_mkldnn()), "layout torch._mkldnn"),
        (lambda t: paceline.all_gather(t.view(*[1] * 11, 2, 2)), "with 13 dimensions"),
        (lambda t: paceline.wait(), "nothing to wait for"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(tmp_path, call, message) -> None:  # noqa: ANN001
    def work(worker: Session) -> None:
        with pytest.raises(UsageError, match=message):
            call(torch.ones(2, 2))
        same(paceline.all_reduce(torch.ones(1)), torch.ones(1))

    run_job(tmp_path, work, workers=1)


def test_views_of_other_values_come_through_as_what_they_show(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        whole = [torch.tensor([complex(1, rank + 1)]).conj() for rank in range(2)]  # torch conjugates when it is read
        for given in (whole, [one.imag for one in whole], [torch.arange(2.0)[rank::2] for rank in range(2)]):
            mine = given[worker.rank]
            same(paceline.all_gather(mine)[1], given[1].clone())
            same(paceline.broadcast(mine, root=1), given[1].clone())
            same(paceline.all_reduce(mine), given[0] + given[1])
            sent = paceline.send(mine, to=1 - worker.rank, later=True)
            same(paceline.receive(1 - worker.rank), given[1 - worker.rank].clone())
            paceline.wait(sent)

    run_job(tmp_path, work, workers=2)
