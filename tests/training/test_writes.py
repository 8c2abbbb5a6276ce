"""What a script writes to its parameters is gone with the next step, views or not; nothing else is disturbed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import Recipe, loss_of, micro_batch, mlp, one_batch, parameters, sgd, train_alone
from tests.training.views import ALL, aligned, of_many_pages, run_steps, viewing
from torch import Tensor, nn

import paceline
from paceline.api.session import Session


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def past_autograd(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def through_numpy(model: nn.Module) -> None:
    model[0].weight.detach().numpy()[0] = 3.0


def to_a_page_in_the_middle(model: nn.Module) -> None:
    model[0].weight.data[300, 0] = 3.0  # no tensor starts on this page


def in_other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.01, 0.01)


def first_in_place_then_in_other_memory(model: nn.Module) -> None:
    past_autograd(model)
    in_other_memory(model)


def in_one_vector(model: nn.Module) -> None:
    nn.utils.vector_to_parameters(torch.zeros_like(parameters(model)), model.parameters())


WRITES = [
    in_place,
    past_autograd,
    through_numpy,
    to_a_page_in_the_middle,
    in_other_memory,
    first_in_place_then_in_other_memory,
    in_one_vector,
]


@pytest.mark.parametrize("write", WRITES)
def test_what_a_script_writes_is_gone_after_the_step(tmp_path: Path, write: Callable[[nn.Module], None]) -> None:
    def work(worker: Session) -> Tensor:
        model = of_many_pages()
        optimizer = paceline.distributed(sgd(model))
        for step in range(6):
            optimizer.zero_grad()
            one_batch(model, worker.rank, step)
            before = parameters(model)
            if step % 2 == 0:
                write(model)
                assert not torch.equal(parameters(model), before)
            optimizer.step()
        return parameters(model)

    expected = train_alone(Recipe(model=of_many_pages, optimizer=sgd, num_steps=6), 2)[0]
    for found in run_job(tmp_path, work, workers=2, servers=1, carrier="shm"):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("write", [past_autograd, in_other_memory])
def test_what_a_script_replaces_becomes_a_view_again(tmp_path: Path, write: Callable[[nn.Module], None]) -> None:
    def work(worker: Session) -> bool:
        model = aligned()
        optimizer = paceline.distributed(sgd(model), model=model)
        write(model)
        run_steps(model, optimizer, worker.rank, range(1))
        return viewing(model) == ALL

    assert run_job(tmp_path, work, carrier="shm") == [True]


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("write", [in_place, past_autograd, in_other_memory])
def test_a_snapshot_shows_what_the_servers_hold_and_leaves_what_a_script_wrote(
    tmp_path: Path, write: Callable[[nn.Module], None], views: bool
) -> None:
    def work(worker: Session) -> bool:
        model = of_many_pages()
        optimizer = paceline.distributed(sgd(model), views=views)
        run_steps(model, optimizer, worker.rank, range(2))
        right = parameters(model)
        write(model)
        written = parameters(model)
        with optimizer.snapshot():
            assert torch.equal(parameters(model), right)
        return torch.equal(parameters(model), written)

    assert run_job(tmp_path, work, workers=2, carrier="shm") == [True] * 2


@pytest.mark.parametrize("make", [aligned, mlp])
def test_a_graph_of_values_that_have_changed_is_refused_by_autograd(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    def work(worker: Session) -> None:
        model = make()
        optimizer = paceline.distributed(sgd(model))
        one_batch(model, worker.rank, 0)
        loss = loss_of(model, micro_batch(worker.rank, 1))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_job(tmp_path, work, workers=2, carrier="shm")


def load_first_values(model: nn.Module) -> None:
    model.load_state_dict(mlp().state_dict())


UNDONE = "the script has changed the values of"


@pytest.mark.parametrize("carrier", ["shm", "tcp", "memory"])
@pytest.mark.parametrize("write", [in_place, past_autograd, load_first_values])
def test_what_is_undone_is_told_once(
    tmp_path: Path, write: Callable[[nn.Module], None], carrier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(worker: Session) -> None:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), model=model)
        for step in range(3):
            write(model)
            run_steps(model, optimizer, worker.rank, range(step, step + 1))

    run_job(tmp_path, work, workers=2, carrier=carrier)
    told = capsys.readouterr().err
    assert told.count(UNDONE) == 2
    assert f"worker 1, 'model': {UNDONE} '0.weight' after a step" in told


def training_with(change: Callable[[nn.Module], None]) -> Callable[[Session], None]:
    """Return what a worker does that changes its model behind each step."""

    def work(worker: Session) -> None:
        model = of_many_pages()
        optimizer = paceline.distributed(sgd(model), model=model)
        for step in range(3):
            run_steps(model, optimizer, worker.rank, range(step, step + 1))
            change(model)

    return work


@pytest.mark.parametrize("write", [through_numpy, to_a_page_in_the_middle, in_other_memory, in_one_vector])
def test_what_torch_does_not_count_is_told_of_views(
    tmp_path: Path, write: Callable[[nn.Module], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_job(tmp_path, training_with(write), workers=2, carrier="shm")
    assert capsys.readouterr().err.count(UNDONE) == 2


def converted(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter.data


def kept_elsewhere_for_a_while(model: nn.Module) -> None:
    held = [parameter.data for parameter in model.parameters()]
    in_other_memory(model)
    for parameter, values in zip(model.parameters(), held, strict=True):
        parameter.data = values


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@pytest.mark.parametrize("change", [converted, kept_elsewhere_for_a_while])
def test_what_changes_no_value_is_not_told(
    tmp_path: Path, change: Callable[[nn.Module], None], carrier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_job(tmp_path, training_with(change), workers=2, carrier=carrier)
    assert UNDONE not in capsys.readouterr().err


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_values_that_a_state_takes_along_count_and_nothing_is_told(
    tmp_path: Path, carrier: str, overlap: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(worker: Session) -> list[float]:
        model = nn.Sequential(nn.Linear(9, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        optimizer = paceline.distributed(sgd(model), model=model, overlap=overlap)
        run_steps(model, optimizer, worker.rank, range(2))
        model.load_state_dict({name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
        with optimizer.snapshot():
            found = parameters(model).tolist()
        run_steps(model, optimizer, worker.rank, range(2, 4))
        return found

    for found in run_job(tmp_path, work, workers=2, carrier=carrier):
        assert set(found) == {2.0}
    assert UNDONE not in capsys.readouterr().err
