"""The low-level face: tables of numbers, pushed and pulled by workers that count clocks."""

import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from tests.jobs import CARRIERS, DEADLINE_S, job, run_job
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.errors import PeerError, Refused, UsageError
from paceline.update.rules import Hyper, RuleSpec
from paceline.worker.dense import DenseClient

SGD = paceline.update.SGD(lr=0.5)
ADD = paceline.update.Add()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_pushes_of_all_workers_are_in_what_all_pull(tmp_path: Path, carrier: str) -> None:
    def work(ps: Session) -> tuple[list[float], int]:
        w = ps.table("w", shape=(3,), update=SGD, init=1.0)
        pushed = w.push(np.full(3, ps.rank))
        assert ps.clock() == 1
        values = w.pull()
        assert pushed.result(timeout=30).applied
        return values.tolist(), w.pull(refresh=False).numel()

    assert run_job(tmp_path, work, workers=4, servers=2, carrier=carrier) == [([0.25] * 3, 3)] * 4


@pytest.mark.parametrize("rule", [SGD, ADD])
@pytest.mark.parametrize("refresh", [True, False])
def test_clock_by_clock_own_pushes_show_with_those_of_the_others(tmp_path: Path, rule: RuleSpec, refresh: bool) -> None:
    """Worker 0 is two clocks ahead; worker 1 finishes its first when that one has read."""
    has_read, is_complete, is_over = threading.Event(), threading.Event(), threading.Event()

    def work(ps: Session) -> list[float]:
        w = ps.table("w", shape=(1,), update=rule, consistency="bound=2,visible=on_clock", scale="sum")
        if ps.rank == 1:
            assert has_read.wait(DEADLINE_S)
            w.push([10.0])
            ps.clock()
            w.pull(exact=True)  # waits until the servers have applied clock 0
            is_complete.set()
            assert is_over.wait(DEADLINE_S)  # a worker that leaves is waited for no longer
            return []
        found: list[float] = []
        for _ in range(2):
            w.push([1.0])
            ps.clock()
            found.append(w.pull(refresh=refresh).item())
        has_read.set()
        assert is_complete.wait(DEADLINE_S)
        found.append(w.pull().item())
        w.push([1.0])
        ps.clock()
        found.append(w.pull(refresh=refresh).item())  # needs clock 0, and there is no more
        is_over.set()
        return found

    ahead, _ = run_job(tmp_path, work, workers=2)
    both = 11.0 if rule is ADD else -5.5
    assert ahead == [0.0, 0.0, both, both]


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([[1.0, 3.0], [2.0, 4.0]]).T,
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True),
        np.array([[1.0, 2.0], [3.0, 4.0]]),
        np.array([[2.0, 1.0], [4.0, 3.0]])[:, ::-1],
        np.asfortranarray([[1, 2], [3, 4]]),
        np.frombuffer(np.array([1.0, 2.0, 3.0, 4.0]).tobytes()).reshape(2, 2),  # cannot be written to
        [[1.0, 2.0], [3.0, 4.0]],
    ],
    ids=["tensor", "integers", "transposed", "double-graph", "array", "reversed", "fortran", "read-only", "list"],
)
def test_anything_of_the_right_shape_can_be_pushed(tmp_path: Path, given: Tensor) -> None:
    def work(ps: Session) -> list[list[float]]:
        w = ps.table("w", shape=(2, 2), update=ADD)
        w.push(given)
        ps.clock()
        return w.pull().tolist()

    assert run_job(tmp_path, work, servers=2) == [[[1.0, 2.0], [3.0, 4.0]]]


def test_a_server_that_is_stopped_before_its_worker_has_gone_keeps_none_of_its_memory(tmp_path: Path) -> None:
    with job(tmp_path, carrier="shm") as started:
        worker = started.join(0)
        w = worker.table("w", shape=(3,), update=ADD, consistency="bsp")
        w.pull()
        w.push([1.0, 2.0, 3.0])  # its clock is never finished: the server holds it
        started.servers[0].stop()  # the end of the connection comes behind this in the server's queue
        worker.close(politely=False)


def test_the_memory_of_a_push_may_be_used_again_at_once(tmp_path: Path) -> None:
    def work(ps: Session) -> list[float]:
        w = ps.table("w", shape=(2,), update=ADD)
        gradient = torch.ones(2)
        for _ in range(20):
            w.push(gradient)
            gradient.fill_(100.0)
            ps.clock()
            gradient.fill_(1.0)
        return w.pull().tolist()

    assert run_job(tmp_path, work, servers=2, carrier="shm") == [[20.0, 20.0]]


