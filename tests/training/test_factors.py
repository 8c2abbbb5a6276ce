"""Factors stand for gradients of linear layers on the way to servers: for those alone that are their product."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distant import make_distant
from tests.jobs import job, run_job
from tests.training.recipes import seeded
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.server.node import ServerNode
from paceline.training.factors import WeightFactors
from paceline.training.parameter_server import DistributedOptimizer
from paceline.wire.messages import FactoredPush, PushFrame

SIZE = 192  # a weight of so many rows and columns has 144 KiB
NUM_STEPS = 3
Backward = Callable[[nn.Module, int, int], None]


def two_layers() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 3)))


def batch(rank: int, step: int, size: int = 4) -> Tensor:
    return torch.randn(size, SIZE, generator=torch.Generator().manual_seed(100 * rank + step))


def one_batch(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step)).square().mean().backward()


def learn(
    worker: Session, make: Callable[[], nn.Module] = two_layers, backward: Backward = one_batch, **settings: Any
) -> tuple[Tensor, int]:
    """Train for a few steps; return the parameters, and how many gradients were sent as factors."""
    model = make()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.distributed(plain, model=model, **settings)
    assert isinstance(optimizer, DistributedOptimizer)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        backward(model, worker.rank, step)
        optimizer.step()
    optimizer.wait_for_values()
    worker.barrier()
    assert optimizer.num_refused == 0
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]), optimizer.num_factored


def beside_gradients(tmp_path: Path, *, workers: int = 1, servers: int = 1, carrier: str = "tcp", **how: Any) -> int:
    """Train with factors and with gradients; return how many factors were sent, once the values are the same."""
    settings: dict[str, Any] = {"workers": workers, "servers": servers, "carrier": carrier}
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    with_factors = run_job(tmp_path / "with", lambda worker: learn(worker, factors=True, **how), **settings)
    without = run_job(tmp_path / "without", lambda worker: learn(worker, **how), **settings)
    for (found, _), (expected, num_factored) in zip(with_factors, without, strict=True):
        assert num_factored == 0
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    counts = {num_factored for _, num_factored in with_factors}
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.parametrize(
    ("workers", "servers", "settings"),
    [
        (2, 1, {"consistency": "bsp"}),
        (1, 1, {"consistency": "ssp:2"}),
        (1, 1, {"consistency": "asynchronous"}),
        (1, 1, {"overlap": True}),
    ],
    ids=str,
)
def test_the_weights_of_large_layers_are_trained_by_factors(
    tmp_path: Path, workers: int, servers: int, settings: dict[str, Any]
) -> None:
    assert beside_gradients(tmp_path, workers=workers, servers=servers, **settings) == 2 * NUM_STEPS


def test_a_server_multiplies_only_the_rows_that_it_has(tmp_path: Path) -> None:
    assert beside_gradients(tmp_path, servers=3) == 4 * NUM_STEPS  # cuts lie within both weights


@pytest.mark.parametrize("servers", [1, 2])
def test_factors_of_one_use_give_the_bits_of_gradients(tmp_path: Path, servers: int) -> None:
    """Autograd multiplies the same matrices; with cuts on rows, that of a part has its sums in the same order."""
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    settings: dict[str, Any] = {"carrier": "tcp", "servers": servers}
    ((found, num),) = run_job(tmp_path / "with", lambda worker: learn(worker, factors=True), **settings)
    ((expected, _),) = run_job(tmp_path / "without", learn, **settings)
    assert num
    assert float((found - expected).abs().max()) <= (0 if servers == 1 else 1e-7)


def test_distant_servers_get_factors_while_others_send_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_distant(monkeypatch)
    assert beside_gradients(tmp_path, workers=2) == 2 * NUM_STEPS


def test_no_factors_are_sent_where_memory_is_shared(tmp_path: Path) -> None:
    assert beside_gradients(tmp_path, carrier="shm") == 0
    assert run_job(tmp_path, lambda worker: learn(worker, factors=True))[0][1] == 0  # frames handed over in memory


def twice(model: nn.Module, rank: int, step: int) -> None:
    model(model[0](batch(rank, step))).square().mean().backward()


def in_micro_batches(model: nn.Module, rank: int, step: int) -> None:
    for part in batch(rank, step).split(2):
        model(part).square().mean().backward()


def of_sequences(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step, 6).view(2, 3, SIZE)).square().mean().backward()


def of_a_sample(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step)[0]).square().mean().backward()


def after_an_evaluation(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step))  # whose graph is dropped
    with torch.no_grad():
        model(batch(rank, step))
    one_batch(model, rank, step)


def after_dropped_gradients(model: nn.Module, rank: int, step: int) -> None:
    one_batch(model, rank, step + 50)
    model.zero_grad()
    one_batch(model, rank, step)


@pytest.mark.parametrize(
    "backward", [twice, in_micro_batches, of_sequences, of_a_sample, after_an_evaluation, after_dropped_gradients]
)
def test_factors_add_up_as_gradients_do(tmp_path: Path, backward: Backward) -> None:
    assert beside_gradients(tmp_path, backward=backward) == 2 * NUM_STEPS


def tied() -> nn.Module:
    model = two_layers()
    assert isinstance(model, nn.Sequential)
    model[2].weight = model[0].weight  # pyright: ignore[reportAttributeAccessIssue]
    return model


def in_place() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.ReLU(inplace=True), nn.Linear(SIZE, 3)))


@pytest.mark.parametrize("make", [tied, in_place])
def test_a_weight_of_two_layers_and_outputs_that_change_in_place(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    assert beside_gradients(tmp_path, make=make) == NUM_STEPS


def with_many_samples(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step, SIZE // 2)).square().mean().backward()


def with_weights_in_the_loss(model: nn.Module, rank: int, step: int) -> None:
    penalty = sum(each.square().sum() for each in model.parameters())
    (model(batch(rank, step)).square().mean() + 1e-4 * penalty).backward()


def clipped(model: nn.Module, rank: int, step: int) -> None:
    one_batch(model, rank, step)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def past_the_layers(model: nn.Module, rank: int, step: int) -> None:
    assert isinstance(model, nn.Sequential)
    one_batch(model, rank, step)
    functional.linear(batch(rank, step), model[0].weight).square().mean().backward()  # pyright: ignore
    functional.linear(batch(rank, step), model[2].weight).square().mean().backward()  # pyright: ignore


@pytest.mark.parametrize("backward", [with_many_samples, with_weights_in_the_loss, clipped, past_the_layers])
def test_gradients_that_are_no_product_of_few_samples_are_sent_whole(tmp_path: Path, backward: Backward) -> None:
    assert beside_gradients(tmp_path, backward=backward) == 0


def test_a_server_clips_the_mean_of_products(tmp_path: Path) -> None:
    def work(worker: Session, *, factors: bool) -> tuple[Tensor, int]:
        model = two_layers()
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = paceline.distributed(plain, model=model, factors=factors, name=f"factors {factors}")
        assert isinstance(optimizer, DistributedOptimizer)
        one_batch(model, worker.rank, 0)
        norm = optimizer.clip_gradients(1e-3)
        assert norm > 0.1
        optimizer.step()
        worker.barrier()
        return torch.cat([each.detach().reshape(-1) for each in model.parameters()]), optimizer.num_factored

    def both(worker: Session) -> None:
        (found, num), (expected, _) = work(worker, factors=True), work(worker, factors=False)
        assert num == 2
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        first = torch.cat([each.detach().reshape(-1) for each in two_layers().parameters()])
        assert float((found - first).norm()) < 1e-3

    run_job(tmp_path, both, workers=2, carrier="tcp")


def test_that_a_gradient_is_sent_whole_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_job(tmp_path, lambda worker: learn(worker, backward=clipped, factors=True), carrier="tcp")
    told = capsys.readouterr().err
    assert re.findall(r"the gradient of '(\S+)' is not the product", told) == ["0.weight", "2.weight"]


def in_bfloat16(model: nn.Module, rank: int, step: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(rank, step)).square().mean()
    loss.backward()


def of_bfloat16(model: nn.Module, rank: int, step: int) -> None:
    model(batch(rank, step).bfloat16()).square().mean().backward()


def test_gradients_of_rounded_factors_are_sent_whole(tmp_path: Path) -> None:
    assert beside_gradients(tmp_path, backward=in_bfloat16) == 0
    half = partial(two_layers().to, torch.bfloat16)
    assert run_job(tmp_path, lambda worker: learn(worker, half, of_bfloat16, factors=True), carrier="tcp")[0][1] == 0


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
def test_a_compiled_layer_records_nothing() -> None:
    layer = nn.Linear(SIZE, SIZE)
    known = WeightFactors("weight", layer.weight, pytest.fail)
    known.follow([layer])
    torch.compile(layer, backend="eager")(batch(0, 0)).sum().backward()
    assert layer.weight.grad is not None
    assert known.take(layer.weight.grad) is None


def test_gradients_that_are_not_finite_are_refused_as_ever(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[int, int]:
        model = two_layers()
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, factors=True)
        assert isinstance(optimizer, DistributedOptimizer)
        (model(batch(0, 0)).sum() * torch.inf).backward()
        optimizer.step()
        worker.barrier()
        return optimizer.num_refused, optimizer.num_factored

    assert run_job(tmp_path, work, carrier="tcp") == [(1, 0)]


def test_products_that_overflow_on_the_server_are_refused_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.update.factors.Factors.explain", lambda *_: True)

    def work(worker: Session) -> tuple[int, int]:
        model = two_layers()
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, factors=True)
        assert isinstance(optimizer, DistributedOptimizer)
        assert isinstance(model, nn.Sequential)
        model[0](1e30 * batch(0, 0)).mul(1e30).sum().backward()
        for parameter in model[0].parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()  # what the worker looks at is finite
        optimizer.step()
        worker.barrier()
        return optimizer.num_refused, optimizer.num_factored

    assert run_job(tmp_path, work, carrier="tcp") == [(1, 1)]


def test_a_lost_push_is_repeated_with_its_factors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, dispatch = list[object](), ServerNode._dispatch

    def lose_the_first(node: ServerNode, hello: Any, connection: Any, message: object, frame: Any) -> None:
        if isinstance(message, FactoredPush | PushFrame):
            seen.append(message)
            if len(seen) == 1:
                return
        dispatch(node, hello, connection, message, frame)

    monkeypatch.setattr(ServerNode, "_dispatch", lose_the_first)
    with job(tmp_path, carrier="tcp") as started:
        ((_, num_factored),) = started.run(lambda worker: learn(worker, factors=True))
    assert num_factored == 2 * NUM_STEPS
    assert all(isinstance(each, FactoredPush) for each in seen)
    assert seen[0] == seen[1]
    assert len(seen) > NUM_STEPS


def test_hooks_end_with_the_worker(tmp_path: Path) -> None:
    model = two_layers()

    def work(worker: Session) -> paceline.Distributed:
        return paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, factors=True)

    kept = run_job(tmp_path, work, carrier="tcp")
    assert kept
    assert not any(layer._forward_hooks for layer in model.modules())
    assert not any(each._backward_hooks for each in model.parameters())


def test_what_it_does_not_go_with_is_refused(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = two_layers()
        for settings, said in (
            ({"factors": True}, "factors=True, which follows the layers"),
            ({"factors": True, "model": model, "strategy": "all-reduce"}, "AllReduce.* and factors=True"),
            ({"factors": True, "model": model, "strategy": "local-sgd:2"}, "and factors=True, which is for servers"),
        ):
            with pytest.raises(UsageError, match=said):
                paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), **settings)

    run_job(tmp_path, work)


def test_slices_are_refused(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = two_layers()
        kept = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, factors=True)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch(0, 0)), batch_size=4)
        with pytest.raises(UsageError, match="does not go with factors=True"):
            next(iter(paceline.shard(loader, slices=2)))
        assert kept.no_slices

    run_job(tmp_path, work, carrier="tcp")


def test_what_is_recorded_of_a_graph_that_is_dropped_goes_with_it() -> None:
    layer = nn.Linear(SIZE, SIZE)
    known = WeightFactors("weight", layer.weight, pytest.fail)
    known.follow([layer])
    layer(batch(0, 0))
    assert known.take(torch.zeros(SIZE, SIZE)) is None
    layer(batch(0, 0)).sum().backward()
    assert layer.weight.grad is not None
    taken = known.take(layer.weight.grad)
    assert taken is not None
    assert torch.equal(taken.product(), layer.weight.grad)
