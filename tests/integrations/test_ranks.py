"""What the adapters of all frameworks share, without any framework."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.jobs import run_job
from torch import Tensor, nn

from paceline.api.session import Session
from paceline.integrations.ranks import distribute, evaluated, model_of


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_what_a_script_has_loaded_since_the_last_step_is_what_is_evaluated(tmp_path: Path) -> None:
    inputs = torch.ones(4, 2)

    def work(_worker: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = distribute(torch.optim.SGD(model.parameters(), lr=0.5), model)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()

        step()
        best = copied(model)
        step()
        with optimizer.snapshot():
            trained = copied(model)
        model.load_state_dict(best)
        with evaluated([optimizer]):
            torch.testing.assert_close(copied(model), best, rtol=0, atol=0)
            assert not torch.equal(model.weight, trained["weight"])
        step()
        model.weight.data.zero_()
        with evaluated([optimizer]):
            assert model.weight.all(), "it is trained again, so its state is that of training"

    run_job(tmp_path, work, workers=2)


def test_an_optimizer_goes_with_the_model_that_it_steps() -> None:
    first, second, other = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    both = nn.ModuleList([first, second])

    def found(stepped: nn.Module, *models: nn.Module) -> nn.Module | None:
        return model_of(torch.optim.SGD(stepped.parameters(), lr=0.1), models)

    assert found(first, first, second) is first
    assert found(second, first, second) is second
    assert found(first, both, first, other) is first
    assert found(both, both, first) is both
    assert found(both, first, other) is first
    assert found(both, first, second) is None, "neither has all of it"
    assert found(other, first, second) is None