def test_a_pull_can_fill_a_tensor_or_an_array(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(2, 2), update=ADD, init=torch.tensor([1.0, 2.0]))
        tensor, array = torch.zeros(2, 2), np.zeros((2, 2), dtype=np.float32)
        assert w.pull(out=tensor) is not None
        w.pull(out=array)
        assert tensor.tolist() == array.tolist() == [[1.0, 2.0], [1.0, 2.0]]
        for wrong in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 4)[:, ::2]):
            with pytest.raises(
                UsageError,
                match=r"table 'w', worker 0, clock 0: out is .* expected \(2, 2\) of float32, dense",
            ):
                w.pull(out=wrong)

    run_job(tmp_path, work)


@pytest.mark.parametrize(
    ("scale", "expected"), [("sum", 0.0 + 1.0 + 2.0), ("mean", 3.0 / 3), ("samples", (0 * 1 + 1 * 2 + 2 * 3) / 6)]
)
def test_one_update_applies_the_sum_the_mean_or_the_mean_over_samples(
    tmp_path: Path, scale: str, expected: float
) -> None:
    def work(ps: Session) -> float:
        w = ps.table("w", shape=(), update=ADD, scale=scale, dtype="float64")
        w.push(torch.tensor(float(ps.rank)), samples=1 + ps.rank)
        ps.clock()
        return w.pull().item()

    assert all(math.isclose(found, expected) for found in run_job(tmp_path, work, workers=3))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_values_have_the_type_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    def work(ps: Session) -> Tensor:
        w = ps.table("w", shape=(5,), update=SGD, dtype=dtype, init=3.0)
        w.push(torch.full((5,), 2.0))
        ps.clock()
        return w.pull()

    (found,) = run_job(tmp_path, work, servers=2)
    assert torch.equal(found, torch.full((5,), 2.0, dtype=getattr(torch, dtype)))


