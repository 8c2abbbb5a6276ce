"""State goes from the servers into a plain torch optimizer and back, and training continues with the same bits."""

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import job, run_job
from tests.training.recipes import Recipe, accumulate, adam, mlp, one_batch, parameters, sgd
from tests.training.test_buffers import normalised
from torch import Tensor, nn
from torch.optim import lr_scheduler

import paceline
from paceline.api.session import Session
from paceline.errors import Refused, UsageError

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
NUM_WORKERS = 2
HALF = 10


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups whose order is not that of the model, and a frozen parameter among them."""
    model[0].bias.requires_grad_(False)
    return torch.optim.AdamW(
        [{"params": model[2].parameters(), "lr": 0.02}, {"params": model[0].parameters()}], lr=0.01
    )


OPTIMIZERS = [
    sgd,
    adam,
    groups,
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
]
NAMES = ["sgd", "adam", "groups", "plain-sgd", "adagrad", "rmsprop"]


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        one_batch(model, rank, step)
        optimizer.step()


def run_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        accumulate(model, Recipe(), NUM_WORKERS, step)
        optimizer.step()


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_a_state_that_plain_torch_has_loaded_and_saved_in_double_precision_comes_back(
    tmp_path: Path, name: str
) -> None:
    """Torch casts what a parameter has once, the product of the momenta for example, to the dtype of the parameter."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3 + number)
        optimizer.step()

    def work(_: Session) -> tuple[Tensor, Tensor]:
        models = [mlp().double(), mlp().double()]
        plain, wrapped = (getattr(torch.optim, name)(model.parameters(), lr=0.1) for model in models)
        optimizer = paceline.distributed(wrapped, model=models[1], views=False)
        step(models[1], optimizer, 0)
        plain.load_state_dict(optimizer.state_dict())
        models[0].load_state_dict(models[1].state_dict())
        for number in (1, 2):
            step(models[0], plain, number)
        models[1].load_state_dict(models[0].state_dict())
        optimizer.load_state_dict(plain.state_dict())
        for model, own in zip(models, (plain, optimizer), strict=True):
            step(model, own, 3)
        return parameters(models[0]), parameters(models[1])

    [(expected, found)] = run_job(tmp_path, work)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_a_plain_optimizer_takes_over(tmp_path: Path, make: MakeOptimizer) -> None:
    def work(worker: Session) -> tuple[dict[str, Any], dict[str, Any]]:
        model = mlp()
        optimizer = paceline.distributed(make(model))
        run_steps(model, optimizer, worker.rank, range(HALF))
        return saved(model.state_dict()), saved(optimizer.state_dict())

    model_state, optimizer_state = run_job(tmp_path, work, workers=NUM_WORKERS, servers=3)[0]
    model = mlp()
    optimizer = make(model)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    run_alone(model, optimizer, range(HALF, 2 * HALF))

    expected = mlp()
    run_alone(expected, make(expected), range(2 * HALF))
    assert torch.equal(parameters(model), parameters(expected))


@pytest.mark.parametrize("carrier", ["memory", "shm"])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
def test_it_takes_over_from_a_plain_optimizer(tmp_path: Path, make: MakeOptimizer, carrier: str) -> None:
    plain = mlp()
    optimizer = make(plain)
    run_alone(plain, optimizer, range(HALF))
    model_state, optimizer_state = saved(plain.state_dict()), saved(optimizer.state_dict())
    run_alone(plain, optimizer, range(HALF, 2 * HALF))

    def work(worker: Session) -> Tensor:
        model = mlp()
        distributed = paceline.distributed(make(model))
        run_steps(model, distributed, worker.rank, range(3))  # what is loaded replaces all of this
        model.load_state_dict(model_state)
        distributed.load_state_dict(optimizer_state)
        run_steps(model, distributed, worker.rank, range(HALF, 2 * HALF))
        return parameters(model)

    for found in run_job(tmp_path, work, workers=NUM_WORKERS, servers=3, carrier=carrier):
        assert torch.equal(found, parameters(plain))


def test_the_state_of_a_plain_optimizer_and_that_of_the_servers_are_equal(tmp_path: Path) -> None:
    def work(worker: Session) -> dict[str, Any]:
        model = mlp()
        optimizer = paceline.distributed(adam(model))
        scheduler = lr_scheduler.StepLR(optimizer, 4)
        for step in range(HALF):
            run_steps(model, optimizer, worker.rank, range(step, step + 1))
            scheduler.step()
        return optimizer.state_dict()

    model = mlp()
    optimizer = adam(model)
    scheduler = lr_scheduler.StepLR(optimizer, 4)
    for step in range(HALF):
        run_alone(model, optimizer, range(step, step + 1))
        scheduler.step()
    expected = optimizer.state_dict()
    for found in run_job(tmp_path, work, workers=NUM_WORKERS, servers=2):
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        for index, tensors in expected["state"].items():
            assert all(torch.equal(found["state"][index][name], value) for name, value in tensors.items())


def test_loading_sets_the_buffers_on_the_servers_too(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        model = normalised()
        optimizer = paceline.distributed(sgd(model), model=model)
        run_steps(model, optimizer, worker.rank, range(2))
        model[1].running_mean.fill_(5.0)
        optimizer.load_state_dict(optimizer.state_dict())
        return model[1].running_mean.clone()

    assert all(torch.equal(found, torch.full((4,), 5.0)) for found in run_job(tmp_path, work, workers=2))


@pytest.mark.parametrize("consistency", ["ssp:20", "essp:20", "asynchronous"])
def test_what_was_pushed_before_the_load_does_not_come_back(tmp_path: Path, consistency: str) -> None:
    worker_0_is_ready = threading.Event()

    def work(worker: Session) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0), consistency=consistency)
        if worker.rank == 0:
            worker_0_is_ready.set()
        assert worker_0_is_ready.wait(120)
        for _ in range(0 if worker.rank == 0 else 20):
            weight.grad = torch.ones(1)
            optimizer.step()
        with torch.no_grad():
            weight.fill_(7.0)
        optimizer.load_state_dict(optimizer.state_dict())
        return weight.item()

    assert run_job(tmp_path, work, workers=3) == [7.0] * 3


