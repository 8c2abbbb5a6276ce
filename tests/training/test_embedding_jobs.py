"""Embeddings in jobs of several workers, beside a dense part, under every policy: one push a clock, none lost."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import seeded
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import Refused, UsageError

NUM, WIDTH, NUM_STEPS = 12, 3, 8
SGD = paceline.update.SGD(lr=0.5)
ADD = paceline.update.Add()

Embeddings = paceline.Embedding | nn.Embedding


class Model(nn.Module):
    """A dense part on top of rows."""

    def __init__(self, rows: Embeddings) -> None:
        super().__init__()
        self.rows = rows
        self.top = seeded(lambda: nn.Linear(2 * WIDTH, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.rows(ids).flatten(1).sin()).squeeze(1)


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Batches of unequal sizes; some are so small that a server has none of their rows."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    num = 1 + (rank + step) % 3
    return torch.randint(NUM, (num, 2), generator=generator), torch.randn(num, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    ids, target = batch_of(rank, step)
    return functional.mse_loss(model(ids), target)


def dense(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.top.parameters(), lr=0.1, momentum=0.9)


def weight(rank: int, step: int) -> int:
    return len(batch_of(rank, step)[0])


def train_alone(first: Tensor, num_workers: int, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Model:
    """Train in one process on the batches of all workers at once."""
    model = Model(nn.Embedding(NUM, WIDTH, _weight=first.clone()))
    optimizers = dense(model), make(model.rows)
    for step in range(NUM_STEPS):
        model.zero_grad()
        weights = [weight(rank, step) for rank in range(num_workers)]
        for rank in range(num_workers):
            (loss_of(model, rank, step) * weights[rank] / sum(weights)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_under_bsp_workers_learn_what_one_process_learns(tmp_path: Path, workers: int, servers: int, rule: str) -> None:
    update = {"sgd": SGD, "adagrad": paceline.update.Adagrad(lr=0.5)}[rule]
    make = {
        "sgd": lambda rows: torch.optim.SGD(rows.parameters(), lr=0.5),
        "adagrad": lambda rows: torch.optim.Adagrad(rows.parameters(), lr=0.5),
    }[rule]

    def work(ps: Session) -> tuple[Tensor, Tensor, Tensor]:
        model = Model(paceline.Embedding(NUM, WIDTH, update=update))
        first = model.rows.table.pull(range(NUM))
        optimizer = paceline.distributed(dense(model))
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(model, ps.rank, step).backward()
            optimizer.step(samples=weight(ps.rank, step))
        return first, model.rows.table.pull(range(NUM)), model.top.weight.detach()

    first, *found = run_job(tmp_path, work, workers=workers, servers=servers)[-1]
    expected = train_alone(first, workers, make)
    torch.testing.assert_close(found[0], expected.rows.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], expected.top.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_worker_without_ids_counts_in_the_mean(tmp_path: Path) -> None:
    """Its samples are in the batch of all, even where they need no row."""

    def work(ps: Session) -> list[float]:
        bags = paceline.EmbeddingBag(None, 1, mode="sum", update=ADD, init=0.0)
        ids = torch.arange(4) if ps.rank == 0 else torch.tensor([], dtype=torch.int64)
        bags(ids, torch.tensor([0, 0])).sum().backward()
        ps.clock(samples=2)
        return bags.table.pull(range(4)).view(-1).tolist()

    assert run_job(tmp_path, work, workers=4, servers=3) == [[0.25] * 4] * 4


POLICIES = [("bsp", rows) for rows in ("bsp", "ssp:0", "ssp:3", "essp:2", "asynchronous")] + [("ssp:2", "bsp")]


@pytest.mark.parametrize(("dense_policy", "rows_policy"), POLICIES)
def test_policies_mix_in_one_model_and_nothing_is_lost(tmp_path: Path, rows_policy: str, dense_policy: str) -> None:
    """Each pass adds 1 to the rows of its ids, however old what it read was."""

    def work(ps: Session) -> tuple[list[float], int]:
        rows = paceline.Embedding(None, 1, update=ADD, scale="sum", consistency=rows_policy, init=0.0)
        optimizer = paceline.distributed(
            torch.optim.SGD([top := nn.Parameter(torch.ones(2))], lr=0.0), consistency=dense_policy
        )
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            for _ in range(2):
                found = rows(torch.tensor([step % 3, 7, 7]))
                ((found - found.detach()) * top.mean()).sum().backward()
            optimizer.step()
        ps.barrier()
        with optimizer.snapshot():
            return rows(torch.tensor([0, 1, 2, 7])).view(-1).tolist(), rows.num_refused

    assert run_job(tmp_path, work, workers=2, servers=2) == [([12.0, 12.0, 8.0, 64.0], 0)] * 2


def test_a_snapshot_reads_all_of_the_clocks_before(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[float, float, float]:
        rows = paceline.Embedding(None, 1, update=ADD, consistency="ssp:9", cache=True, init=0.0)
        optimizer = paceline.distributed(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0), consistency="ssp:9")
        seven = torch.tensor(7)
        for _ in range(3):
            rows(seven).sum().backward()
            ps.barrier() if not ps.node.clock else None
            optimizer.step()
        ps.barrier()
        before = rows(seven).item()
        with optimizer.snapshot():
            during = rows(seven).item()
        return before, during, rows(seven).item()

    assert run_job(tmp_path, work, workers=2) == [(3.0, 6.0, 6.0)] * 2


def test_zero_grad_of_the_optimizer_drops_what_a_skipped_batch_left(tmp_path: Path) -> None:
    def work(ps: Session) -> list[float]:
        rows = paceline.Embedding(None, 1, update=ADD, init=0.0)
        optimizer = paceline.distributed(torch.optim.SGD([top := nn.Parameter(torch.ones(1))], lr=0.0))
        for step in range(4):
            optimizer.zero_grad()
            (rows(torch.tensor([step])) * top.detach()).sum().backward()
            if step % 2:
                continue  # the loss was too bad, say
            optimizer.step()
        return rows.table.pull(range(4)).view(-1).tolist()

    assert run_job(tmp_path, work) == [[1.0, 0.0, 1.0, 0.0]]


def test_an_epoch_that_does_not_divide_evenly_loses_no_gradient(tmp_path: Path) -> None:
    """Five batches for two workers: the one without a last batch finishes that clock, with what it still holds."""

    def work(ps: Session) -> list[float]:
        rows = paceline.Embedding(None, 1, update=ADD, scale="sum", init=0.0)
        batches = paceline.shard(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
        for (ids,) in batches:
            rows(ids).sum().backward()
            if ps.rank == 0 or 7 not in ids:
                ps.clock()
        if ps.rank == 1:
            ps.clock()
        ps.barrier()
        return rows.table.pull(range(10)).view(-1).tolist()

    assert run_job(tmp_path, work, workers=2, servers=2)[0] == [1.0] * 10


def test_samples_are_those_that_loaders_have_handed_out(tmp_path: Path) -> None:
    def work(ps: Session) -> list[float]:
        rows = paceline.Embedding(None, 1, update=ADD, init=0.0)
        batches = paceline.shard(DataLoader(TensorDataset(torch.arange(5)), batch_size=3))
        for (ids,) in batches:
            rows(ids).mean().backward()
            ps.clock()
        return rows.table.pull(range(5)).view(-1).tolist()

    for found in run_job(tmp_path, work, workers=2, servers=2):
        torch.testing.assert_close(found, [0.2] * 5)


def test_workers_that_differ_are_refused(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        for rank in range(2):
            if ps.rank == rank:
                paceline.Embedding(None, 1 + rank, update=ADD)
            ps.barrier()

    with pytest.raises(Refused, match=r"width is 2 here and 1 there"):
        run_job(tmp_path, work, workers=2)


def test_without_init_a_module_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.api.script._script.session", None)
    with pytest.raises(UsageError, match=r"paceline.init\(\) has not been called"):
        contextvars.Context().run(paceline.Embedding, None, 1, update=ADD)