def test_several_tables_move_with_one_clock(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[float, float, list[float]]:
        a = ps.table("a", shape=(), update=ADD, scale="sum")
        b = ps.table("b", shape=(), update=ADD, scale="sum", consistency="ssp:1")
        c = ps.table("c", shape=(2,), update=paceline.update.torch_optim("Adamax", lr=1.0))
        for _ in range(4):
            a.push(1.0)
            b.push(2.0)
            c.push([1.0, -1.0])
            ps.clock()
        ps.barrier()
        return a.pull().item(), b.pull().item(), c.pull().sign().tolist()

    assert run_job(tmp_path, work, workers=2) == [(8.0, 16.0, [-1.0, 1.0])] * 2


def test_many_pushes_in_one_clock_are_one_update_under_bsp(tmp_path: Path) -> None:
    def work(ps: Session) -> float:
        w = ps.table("w", shape=(), update=ADD, scale="sum")
        pushed = [w.push(1.0) for _ in range(10)]
        ps.clock()
        value = w.pull().item()
        assert all(push.result(timeout=30).applied for push in pushed)
        return value

    assert run_job(tmp_path, work, workers=2, servers=1) == [20.0, 20.0]


def test_values_can_be_asked_for_now_and_taken_later(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[float, float]:
        tables = [ps.table(name, shape=(2,), update=ADD, scale="sum") for name in ("a", "b", "c")]
        for table in tables:
            table.push([1.0, 1.0])
        ps.clock()
        later = [table.pull_later() for table in tables]
        now = tables[2].pull()[0].item()  # overtakes the one that is under way
        return now, sum(future.result(timeout=30)[1].item() for future in later)

    assert run_job(tmp_path, work, workers=2, servers=2, carrier="tcp") == [(2.0, 6.0)] * 2


# -- own writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "effect"), [(ADD, 1.0), (SGD, -0.5)], ids=["add", "sgd"])
def test_own_writes_show_at_once_in_cached_reads_and_count_once_after_every_refresh(
    tmp_path: Path, rule: RuleSpec, effect: float
) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(130,), update=rule, consistency="ssp:4")
        for clock in range(1, 21):
            w.push(torch.ones(130))
            for refresh in (False, clock % 3 == 0, False):
                assert torch.equal(w.pull(refresh=refresh), torch.full((130,), effect * clock))
            ps.clock()
            assert torch.equal(w.pull(refresh=False), torch.full((130,), effect * clock))

    run_job(tmp_path, work, servers=2, carrier="tcp")


def test_with_the_switch_off_cached_reads_lack_own_writes_until_they_are_fetched(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[float, float]:
        w = ps.table("w", shape=(), update=ADD, consistency="ssp:4", read_my_writes=False)
        w.pull()
        w.push(1.0)
        ps.clock()
        return w.pull(refresh=False).item(), w.pull().item()

    assert run_job(tmp_path, work) == [(0.0, 1.0)]


def test_others_writes_and_own_ones_add_up_under_lazy_reads(tmp_path: Path) -> None:
    """Whatever is fetched when: a worker sees all its own writes, and of the others never less than the bound."""
    bound, num_clocks = 2, 30

    def work(ps: Session) -> list[tuple[float, int]]:
        w = ps.table("w", shape=(3,), update=ADD, scale="sum", consistency=f"ssp:{bound}")
        seen: list[tuple[float, int]] = []
        for clock in range(num_clocks):
            values = w.pull(refresh=False)
            assert values[ps.rank] == clock
            others = torch.cat([values[: ps.rank], values[ps.rank + 1 :]])
            assert (others >= clock - bound).all()
            w.push(torch.nn.functional.one_hot(torch.tensor(ps.rank), 3))
            ps.clock()
        ps.barrier()
        assert w.pull().tolist() == [num_clocks] * 3
        return seen

    run_job(tmp_path, work, workers=3, servers=2)


def test_a_spoiled_own_write_never_shows(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[list[float], list[float]]:
        zeroed = ps.table("a", shape=(2,), update=ADD, consistency="ssp:4", nonfinite="zero")
        dropped = ps.table("b", shape=(2,), update=ADD, consistency="ssp:4")
        for table in (zeroed, dropped):
            table.pull()
        zeroed.push([math.nan, 1.0])
        assert not dropped.push([math.nan, 1.0]).result(timeout=30).applied
        return zeroed.pull(refresh=False).tolist(), dropped.pull(refresh=False).tolist()

    assert run_job(tmp_path, work) == [([0.0, 1.0], [0.0, 0.0])]


# -- errors ----------------------------------------------------------------------------------------------------------


def misuse(**settings: object) -> Callable[[Session], object]:
    return lambda ps: ps.table("w", **{"shape": (2,), "update": ADD, **settings})


def opened_twice(ps: Session) -> None:
    ps.table("w", shape=(2,), update=ADD)
    ps.table("w", shape=(3,), update=ADD)


def opened_twice_with_other_options(ps: Session) -> None:
    ps.table("w", shape=(2,), update=ADD)
    ps.table("w", shape=(2,), update=ADD, read_my_writes=False)


def pushed_in_the_wrong_shape(ps: Session) -> None:
    ps.table("w", shape=(2,), update=ADD).push(torch.ones(3))


def met_in_the_middle_of_a_clock(ps: Session) -> None:
    ps.table("w", shape=(2,), update=ADD).push(torch.ones(2))
    ps.barrier()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (opened_twice, r"worker 0 has already opened table 'w', .* is 'w' \(3,\) here and 'w' \(2,\) there"),
        (opened_twice_with_other_options, "read_my_writes=False, view=False here and read_my_writes=True, view=False"),
        (pushed_in_the_wrong_shape, r"a push to table 'w' has shape \(3,\), expected \(2,\); worker 0, clock 0"),
        (met_in_the_middle_of_a_clock, r"pushed to table 'w' during clock 0.*call clock\(\) first"),
        (misuse(init=torch.zeros(3)), r"table 'w': init has shape \(3,\), expected \(2,\)"),
        (misuse(shape=(-1, 2)), r"has shape \(-1, 2\), expected sizes of 0 or more"),
        (misuse(dtype="int8"), "dtype is 'int8', expected one of float32"),
        (misuse(scale="median"), "scale is 'median', expected one of sum, mean, samples"),
        (misuse(consistency="sometimes"), "unknown consistency 'sometimes'"),
        (misuse(update=paceline.update.rule("no.such.module:Rule")), "cannot be imported"),
        (misuse(update="sgd"), r"update is 'sgd', expected one of paceline.update, SGD\(lr=0.1\) for example"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, act: Callable[[Session], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_job(tmp_path, act)


def test_more_servers_than_elements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="table 'w': 3 servers for a table of 2 parameters"):
        run_job(tmp_path, misuse(), servers=3)


def test_a_table_that_another_worker_made_differently_is_refused(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        if ps.rank == 0:
            ps.table("w", shape=(2,), update=ADD)
        ps.barrier()
        if ps.rank == 1:
            ps.table("w", shape=(3,), update=SGD)

    message = r"parameter 0 is 'w' \(3,\) here and 'w' \(2,\) there.*the update rule is torch.optim.SGD here and add"
    with pytest.raises(Refused, match=message):
        run_job(tmp_path, work, workers=2)


# -- views -----------------------------------------------------------------------------------------------------------


def test_a_view_shows_each_update_without_a_copy(tmp_path: Path) -> None:
    def work(ps: Session) -> list[float]:
        w = ps.table("w", shape=(2, 3), update=ADD, scale="sum", view=True)
        first = w.view()
        assert first.tolist() == [[0.0] * 3] * 2
        for _ in range(3):
            w.push(torch.ones(2, 3))
            ps.clock()
            assert w.view().data_ptr() == first.data_ptr()
        ps.barrier()
        return first.flatten().tolist()

    assert run_job(tmp_path, work, workers=2, carrier="shm") == [[6.0] * 6] * 2


def test_a_view_stays_as_it_is_when_its_worker_has_left(tmp_path: Path) -> None:
    left, changed = threading.Event(), threading.Event()

    def work(ps: Session) -> list[float]:
        w = ps.table("w", shape=(3000,), update=ADD, consistency="ssp:9", view=True)
        ps.barrier()
        values = w.view()
        if ps.rank == 1:
            ps.close()
            left.set()
            assert changed.wait(120)
            return [values.min().item(), values.max().item()]
        assert left.wait(120)
        assert w.push(torch.ones(3000)).result(30).applied
        changed.set()
        return w.pull()[:2].tolist()

    assert run_job(tmp_path, work, workers=2, carrier="shm") == [[1.0, 1.0], [0.0, 0.0]]


def test_what_is_written_to_a_view_stays_here_and_is_gone_with_the_next_read(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(3000,), update=ADD, init=1.0, view=True)  # three pages
        for read in (w.view, w.pull):
            values = w.view()
            values[2999] = 7.0
            ps.barrier()
            assert read().tolist() == [1.0] * 3000
            assert values[2999] == 1.0

    run_job(tmp_path, work, workers=2, carrier="shm")


@pytest.mark.parametrize(
    ("carrier", "servers", "settings", "where"),
    [
        ("shm", 1, {}, "not mapped in this process"),
        ("tcp", 1, {"view": True}, "not mapped in this process"),
        ("shm", 2, {"view": True}, "on several servers"),
    ],
)
def test_without_a_view_the_reason_is_named(
    tmp_path: Path, carrier: str, servers: int, settings: dict[str, bool], where: str
) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(128,), update=ADD, **settings)
        with pytest.raises(UsageError, match=where):
            w.view()
        assert w.pull().tolist() == [0.0] * 128

    run_job(tmp_path, work, servers=servers, carrier=carrier)


def test_a_read_for_later_ends_where_the_worker_fails_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise PeerError("the worker has failed")

    with paceline.connect() as ps:
        w = ps.table("w", shape=(1,), update=ADD)
        with monkeypatch.context() as patch:
            patch.setattr(DenseClient, "use_cache", fail)
            later = w.pull_later()
            assert not later.cancel()
            with pytest.raises(PeerError, match="the worker has failed"):
                later.result(timeout=30)


def _tables_of_both_kinds(
    ps: Session, consistency: str
) -> list[tuple[Callable[..., Any], Callable[..., Tensor], Hyper]]:
    """A dense table and one of rows under plain SGD: how one pushes ones, how one pulls, and the hyperparameters."""
    dense = ps.table("dense", shape=(2,), update=SGD, consistency=consistency)
    rows = ps.table("rows", rows=2, update=SGD, consistency=consistency, cache=True)
    return [
        (partial(dense.push, [1.0, 1.0]), dense.pull, dense.spec.rule.groups[0]),
        (partial(rows.push, [7], [[1.0, 1.0]]), partial(rows.pull, [7]), rows.spec.rule.groups[0]),
    ]


def test_a_cached_read_has_own_pushes_by_the_rate_that_an_earlier_one_brought() -> None:
    with paceline.connect() as ps:
        for push, pull, group in _tables_of_both_kinds(ps, "ssp:9"):
            pull()
            push(hyper=({**group, "lr": 2.0},))
            push()
            assert pull(refresh=False).view(-1)[0] == -4.0
            assert pull(refresh=True).view(-1)[0] == -4.0


def test_hyperparameters_that_a_rule_does_not_take_spoil_no_later_push() -> None:
    with paceline.connect() as ps:
        for push, pull, _ in _tables_of_both_kinds(ps, "asynchronous"):
            assert "missing ['dampening'" in push(hyper=({"lr": 1.0},)).result(DEADLINE_S).reason
            assert push().result(DEADLINE_S).applied
            assert pull(refresh=True).view(-1)[0] == -0.5


def test_hyperparameters_that_came_with_a_late_push_come_with_the_next_one(tmp_path: Path) -> None:
    is_over = threading.Event()

    def work(ps: Session) -> float:
        w = ps.table("w", shape=(1,), update=SGD, consistency="backup:1")
        if ps.rank:  # completes a clock without worker 0
            w.push([0.0])
            ps.clock()
            w.pull(exact=True)
            is_over.set()
            return 0.0
        assert is_over.wait(DEADLINE_S)
        assert not w.push([1.0], hyper=({**w.spec.rule.groups[0], "lr": 3.0},)).result(DEADLINE_S).applied
        w.pull()
        w.push([1.0])
        ps.clock()
        return w.pull(exact=True).item()

    assert run_job(tmp_path, work, workers=2) == [-3.0, 0.0]
