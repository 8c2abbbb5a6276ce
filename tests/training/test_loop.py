"""What ordinary training loops do works the same on the servers: compared bit for bit with one process."""

import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import (
    Recipe,
    adam,
    loss_of,
    micro_batch,
    mlp,
    one_batch,
    parameters,
    seeded,
    sgd,
    train,
    train_alone,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import paceline
from paceline.api.session import Session
from paceline.errors import Refused, UsageError


def assert_same_bits(directory: Path, recipe: Recipe, *, workers: int = 2, servers: int = 2) -> None:
    expected = train_alone(recipe, workers)[0]
    found = run_job(directory, lambda worker: train(worker, recipe)[0], workers=workers, servers=servers, carrier="shm")
    assert all(torch.equal(values, expected) for values in found)


# -- schedulers ------------------------------------------------------------------------------------------------------


def every_step(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> Callable[..., Callable]:
    def schedule(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        scheduler = make(optimizer)
        return lambda step: scheduler.step()

    return schedule


def on_plateau(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    return lambda step: scheduler.step(1.0)


def warm_up_then_anneal(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 15)], [5])


SCHEDULES = {
    "step": every_step(lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5)),
    "one-cycle": every_step(lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20)),
    "cosine": every_step(lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
    "lambda": every_step(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step))),
    "sequential": every_step(warm_up_then_anneal),
    "plateau": on_plateau,
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_scheduler_is_followed(
    tmp_path: Path, schedule: Callable[[torch.optim.Optimizer], Callable[[int], None]], optimizer: Callable
) -> None:
    assert_same_bits(tmp_path, Recipe(optimizer=optimizer, schedule=schedule))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "plateau"])
def test_a_scheduler_that_is_stepped_as_the_page_on_snapshots_says_goes_on_without_a_warning(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "snapshots.md").read_text()
    going_on = page[page.index("with warnings.catch_warnings():") : page.index("for epoch in range(loader.epoch")]

    def rates(clock: int) -> list[float]:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), model=model, name=f"from {clock}")
        step = SCHEDULES[name](optimizer)
        scheduler = SimpleNamespace(step=lambda: step(0))
        exec(going_on, {"warnings": warnings, "scheduler": scheduler, "told": SimpleNamespace(clock=clock)})  # noqa: S102 - of the page
        found: list[float] = []
        for number in range(clock, 12):
            found.append(optimizer.param_groups[0]["lr"])
            one_batch(model, 0, number)
            optimizer.step()
            scheduler.step()
        return found

    with paceline.connect() as ps:
        paceline.init(ps)
        assert rates(7) == rates(0)[7:]


# -- gradients -------------------------------------------------------------------------------------------------------


def three_micro_batches(model: nn.Module, rank: int, step: int) -> None:
    for part in range(3):
        (loss_of(model, micro_batch(rank, 3 * step + part)) / 3).backward()


def clipped(model: nn.Module, rank: int, step: int) -> None:
    one_batch(model, rank, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05 * (1 + rank))


def last_layer_only_from_the_second_worker(model: nn.Module, rank: int, step: int) -> None:
    one_batch(model, rank, step)
    if rank != 1:
        for parameter in model[2].parameters():
            parameter.grad = None


def last_layer_never(model: nn.Module, rank: int, step: int) -> None:
    one_batch(model, rank, step)
    for parameter in model[2].parameters():
        parameter.grad = None


def last_layer_after_ten_steps(model: nn.Module, rank: int, step: int) -> None:
    model[2].requires_grad_(step >= 10)
    one_batch(model, rank, step)


BACKWARDS = [
    three_micro_batches,
    clipped,
    last_layer_only_from_the_second_worker,
    last_layer_never,
    last_layer_after_ten_steps,
]


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_gradients_are_what_the_loop_leaves_in_the_parameters(
    tmp_path: Path, backward: Callable[[nn.Module, int, int], None], optimizer: Callable
) -> None:
    assert_same_bits(tmp_path, Recipe(optimizer=optimizer, backward=backward), workers=3)


