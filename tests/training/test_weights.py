"""Over shm, parameters are views of the servers' own memory where that can be, and behave as copies everywhere else."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    sgd,
    train,
    train_alone,
)
from tests.training.views import ALL, aligned, of_many_pages, of_peers, run_steps, viewing
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.core.consistency import Consistency
from paceline.core.partition import Range
from paceline.training.flat import FlatParameters, Weights
from paceline.training.parameter_server import DistributedOptimizer
from paceline.update.named_rules import Add
from paceline.update.table import Segment, TableSpec
from paceline.worker.cache import TableCache


def in_double() -> nn.Module:
    return aligned().double()


def one_batch_in_double(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, micro_batch(rank, step, torch.float64)).backward()


# -- where parameters lie --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "servers", "expected"),
    [
        (aligned, 1, ALL),
        (aligned, 2, ALL - {"2.weight"}),  # which lies on both
        (in_double, 1, ALL),
        (mlp, 1, {"0.weight"}),  # the others do not start at a multiple of 64 bytes
        (mlp, 2, set()),
    ],
)
def test_parameters_in_one_piece_lie_in_the_servers_memory_and_stay_there(
    tmp_path: Path, make: Callable[[], nn.Module], servers: int, expected: set[str]
) -> None:
    backward = one_batch_in_double if make is in_double else one_batch

    def work(worker: Session) -> list[dict[str, int]]:
        model, places = make(), []
        optimizer = paceline.distributed(sgd(model), model=model)
        for step in range(4):
            assert viewing(model) == expected
            places.append({name: parameter.data_ptr() for name, parameter in model.named_parameters()})
            optimizer.zero_grad()
            backward(model, worker.rank, step)
            optimizer.step()
        return places

    for first, *others in run_job(tmp_path, work, workers=2, servers=servers, carrier="shm"):
        assert others == [first] * 3


@pytest.mark.parametrize("carrier", ["memory", "tcp", "shm"])
def test_nothing_is_live_where_memory_is_not_mapped_or_views_are_not_wanted(tmp_path: Path, carrier: str) -> None:
    recipe, views = Recipe(model=aligned, num_steps=5), False if carrier == "shm" else None

    def work(worker: Session) -> Tensor:
        model = recipe.model()
        optimizer = paceline.distributed(recipe.optimizer(model), views=views)
        run_steps(model, optimizer, worker.rank, range(recipe.num_steps))
        assert viewing(model) == set()
        return parameters(model)

    for found in run_job(tmp_path, work, workers=2, servers=1, carrier=carrier):
        assert torch.equal(found, train_alone(recipe, 2)[0])


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=aligned),
        Recipe(model=aligned, optimizer=sgd),
        Recipe(model=of_many_pages, optimizer=sgd),
        Recipe(model=in_double, backward=one_batch_in_double),
    ],
    ids=["adam", "sgd", "many-pages", "double"],
)
def test_views_and_copies_hold_the_bits_of_a_single_process(tmp_path: Path, recipe: Recipe, servers: int) -> None:
    expected = train_alone(recipe, 2)[0]
    for found in run_job(tmp_path, lambda worker: train(worker, recipe)[0], workers=2, servers=servers, carrier="shm"):
        assert torch.equal(found, expected)


def left(worker: Session, made: list[DistributedOptimizer]) -> None:
    worker.close()


def dropped(worker: Session, made: list[DistributedOptimizer]) -> None:
    made.clear()
    gc.collect()


@pytest.mark.parametrize("end", [left, dropped])
def test_what_shares_memory_with_a_parameter_is_the_workers_own_at_the_end(
    tmp_path: Path, end: Callable[[Session, list[DistributedOptimizer]], None]
) -> None:
    def work(worker: Session) -> None:
        model = aligned()
        made = [paceline.distributed(sgd(model), model=model)]
        run_steps(model, made[0], worker.rank, range(2))
        model[0].weight.data[0] = 7.0  # of the worker's own already
        kept = [parameter.data for parameter in model.parameters()]
        assert all(of_peers(tensor) for tensor in kept)
        before = [tensor.clone() for tensor in kept]
        end(worker, made)
        for tensor, values, parameter in zip(kept, before, model.parameters(), strict=True):
            assert not of_peers(tensor)
            assert torch.equal(tensor, values)
            tensor.add_(1.0)
            assert torch.equal(parameter, values + 1.0)  # they still share it

    run_job(tmp_path, work, carrier="shm")


def test_two_optimizers_view_two_tables(tmp_path: Path) -> None:
    first, second = Recipe(model=aligned, optimizer=sgd), Recipe(model=of_many_pages, optimizer=adam)

    def work(worker: Session) -> list[Tensor]:
        models = [first.model(), second.model()]
        optimizers = [
            paceline.distributed(recipe.optimizer(model), name=name, model=model)
            for recipe, model, name in zip((first, second), models, "ab", strict=True)
        ]
        for step in range(first.num_steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                one_batch(model, worker.rank, step)
                optimizer.step()
        assert all(viewing(model) for model in models)
        return [parameters(model) for model in models]

    expected = [train_alone(recipe, 2)[0] for recipe in (first, second)]
    for found in run_job(tmp_path, work, workers=2, servers=2, carrier="shm"):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_parameters_that_share_memory_with_others_stay_where_they_are(tmp_path: Path) -> None:
    def work(worker: Session) -> bool:
        of_one_vector, shared = aligned(), aligned().share_memory()
        vector = parameters(of_one_vector)
        nn.utils.vector_to_parameters(vector, of_one_vector.parameters())
        for number, model in enumerate((of_one_vector, shared)):
            optimizer = paceline.distributed(sgd(model), name=f"table {number}")
            run_steps(model, optimizer, worker.rank, range(2))
            assert viewing(model) == set()
        assert all(parameter.is_shared() for parameter in shared.parameters())
        assert not torch.equal(vector, parameters(aligned()))
        return torch.equal(vector, parameters(of_one_vector))

    assert run_job(tmp_path, work, workers=2, carrier="shm") == [True] * 2


def test_a_parameter_is_saved_alone(tmp_path: Path) -> None:
    def work(worker: Session) -> list[int]:
        model = aligned()
        optimizer = paceline.distributed(sgd(model), model=model)
        run_steps(model, optimizer, worker.rank, range(1))
        assert viewing(model) == ALL
        return [parameter.untyped_storage().nbytes() - parameter.nbytes for parameter in model.parameters()]

    assert run_job(tmp_path, work, carrier="shm") == [[0] * len(ALL)]


class Served:
    """A table whose values lie wherever the test says, instead of on servers."""

    def __init__(self, spec: TableSpec) -> None:
        self.cache = TableCache(spec, (Range(0, 0, spec.numel),), reads_own_writes=False, live=True)

    def lend(self, memory: memoryview) -> None:
        self.cache.install(0, memory, settled=0, includes=())

    def read(self, take: Callable[[TableCache], None], *, refresh: bool = True, exact: bool = False) -> None:
        take(self.cache)


def test_memory_that_is_lent_anew_is_viewed_instead() -> None:
    """As it is when a connection breaks: the descriptor comes again, and is mapped elsewhere."""
    weight = nn.Parameter(torch.zeros(2048))
    spec = TableSpec("w", (Segment("w", (2048,)),), "float32", Add(), "bsp", "sum", "reject")
    served = Served(spec)
    weights = Weights(FlatParameters.over({"w": weight}), served)  # pyright: ignore[reportArgumentType]
    for number in (1.0, 2.0):
        values = torch.full((2048,), number)
        served.lend(memoryview(values.numpy()).cast("B"))
        weights.fetch(refresh=True)
        assert (weight.data_ptr(), weight[0].item()) == (values.data_ptr(), number)


# -- what stays as it is ---------------------------------------------------------------------------------------------


def test_a_worker_that_left_keeps_values_that_others_no_longer_change(tmp_path: Path) -> None:
    others_are_done = threading.Event()

    def work(worker: Session) -> tuple[Tensor, Tensor]:
        model = aligned()
        optimizer = paceline.distributed(sgd(model), model=model)
        run_steps(model, optimizer, worker.rank, range(3))
        assert viewing(model) == ALL
        before = parameters(model)
        if worker.rank == 1:
            worker.close()
            assert viewing(model) == set()
            assert others_are_done.wait(120)
        else:
            run_steps(model, optimizer, worker.rank, range(3, 6))
            others_are_done.set()
        return before, parameters(model)

    stayed, left = run_job(tmp_path, work, workers=2, carrier="shm")
    assert torch.equal(left[0], left[1])
    assert torch.equal(left[0], stayed[0])
    assert not torch.equal(stayed[0], stayed[1])


def test_a_model_that_outlives_its_optimizer_keeps_its_values(tmp_path: Path) -> None:
    def work(worker: Session) -> bool:
        model = aligned()
        optimizer = paceline.distributed(sgd(model), model=model)
        run_steps(model, optimizer, worker.rank, range(2))
        before = parameters(model)
        del optimizer
        gc.collect()
        return viewing(model) == set() and torch.equal(parameters(model), before)

    assert run_job(tmp_path, work, carrier="shm") == [True]


def test_a_state_taken_in_a_snapshot_stays_and_training_goes_on_undisturbed(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        model = aligned()
        optimizer = paceline.distributed(sgd(model))
        taken: list[tuple[dict[str, Any], Tensor]] = []
        for step in range(6):
            run_steps(model, optimizer, worker.rank, range(step, step + 1))
            with optimizer.snapshot():
                taken.append((model.state_dict(), parameters(model)))
        for state, then in taken:
            assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in state.values()]), then)
        assert torch.equal(taken[-1][1], parameters(model))
        return parameters(model)

    expected = train_alone(Recipe(model=aligned, optimizer=sgd, num_steps=6), 2)[0]
    for found in run_job(tmp_path, work, workers=2, servers=2, carrier="shm"):
        assert torch.equal(found, expected)


def test_a_loaded_state_takes_over(tmp_path: Path) -> None:
    plain, recipe = aligned(), Recipe(model=aligned)
    trained = adam(plain)
    for step in range(3):
        one_batch(plain, 0, step)
        trained.step()
        trained.zero_grad()
    model_state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    state = trained.state_dict()

    def work(worker: Session) -> Tensor:
        model = recipe.model()
        optimizer = paceline.distributed(recipe.optimizer(model), model=model)
        run_steps(model, optimizer, worker.rank, range(2))
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
        assert viewing(model) == ALL
        assert all(torch.equal(value, model_state[name]) for name, value in model.state_dict().items())
        run_steps(model, optimizer, 0, range(3, 6))
        return parameters(model)

    found = run_job(tmp_path, work, workers=1, carrier="shm")
    run_steps(plain, trained, 0, range(3, 6))
    assert torch.equal(found[0], parameters(plain))


# -- without lockstep, on request ------------------------------------------------------------------------------------


@pytest.mark.parametrize("consistency", ["ssp:2", "essp:2", "asynchronous"])
def test_views_under_a_bound_are_never_too_old_and_train(tmp_path: Path, consistency: str) -> None:
    bound = Consistency.parse(consistency).bound

    def work(worker: Session) -> tuple[float, float]:
        counts = nn.Parameter(torch.zeros(32))
        counter = paceline.distributed(
            torch.optim.SGD([counts], lr=1.0), name="counts", consistency=consistency, views=True
        )
        assert of_peers(counts)
        for clock in range(1, 11):
            counts.grad = -torch.ones(32)
            counter.step()
            if bound is not None:
                assert counts.min() >= 2 * (clock - bound), f"read at clock {clock}: {counts}"
        worker.barrier()
        assert counts.tolist() == [20.0] * 32  # without another read: what they see is the servers' memory
        return loss_before_and_after(worker, consistency)

    for before, after in run_job(tmp_path, work, workers=2, servers=1, carrier="shm"):
        assert after < before / 4


def loss_before_and_after(worker: Session, consistency: str) -> tuple[float, float]:
    def loss() -> float:
        with torch.no_grad():
            return sum(float(loss_of(model, micro_batch(rank, step))) for rank in range(2) for step in range(5))

    model = aligned()
    optimizer: DistributedOptimizer = paceline.distributed(
        torch.optim.SGD(model.parameters(), lr=0.05), model=model, consistency=consistency, views=True
    )
    assert viewing(model) == ALL
    worker.barrier()
    before = loss()
    worker.barrier()
    for step in range(100):
        run_steps(model, optimizer, worker.rank, range(step % 5, step % 5 + 1))
    worker.barrier()
    return before, loss()
