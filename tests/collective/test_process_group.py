"""One contract for the process groups that carry collective calls: Gloo's and ours, in memory and over connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
import torch
from tests.collective.groups import BACKENDS, OWN, TIMEOUT, run_group, succeed
from tests.jobs import start_and_join
from tests.leaks import nothing_left_behind
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import HashStore

from paceline.collective import process_group
from paceline.collective.exchange import DIRECT_BYTES
from paceline.collective.process_group import OwnGroup
from paceline.collective.rounds import SLOT_BYTES, Call, Round
from paceline.collective.torch_backend import connect
from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.transport.deadline import Deadline

DTYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8)
DIRECT, SLOT = DIRECT_BYTES // 4, SLOT_BYTES // 4
SIZES = (0, 1, 7, 1000, DIRECT, DIRECT + 1, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT + 13)


def numbers(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    return torch.randint(0, 4, (size,), generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def options(kind: Callable[[], Any], **values: object) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def reduce_all(group: Any, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
    group.allreduce([tensor], options(AllreduceOptions, reduceOp=ReduceOp(op))).wait()
    return tensor


@pytest.mark.parametrize(
    ("backend", "num_workers"),
    [(backend, number) for backend in ("gloo", "paceline") for number in (1, 2, 3, 4)]
    + [("memory", 1), ("memory", 3), ("tls", 2), ("machines", 2), ("machines", 4)],
)
def test_sums_of_every_size_are_exact_below_and_above_each_threshold(backend: str, num_workers: int) -> None:
    def work(group: Any, rank: int) -> None:
        for size in SIZES:
            expected = torch.stack([numbers(other, size) for other in range(num_workers)]).sum(0)
            same(reduce_all(group, numbers(rank, size)), expected)

    succeed(backend, num_workers, work)


@pytest.mark.parametrize("backend", ["gloo", "paceline", "machines"])
def test_every_dtype_and_reduction_is_as_torch_computes_it(backend: str) -> None:
    def work(group: Any, rank: int) -> None:
        for dtype in DTYPES:
            both = torch.stack([numbers(other, 33, dtype) for other in range(2)])
            for op, expected in (
                (ReduceOp.SUM, both.sum(0).to(dtype)),
                (ReduceOp.PRODUCT, both.prod(0).to(dtype)),
                (ReduceOp.MIN, both.amin(0)),
                (ReduceOp.MAX, both.amax(0)),
            ):
                same(reduce_all(group, numbers(rank, 33, dtype), op), expected)
        whole = torch.stack([numbers(other, 33, torch.int64) for other in range(2)])
        for op, expected in (
            (ReduceOp.BAND, whole[0] & whole[1]),
            (ReduceOp.BOR, whole[0] | whole[1]),
            (ReduceOp.BXOR, whole[0] ^ whole[1]),
        ):
            same(reduce_all(group, numbers(rank, 33, torch.int64), op), expected)

    succeed(backend, 2, work)


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_all_workers_get_the_same_bits(backend: str, num_workers: int) -> None:
    def work(group: Any, rank: int) -> list[bytes]:
        drawn = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for size in (1001, DIRECT + 77)]
        return [reduce_all(group, one).numpy().tobytes() for one in drawn]

    first, *others = succeed(backend, num_workers, work)
    assert all(one == first for one in others)


@pytest.mark.parametrize("size", [5, SLOT + 3])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("backend", ["gloo", "paceline", "memory", "machines"])
def test_other_patterns_give_what_they_are_defined_to_give(backend: str, num_workers: int, size: int) -> None:
    inputs = [numbers(rank, size) for rank in range(num_workers)]
    root, total = num_workers - 1, torch.stack(inputs).sum(0)

    def work(group: Any, rank: int) -> None:
        mine = numbers(rank, size)
        told = mine.clone()
        group.broadcast([told], options(BroadcastOptions, rootRank=root)).wait()
        same(told, inputs[root])
        found = [torch.zeros(size) for _ in inputs]
        group.allgather([found], [mine], AllgatherOptions()).wait()
        same(torch.stack(found), torch.stack(inputs))
        summed = mine.clone()
        group.reduce([summed], options(ReduceOptions, rootRank=root)).wait()
        if rank == root:
            same(summed, total)
        found = [torch.zeros(size) for _ in inputs] if rank == root else []
        group.gather([found] if found else [], [mine], options(GatherOptions, rootRank=root)).wait()
        if rank == root:
            same(torch.stack(found), torch.stack(inputs))
        part = torch.zeros(size)
        given = [[one + 1 for one in inputs]] if rank == root else []
        group.scatter([part], given, options(ScatterOptions, rootRank=root)).wait()
        same(part, inputs[rank] + 1)
        group.reduce_scatter([part], [[mine + other for other in range(num_workers)]], ReduceScatterOptions()).wait()
        same(part, total + num_workers * rank)
        group.barrier(BarrierOptions()).wait()

    succeed(backend, num_workers, work)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_tensors_are_gathered_and_exchanged_in_one(backend: str) -> None:
    def work(group: Any, rank: int) -> None:
        found = torch.zeros(3, 4)
        group._allgather_base(found.view(-1), torch.full((4,), float(rank)), AllgatherOptions()).wait()
        same(found, torch.arange(3.0)[:, None].expand(3, 4))
        given, slices = torch.arange(6.0) + 10 * rank, torch.zeros(6)
        group.alltoall_base(slices, given, [], [], AllToAllOptions()).wait()
        same(slices.view(3, 2), torch.tensor([[0.0, 1], [10, 11], [20, 21]]) + 2 * rank)
        uneven = torch.zeros(3 * (rank + 1))
        group.alltoall_base(uneven, given, [rank + 1] * 3, [1, 2, 3], AllToAllOptions()).wait()
        own = torch.arange(rank + 1.0) + sum(range(rank + 1))
        same(uneven, torch.cat([own, own + 10, own + 20]))

    succeed(backend, 3, work)


@pytest.mark.parametrize("backend", BACKENDS)
def test_messages_come_in_order_by_tag_and_from_any_worker(backend: str) -> None:
    def work(group: Any, rank: int) -> None:
        if rank:
            values = [torch.full((2, 2), 1.0), torch.full((2, 2), 2.0)] if rank == 1 else []
            values.append(torch.full((1,), 7.0 * rank))
            works = [group.send([value], 0, 5 if value.dim() == 1 else 0) for value in values]
            for one in works:
                one.wait()
            return
        late, first, second = torch.zeros(1), torch.zeros(2, 2), torch.zeros(2, 2)
        group.recv([late], 1, 5).wait()
        group.recv([first], 1, 0).wait()
        group.recv([second], 1, 0).wait()
        assert (late.item(), first[0, 0].item(), second[1, 1].item()) == (7.0, 1.0, 2.0)
        received = group.recv_anysource([late], 5)
        received.wait()
        assert (late.item(), received._source_rank()) == (14.0, 2)

    succeed(backend, 3, work)


def test_what_is_not_contiguous_or_needs_a_gradient_is_replaced_in_place() -> None:
    def work(group: Any, rank: int) -> None:
        turned = torch.arange(6.0).view(2, 3).t()
        reduce_all(group, turned)
        same(turned, 2 * torch.arange(6.0).view(2, 3).t())
        scalar = torch.tensor(1.0, requires_grad=True)
        reduce_all(group, scalar)
        assert scalar.item() == 2.0

    succeed("paceline", 2, work)


@pytest.mark.parametrize("backend", OWN)
def test_calls_that_are_not_waited_for_go_on_in_order(backend: str) -> None:
    def work(group: Any, rank: int) -> list[float]:
        given = [torch.full((3,), float(number)) for number in range(5)]
        works = [group.allreduce([one], AllreduceOptions()) for one in given]
        if rank == 0:  # in another order than made: this does not hold up the calls
            group.send([torch.ones(1)], 1, 0).wait()
        else:
            group.recv([torch.ones(1)], 0, 0).wait()
        futures = [one.get_future() for one in reversed(works)]
        assert [future.wait()[0][0].item() for future in futures] == [8.0, 6.0, 4.0, 2.0, 0.0]
        assert all(one.is_completed() and one.is_success() for one in works)
        return [one[0].item() for one in given]

    assert succeed(backend, 2, work) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


@pytest.mark.parametrize("backend", OWN)
def test_workers_that_make_different_calls_are_told_and_may_go_on(backend: str) -> None:
    def work(group: Any, rank: int) -> str:
        calls = (lambda: reduce_all(group, torch.ones(4)), lambda: group.barrier(BarrierOptions()).wait())
        with pytest.raises(UsageError) as told:
            calls[rank == 1]()
        same(reduce_all(group, torch.ones(4)), torch.full((4,), 3.0))
        return str(told.value)

    said = succeed(backend, 3, work)
    assert said[0].startswith("worker 0: expected all_reduce of 4 x float32 (0) of every worker, got barrier from work")
    assert "expected barrier of every worker, got all_reduce of 4 x float32 (0) from worker 0" in said[1]
    assert "from worker 1" in said[2]


@pytest.mark.parametrize("backend", OWN)
def test_a_worker_that_leaves_or_does_not_come_is_named(backend: str) -> None:
    left = threading.Event()

    def leave(group: Any, rank: int) -> None:
        reduce_all(group, torch.ones(4))
        if rank == 1:
            group.abort()
            left.set()
            return
        assert left.wait(120)
        reduce_all(group, torch.ones(4))

    for gone in (run_group(backend, 3, leave)[rank] for rank in (0, 2)):
        assert isinstance(gone, PeerError)
        assert "worker 1 is gone" in str(gone)

    over = threading.Event()

    def lag(group: Any, rank: int) -> None:
        if rank == 1:
            assert over.wait(120)
            return
        group.set_timeout(timedelta(seconds=0.5))
        try:
            reduce_all(group, torch.ones(4))
        finally:
            over.set()

    late = run_group(backend, 2, lag)[0]
    assert isinstance(late, DeadlineExceeded)
    assert str(late) == "worker 0, all_reduce: worker 1 did not come in time"


def test_what_the_group_in_shared_memory_does_not_have_it_says() -> None:
    def work(group: OwnGroup, rank: int) -> None:
        with pytest.raises(UsageError, match="does not reduce by AVG: it has SUM, PRODUCT"):
            reduce_all(group, torch.ones(2), ReduceOp.AVG)
        with pytest.raises(UsageError, match="no calls over sparse tensors"):
            reduce_all(group, torch.ones(2).to_sparse())
        with pytest.raises(UsageError, match="got tensors of 2 x float32 and 3 x float32"):
            group.allgather([[torch.ones(3)]], [torch.ones(2)], AllgatherOptions())
        with pytest.raises(UsageError, match="cannot send to itself"):
            group.send([torch.ones(1)], 0, 0)

    succeed("paceline", 1, work)


def test_a_message_of_another_size_than_expected_is_refused() -> None:
    def work(group: Any, rank: int) -> None:
        if rank == 0:
            group.send([torch.ones(3)], 1, 0).wait()
            return
        with pytest.raises(UsageError, match="expected 8 bytes from worker 0, got 12"):
            group.recv([torch.ones(2)], 0, 0).wait()

    succeed("paceline", 2, work)


def test_a_group_that_torch_has_dropped_leaves_nothing() -> None:
    dropped = threading.Barrier(2)
    store = HashStore()

    def live(rank: int) -> None:
        group = connect(store, rank, 2, TIMEOUT)
        work = group.allreduce([torch.ones(3)], AllreduceOptions())
        work.wait()
        dropped.wait(120)
        del group, work

    with nothing_left_behind():
        start_and_join([threading.Thread(target=live, args=(rank,)) for rank in range(2)])
        for thread in threading.enumerate():
            if thread.name == "paceline-group":  # it is told to end, and nothing waits for it
                thread.join(120)


def test_a_group_is_made_again_where_the_former_one_met() -> None:
    """As `init_process_group` after `destroy_process_group`, however late a worker is with either."""
    store, comes_again, totals = HashStore(), threading.Event(), list[float]()

    def make_group(rank: int) -> None:
        total = torch.ones(1)
        group = connect(store, rank, 2, TIMEOUT)
        group.allreduce([total], AllreduceOptions()).wait()
        totals.append(total.item())

    def live(rank: int) -> None:
        make_group(rank)
        if rank == 0:
            comes_again.wait(60)
        else:
            comes_again.set()
        make_group(rank)

    start_and_join([threading.Thread(target=live, args=(rank,)) for rank in range(2)])

    assert totals == [2.0] * 4


def test_a_single_value_with_strides_is_flat_in_its_own_memory() -> None:
    one = torch.arange(2.0)[1::2]
    flat = process_group._flat(one)
    assert flat.view(torch.uint8).numel() == 4
    assert flat.data_ptr() == one.data_ptr()


class Interrupted(BaseException):
    """What the handler of a signal raises, in the middle of a call."""


@pytest.mark.parametrize("backend", ["paceline", "memory"])
def test_a_call_that_is_interrupted_ends_the_group_and_gives_no_other_call_its_values(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(group: Any, rank: int) -> None:
        rounds = group._exchange._rounds
        run = rounds.run

        def run_in_part(call: Call, deadline: Deadline, steps: Iterable[Round]) -> None:
            run(call, deadline, islice(steps, 1))
            raise Interrupted

        if rank == 1:
            with pytest.raises(PeerError, match="worker 0: a call was interrupted by Interrupted"):
                reduce_all(group, numbers(rank, 3 * SLOT))
            return
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "run", run_in_part)
            with pytest.raises(Interrupted):
                reduce_all(group, numbers(rank, 3 * SLOT))
        with pytest.raises(PeerError, match="an earlier call was interrupted by Interrupted"):
            reduce_all(group, numbers(rank, 3 * SLOT))

    succeed(backend, 2, work)


@pytest.mark.parametrize("backend", ["paceline", "memory"])
def test_a_reduction_that_torch_does_not_have_begins_no_call(backend: str) -> None:
    def work(group: Any, rank: int) -> None:
        with pytest.raises(RuntimeError, match="not implemented for 'Float'"):
            reduce_all(group, torch.ones(3 * SLOT), ReduceOp.BAND)
        for value in (1.0, 2.0):
            same(reduce_all(group, torch.full((3 * SLOT,), value)), torch.full((3 * SLOT,), 2 * value))

    succeed(backend, 2, work)


@pytest.mark.parametrize("backend", ["paceline", "memory"])
def test_what_an_exchange_of_wrong_sizes_has_left_is_not_taken_by_the_next_one(backend: str) -> None:
    def exchange(group: Any, found: list[Tensor], value: float) -> list[float]:
        given = [torch.full((1,), value) for _ in found]
        group.alltoall(found, given, AllToAllOptions()).wait()
        return [one[0].item() for one in found]

    def work(group: Any, rank: int) -> list[float]:
        sizes = [1, 2 if rank == 0 else 1, 2 if rank == 2 else 1]
        if rank == 1:
            exchange(group, [torch.zeros(size) for size in sizes], 10.0 + rank)
        else:
            told = "expected 8 bytes from worker 1, got 4" if rank == 0 else "worker 2 gives itself 1 values for 2"
            with pytest.raises(UsageError, match=told):
                exchange(group, [torch.zeros(size) for size in sizes], 10.0 + rank)
        return exchange(group, [torch.zeros(1) for _ in range(3)], 20.0 + rank)

    assert succeed(backend, 3, work) == [[20.0, 21.0, 22.0]] * 3