def tied() -> nn.Module:
    """An encoder and a decoder that share their weight."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(9, 9), nn.Linear(9, 9)
            self.decoder.weight = self.encoder.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(torch.tanh(self.encoder(x)))[:, :3]

    return seeded(Tied)


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def groups_with_remarks(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": list(layer.named_parameters(prefix=name)), "name": name}
        for name, layer in (("a", model[0]), ("b", model[2]))
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def channels_last() -> nn.Module:
    def make() -> nn.Module:
        layers = [nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(16, 3)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)

    return seeded(make)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=tied),
        Recipe(model=frozen),
        Recipe(optimizer=two_groups),
        Recipe(optimizer=two_groups, schedule=SCHEDULES["one-cycle"]),
        Recipe(optimizer=groups_with_remarks),
        Recipe(optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True)),
        Recipe(optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)),
        Recipe(optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01)),
    ],
    ids=["tied", "frozen", "groups", "groups-one-cycle", "named-groups", "rmsprop", "adagrad", "adafactor"],
)
def test_parameters_and_groups_of_every_kind(tmp_path: Path, recipe: Recipe) -> None:
    assert_same_bits(tmp_path, recipe)


def test_a_model_in_channels_last_order_trains(tmp_path: Path) -> None:
    recipe = Recipe(model=channels_last, optimizer=sgd)
    expected = train_alone(recipe, 2)[0]
    for found in run_job(tmp_path, lambda worker: train(worker, recipe)[0], workers=2, servers=2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# -- the optimizer as an object --------------------------------------------------------------------------------------


def test_a_closure_is_evaluated_once_with_gradients_on(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[float | None, int]:
        model, calls = mlp(), []
        optimizer = paceline.distributed(sgd(model))

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, micro_batch(0, 0))
            loss.backward()
            calls.append(loss)
            return float(loss.detach())

        with torch.no_grad():
            found = optimizer.step(closure)
        assert found == float(loss_of(mlp(), micro_batch(0, 0)).detach())
        assert not torch.equal(parameters(model), parameters(mlp()))
        return found, len(calls)

    assert run_job(tmp_path, work)[0][1] == 1


def test_hooks_and_repr_are_those_of_an_optimizer(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[list[str], str]:
        seen: list[str] = []
        model = mlp()
        optimizer = paceline.distributed(sgd(model))
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        one_batch(model, 0, 0)
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        return seen, repr(optimizer)

    seen, text = run_job(tmp_path, work)[0]
    assert seen == ["before", "after"]
    assert text == "Distributed SGD, bsp ('model', 4 parameters, lr 0.05)"


def test_a_profiler_and_hooks_on_all_optimizers_see_steps(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[list[str], int]:
        seen: list[str] = []
        model = mlp()
        optimizer = paceline.distributed(sgd(model))
        one_batch(model, 0, 0)
        optimizer.step()
        handle = register_optimizer_step_post_hook(lambda stepped, *_: seen.append(type(stepped).__name__))
        try:
            one_batch(model, 0, 1)
            optimizer.step()
        finally:
            handle.remove()
        one_batch(model, 0, 2)
        # Without `acc_events` torch 2.10 warns of cycles, of which this has one.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
            optimizer.step()
        named = [event.key for event in profiled.key_averages() if event.key.startswith("Optimizer.step#")]
        return seen, len(named)

    assert run_job(tmp_path, work, workers=1) == [(["DistributedOptimizer"], 1)]


def test_workers_start_from_the_parameters_of_worker_0(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        model = mlp()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(worker.rank)
        paceline.distributed(sgd(model))
        return parameters(model)

    assert all(torch.equal(found, parameters(mlp())) for found in run_job(tmp_path, work, workers=3, servers=2))


# -- what cannot be --------------------------------------------------------------------------------------------------


def small(rows: int = 2) -> nn.Parameter:
    return nn.Parameter(torch.zeros(rows, 2))


class Custom(torch.optim.SGD):
    pass


def of_float8() -> torch.optim.Optimizer:
    values = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))
    return torch.optim.SGD([("a", small()), ("b", values)], lr=0.1)


def stepped() -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([weight := small()], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda: torch.optim.LBFGS([small()]), {}, "LBFGS cannot run on a server: it evaluates the model several"),
        (lambda: Custom([small()], lr=0.1), {}, "Custom is not a class of torch.optim"),
        (of_float8, {}, r"dtypes float8_e5m2 \('b'\); expected one of .* leave it out of the optimizer"),
        (stepped, {}, "already taken steps: distribute a new one"),
        (lambda: torch.optim.SGD([small()], lr=torch.tensor(0.1)), {}, "lr of .* is a Tensor"),
        (lambda: torch.optim.SGD([small()]), {"consistency": "asynchronous", "fetch_every": None}, "give a number"),
        (lambda: torch.optim.SGD([small()]), {"fetch_every": 0}, "fetch_every is 0"),
        (lambda: torch.optim.SGD([small()]), {"consistency": "sspp:3"}, "unknown consistency 'sspp:3'"),
        (lambda: torch.optim.SGD([small()]), {"consistency": "ssp:-1"}, "staleness bound is -1"),
        (lambda: torch.optim.SGD([small()]), {"scale": "median"}, "scale is 'median'"),
        (lambda: torch.optim.SGD([small()]), {"nonfinite": "skip"}, "nonfinite is 'skip'"),
        (lambda: torch.optim.SGD([small()]), {"name": ""}, "it has no name"),
    ],
)
def test_what_cannot_be_distributed_is_refused_with_the_reason(
    tmp_path: Path, make: Callable[[], torch.optim.Optimizer], settings: dict, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run_job(tmp_path, lambda worker: paceline.distributed(make(), **settings))


def test_more_servers_than_parameters_are_refused(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match=r"table 'model': 3 servers for a table of 2 parameters. Use at most 2"):
        run_job(tmp_path, lambda worker: paceline.distributed(torch.optim.SGD([weight], lr=0.1)), servers=3)


def test_two_optimizers_need_two_names(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        paceline.distributed(sgd(mlp()), name="model")
        paceline.distributed(sgd(mlp()), name="model")

    with pytest.raises(UsageError, match=r"has distributed 'model' already: .* a name of its own"):
        run_job(tmp_path, work)


def test_a_group_cannot_come_later(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        paceline.distributed(sgd(mlp())).add_param_group({"params": [small()]})

    with pytest.raises(UsageError, match="all its parameters from the start"):
        run_job(tmp_path, work)


def test_a_sparse_gradient_is_refused(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        table = nn.Embedding(4, 2, sparse=True)
        optimizer = paceline.distributed(torch.optim.SGD(table.parameters(), lr=0.1), model=table)
        table(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(
        UsageError,
        match=r"'weight' has a sparse gradient: build its layer with sparse=False, or as paceline\.Embedding",
    ):
        run_job(tmp_path, work)


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 3))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: sgd(wider()),
            r"'group0.0' \(18, 9\) here and 'group0.0' \(17, 9\) there\. \('group0.0' is parameter 0 of .*model=",
        ),
        (lambda: adam(mlp()), "the update rule is torch.optim.Adam here and torch.optim.SGD there"),
        (lambda: torch.optim.SGD(mlp().parameters(), lr=0.1, momentum=0.9), "lr of group 0 is 0.1 here and 0.05 there"),
        (lambda: sgd(mlp().double()), "the dtype is float64 here and float32 there"),
    ],
)
def test_workers_that_differ_are_refused_with_the_first_differences(
    tmp_path: Path, other: Callable[[], torch.optim.Optimizer], message: str
) -> None:
    first_is_in = threading.Event()

    def work(worker: Session) -> None:
        if worker.rank == 1:
            assert first_is_in.wait(120)
        paceline.distributed(sgd(mlp()) if worker.rank == 0 else other())
        first_is_in.set()

    with pytest.raises(Refused, match=message):
        run_job(tmp_path, work, workers=2, servers=2)


def test_workers_with_different_settings_are_refused(tmp_path: Path) -> None:
    first_is_in = threading.Event()

    def work(worker: Session) -> None:
        if worker.rank == 1:
            assert first_is_in.wait(120)
        paceline.distributed(sgd(mlp()), consistency="bsp" if worker.rank == 0 else "ssp:3")
        first_is_in.set()

    with pytest.raises(Refused, match="the consistency is ssp:3 here and bsp there"):
        run_job(tmp_path, work, workers=2)


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["bsp", "all-reduce", "local-sgd:2"])
def test_a_step_during_one_of_another_thread_is_refused_and_harms_nothing(strategy: str) -> None:
    with paceline.connect() as ps:
        paceline.init(ps)
        model = mlp()
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        expected = r"worker 0, step of 'model': another thread is in a step of it, and one thread steps .* at a time"
        refused = list[Exception]()

        def step_elsewhere() -> None:
            try:
                optimizer.step()
            except UsageError as error:
                refused.append(error)

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, micro_batch(0, 0))
            loss.backward()
            other = threading.Thread(target=step_elsewhere)
            other.start()
            other.join()
            return loss.item()

        for step in range(3):
            optimizer.step(closure)
            assert len(refused) == step + 1
            assert re.match(expected, str(refused[-1]))
            assert ps.node.clock == step + 1
