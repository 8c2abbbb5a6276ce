"""Rows that are asked for one batch ahead: the same values, no more waiting than without, and nothing that breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import IdOutOfRange
from paceline.training.embedding_gradients import MAX_ASKED

NUM, WIDTH = 12, 3
ADAGRAD = paceline.update.Adagrad(lr=0.5)
ADD = paceline.update.Add()

Batches = Iterable[tuple[Tensor]]
Rows = paceline.Embedding | paceline.EmbeddingBag


@pytest.fixture
def ps() -> Iterator[Session]:
    with paceline.connect() as session:
        yield session


def num_pulls(rows: Rows) -> int:
    return rows.table.traffic.pulled.frames


def samples(num: int = 22) -> TensorDataset:
    return TensorDataset(torch.randint(NUM, (num, 2), generator=torch.Generator().manual_seed(1)))


def train(rows: Rows, batches: Batches, ps: Session, num_epochs: int = 2) -> Tensor:
    for _ in range(num_epochs):
        for (ids,) in batches:
            rows(ids).sin().mean().backward()
            ps.clock()
    ps.barrier()
    return rows.table.pull(range(NUM))


def plainly(batches: Batches, rows: Rows) -> Batches:
    return batches


def ahead(batches: Batches, rows: Rows) -> Batches:
    return paceline.prefetch(batches, {rows: lambda batch: batch[0]})


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("module", [paceline.Embedding, paceline.EmbeddingBag])
def test_under_bsp_values_are_the_same_bits(tmp_path: Path, workers: int, module: type[Rows]) -> None:
    """Eleven batches for three workers: two have one more than the third, and one of them is smaller."""

    def work(ps: Session) -> tuple[Tensor, Tensor]:
        found = []
        for name, way in (("plain", plainly), ("ahead", ahead)):
            rows = module(NUM, WIDTH, update=ADAGRAD, name=name, init=paceline.first.normal(1.0))
            batches = paceline.shard(DataLoader(samples(21), batch_size=2, shuffle=True))
            found.append(train(rows, way(batches, rows), ps))
        return found[0], found[1]

    for plain, prefetched in run_job(tmp_path, work, workers=workers, servers=2):
        assert torch.equal(plain, prefetched)


@pytest.mark.parametrize("policy", ["ssp:0", "ssp:2", "essp:2", "asynchronous", "backup:1"])
def test_other_policies_lose_nothing(tmp_path: Path, policy: str) -> None:
    def work(ps: Session) -> tuple[float, int]:
        rows = paceline.Embedding(None, 1, update=ADD, scale="sum", consistency=policy, init=0.0)
        for _, ids in paceline.prefetch(
            [(step, torch.tensor([step % 2, 7])) for step in range(9)], {rows: lambda batch: batch[1]}
        ):
            rows(ids).sum().backward()
            ps.clock()
        ps.barrier()
        return float(rows.table.pull([0, 1, 7], exact=policy != "backup:1").sum()), rows.num_refused

    found = run_job(tmp_path, work, workers=2, servers=2)
    assert {total for total, _ in found} == {36.0 - 2 * sum(refused for _, refused in found)}


def test_rows_that_were_asked_for_are_not_asked_for_again(ps: Session) -> None:
    rows = paceline.Embedding(None, WIDTH, update=ADD, ps=ps)
    rows.prefetch(torch.tensor([4, 5, 6, 4]), ahead=0)
    assert num_pulls(rows) == 1
    wanted = [4, 4], [6, 5], [[5, 6], [4, 4]]
    found = [rows(torch.tensor(ids)) for ids in wanted]
    assert num_pulls(rows) == 1
    assert all(torch.equal(rows.table.pull(ids), some) for ids, some in zip(wanted, found, strict=True))
    rows(torch.tensor([4, 7]))
    assert num_pulls(rows) == 1 + 3 + 1


def test_each_batch_is_asked_for_once_and_ahead(ps: Session) -> None:
    rows = paceline.Embedding(None, 1, update=ADD, ps=ps)
    asked: list[int] = []
    for step, _ in enumerate(paceline.prefetch([torch.tensor([n]) for n in range(5)], {rows: lambda ids: ids})):
        asked.append(num_pulls(rows))
        rows(torch.tensor([step]))
        ps.clock()
    assert asked == [1, 3, 4, 5, 5]  # the first batch is pulled by its own forward
    assert num_pulls(rows) == 5


def test_a_padded_id_is_not_asked_for(ps: Session) -> None:
    rows = paceline.EmbeddingBag(None, 1, mode="sum", update=ADD, init=1.0, padding_idx=-1, ps=ps)
    ids = torch.tensor([[3, -1], [-1, -1]])
    rows.prefetch(ids, ahead=0)
    assert rows.table.traffic.pulled.key_bytes == 8
    assert rows(ids).tolist() == [[1.0], [0.0]]
    assert num_pulls(rows) == 1


# -- loops that do not step once a batch -----------------------------------------------------------------------------


def every_second_is_skipped(step: int) -> tuple[bool, bool]:
    return step % 2 == 0, step % 2 == 0


def two_are_accumulated(step: int) -> tuple[bool, bool]:
    return True, step % 2 == 1


def hundreds_are_skipped(step: int) -> tuple[bool, bool]:
    return step % 600 == 0, step % 600 == 0


@pytest.mark.parametrize(
    ("course", "num_batches"), [(every_second_is_skipped, 30), (two_are_accumulated, 30), (hundreds_are_skipped, 1202)]
)
@pytest.mark.parametrize("policy", ["bsp", "ssp:0"])
def test_batches_may_be_skipped_or_share_a_step(
    tmp_path: Path, course: Callable[[int], tuple[bool, bool]], num_batches: int, policy: str
) -> None:
    """A worker says whether it uses a batch, and whether it finishes a clock after it."""

    def work(ps: Session) -> tuple[Tensor, Tensor]:
        found = []
        for name, way in (("plain", plainly), ("ahead", ahead)):
            rows = paceline.Embedding(NUM, WIDTH, update=ADAGRAD, name=name, consistency=policy, init=1.0)
            for step, (ids,) in enumerate(way(DataLoader(samples(num_batches), batch_size=1), rows)):
                uses, steps = course(step)
                if uses:
                    rows(ids).sin().mean().backward()
                if steps:
                    ps.clock()
            found.append(rows.table.pull(range(NUM)))
        return found[0], found[1]

    for plain, prefetched in run_job(tmp_path, work, workers=1, servers=2):
        assert torch.equal(plain, prefetched)


def test_no_more_than_a_few_are_asked_for_at_once(ps: Session) -> None:
    rows = paceline.Embedding(None, 1, update=ADD, ps=ps)
    for step in range(5000):
        rows.prefetch(torch.tensor([step]))
    assert num_pulls(rows) == MAX_ASKED
    ps.clock()
    rows.prefetch(torch.tensor([1]))
    assert num_pulls(rows) == MAX_ASKED  # those of the clock under way may still be used
    ps.clock()
    rows.prefetch(torch.tensor([1]))
    assert num_pulls(rows) == MAX_ASKED + 1


@pytest.mark.parametrize("policy", ["bsp", "ssp:0", "essp:1"])
def test_a_loop_may_break_with_rows_under_way(tmp_path: Path, policy: str) -> None:
    """They belong to a clock that this worker never begins; it leaves all the same, and the others go on."""

    def work(ps: Session) -> float:
        rows = paceline.Embedding(None, 1, update=ADD, scale="sum", consistency=policy, init=0.0)
        batches = paceline.shard(DataLoader(TensorDataset(torch.arange(40)), batch_size=2))
        for step, (ids,) in enumerate(ahead(batches, rows)):
            rows(ids - ids).sum().backward()
            if step == 2 and ps.rank == 1:
                break
            ps.clock()
        return rows(torch.tensor(0)).item()

    assert run_job(tmp_path, work, workers=2, servers=2)[0] == 2.0 * (10 + 2)


def test_an_error_in_a_loop_is_that_error(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        rows = paceline.Embedding(4, 1, update=ADD)
        for (ids,) in ahead(paceline.shard(DataLoader(TensorDataset(torch.arange(9)), batch_size=1)), rows):
            rows(ids).sum().backward()
            ps.clock()

    with pytest.raises(IdOutOfRange, match="id 4 is out of range"):
        run_job(tmp_path, work, workers=1)


# -- the loader ------------------------------------------------------------------------------------------------------


def test_batches_come_as_from_the_loader_itself(ps: Session) -> None:
    rows = paceline.Embedding(None, 1, update=ADD, ps=ps)
    for source in ([], [(torch.tensor([1]),)], DataLoader(samples(), batch_size=4)):
        prefetched = ahead(source, rows)
        assert len(prefetched) == len(source)
        for _ in range(2):
            assert [ids.tolist() for (ids,) in prefetched] == [ids.tolist() for (ids,) in source]


def test_samples_count_when_a_batch_is_handed_out(tmp_path: Path) -> None:
    def work(ps: Session) -> list[int]:
        rows = paceline.Embedding(None, 1, update=ADD)
        batches = paceline.shard(DataLoader(samples(10), batch_size=4))
        return [ps.num_samples for _ in ahead(batches, rows)]

    assert run_job(tmp_path, work) == [[4, 8, 10]]


def test_nothing_is_asked_for_while_gradients_are_off(ps: Session) -> None:
    rows = paceline.Embedding(None, 1, update=ADD, ps=ps)
    with torch.no_grad():
        for (ids,) in ahead(DataLoader(samples(), batch_size=4), rows):
            rows(ids)
    assert num_pulls(rows) == 6
