"""A script as users write it, with every type spelled out; it is checked, and never run."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def train(model: nn.Module, examples: TensorDataset) -> float:
    session: paceline.Session = paceline.init()
    optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), strategy="ssp:3", model=model)
    assert_type(optimizer, paceline.Distributed)
    loader = paceline.shard(DataLoader(examples, batch_size=8))
    assert_type(loader.batch_size, int | None)
    loss = torch.tensor(0.0)
    for features, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        paceline.report(loss=loss.item())
    assert_type(paceline.rank(), int)
    assert_type(paceline.size(), int)
    assert_type(paceline.snapshot(Path("snapshots")), Future[Path] | None)
    paceline.barrier()
    session.close()
    return float(loss)


def tables() -> Tensor:
    policy: paceline.Consistency = paceline.essp(2)
    with paceline.connect() as servers:
        weights = servers.table("weights", shape=(3,), update=paceline.update.SGD(lr=0.1), consistency=policy)
        assert_type(weights, paceline.Table)
        users = servers.table("users", rows=16, update=paceline.update.Adagrad(lr=0.1))
        assert_type(users, paceline.RowTable)
        weights.push(torch.ones(3))
        users.push([7, 9], torch.ones(2, 16))
        assert_type(servers.clock(), int)
        assert_type(users.pull([7, 9]), Tensor)
        return weights.pull()


def total(value: Tensor) -> Tensor:
    try:
        return paceline.all_reduce(value)
    except paceline.errors.PeerError as error:
        raise SystemExit(str(error)) from error


def embed(words: Tensor) -> Tensor:
    layer: nn.Module = (
        paceline.Embedding(1000, 16, update=paceline.update.SGD(lr=0.1)) if words.numel() else nn.Embedding(1000, 16)
    )
    found = layer(words)
    assert isinstance(found, Tensor)
    return found


def fifty(model: nn.Module) -> paceline.Distributed:
    strategy = paceline.strategies.diloco(50)
    plain: paceline.strategies.Strategy = paceline.strategies.all_reduce(unused=True)
    assert strategy != plain
    return paceline.distributed(torch.optim.SGD(model.parameters()), model=model, strategy=strategy)


def resume(examples: TensorDataset, state: dict[str, int]) -> dict[str, int]:
    loader = paceline.shard(DataLoader(examples, batch_size=8, shuffle=True), seed=7)
    plain: DataLoader[tuple[Tensor, ...]] = loader
    loader.load_state_dict(state)
    loader.set_epoch(loader.epoch + 1)
    assert_type(paceline.shard([1, 2]), list[int])
    assert len(plain) == len(loader)
    return loader.state_dict()