def other_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": layer.parameters()} for layer in (model[0], model[2])])


def wider(model: nn.Module) -> torch.optim.Optimizer:
    other = nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 3))
    optimizer = adam(other)
    one_batch(other, 0, 0)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: other_groups(mlp()).state_dict(), r"parameter groups of \[2, 2\] parameters, .* has \[4\]"),
        (
            lambda: wider(mlp()).state_dict(),
            r"'exp_avg' of parameter 'group0.0' has shape \(18, 9\), expected \(17, 9\)",
        ),
        (lambda: mlp().state_dict(), "has 'state' and 'param_groups', this has"),
    ],
)
def test_the_state_of_another_model_is_refused_and_changes_nothing(
    tmp_path: Path, state: Callable[[], dict[str, Any]], message: str
) -> None:
    def work(worker: Session) -> bool:
        model = mlp()
        optimizer = paceline.distributed(adam(model))
        with pytest.raises(UsageError, match=message):
            optimizer.load_state_dict(state())
        with optimizer.snapshot():
            return torch.equal(parameters(model), parameters(mlp()))

    assert run_job(tmp_path, work, workers=2, servers=2) == [True, True]


def transposed() -> nn.Module:
    """A model whose parameters lie in memory in another order than that of their shapes."""
    model = mlp()
    images = model[0].weight.detach().view(17, 3, 3, 1).to(memory_format=torch.channels_last)
    model[0].weight = nn.Parameter(images)
    model[0].forward = lambda batch: nn.functional.linear(batch, model[0].weight.reshape(17, 9), model[0].bias)
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    assert not any(layer.weight.is_contiguous() for layer in (model[0], model[2]))
    return model


@pytest.mark.parametrize("make", OPTIMIZERS, ids=NAMES)
@pytest.mark.parametrize("servers", [1, 3])
def test_parameters_may_lie_in_memory_as_they_like(tmp_path: Path, make: MakeOptimizer, servers: int) -> None:
    plain = transposed()
    optimizer = make(plain)
    run_alone(plain, optimizer, range(3))
    model_state, optimizer_state = saved(plain.state_dict()), saved(optimizer.state_dict())
    run_alone(plain, optimizer, range(3, 6))

    def work(worker: Session) -> Tensor:
        model = transposed()
        distributed = paceline.distributed(make(model))
        model.load_state_dict(model_state)
        distributed.load_state_dict(optimizer_state)
        run_steps(model, distributed, worker.rank, range(3, 6))
        again = make(transposed())
        again.load_state_dict(distributed.state_dict())
        return parameters(model)

    for found in run_job(tmp_path, work, workers=NUM_WORKERS, servers=servers):
        assert torch.equal(found, parameters(plain))


@pytest.mark.parametrize("strategy", ["bsp", "all-reduce", "local-sgd:2", "downpour:1"])
def test_a_state_that_one_worker_cannot_load_is_loaded_by_none(tmp_path: Path, strategy: Any) -> None:
    def work(worker: Session) -> bool:
        model = mlp()
        optimizer = paceline.distributed(adam(model), strategy=strategy, model=model)
        state = other_groups(mlp()).state_dict() if worker.rank == 1 else adam(mlp()).state_dict()
        state["param_groups"][0]["lr"] = 7.0
        with pytest.raises((UsageError, ValueError, Refused)) as error:
            optimizer.load_state_dict(state)
        told.append(f"{worker.rank}: {error.value}")
        if strategy == "bsp":
            assert optimizer.param_groups[0]["lr"] != 7.0
        with optimizer.snapshot():
            return torch.equal(parameters(model), parameters(mlp()))

    told: list[str] = []
    assert run_job(tmp_path, work, workers=3) == [True] * 3
    assert len([one for one in told if "worker 1:" in one and "Error" in one]) == 2, told


def test_what_worker_0_cannot_send_is_told_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the state")

    def work(worker: Session) -> str:
        model = mlp()
        optimizer = paceline.distributed(adam(model))
        state = optimizer.state_dict()
        worker.barrier()
        monkeypatch.setattr("paceline.training.parameter_server.send_state", fail)
        with pytest.raises(MemoryError if worker.rank == 0 else Refused) as error:
            optimizer.load_state_dict(state)
        return str(error.value)

    first, *others = run_job(tmp_path, work, workers=3)
    assert first == "no room for the state"
    assert others == ["server 0 refused: worker 0: MemoryError: no room for the state"] * 2


def test_a_load_whose_first_worker_dies_is_told_to_the_others(tmp_path: Path) -> None:
    def work(worker: Session) -> str:
        model = mlp()
        optimizer = paceline.distributed(adam(model))
        state = optimizer.state_dict()
        worker.barrier()
        if worker.rank == 0:
            started.kill(worker)
            return ""
        with pytest.raises(Refused, match="worker 0 takes part no more") as error:
            optimizer.load_state_dict(state)
        return str(error.value)

    with job(tmp_path, workers=3) as started:
        assert started.run(work)[0] == ""


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file and back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
