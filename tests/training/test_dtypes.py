"""Models in each dtype of tables, and in several at once, learn what one process learns with them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import seeded, sgd
from torch import Tensor, nn

import paceline
from paceline.api.session import Session

STRATEGIES = ["bsp", "all-reduce", "local-sgd:1"]


class Normalised(nn.Module):
    """A layer in bfloat16, and one in float32 that norms what comes of it, as models have that are trained in half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4).bfloat16()
        self.norm = nn.LayerNorm(4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.norm(self.layer(batch.bfloat16()).float())


def learned(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> list[Tensor]:
    """Take steps with the same batches on every worker, whose mean they are."""
    for batch in torch.randn(12, 9, generator=torch.Generator().manual_seed(7)).to(dtype).split(4):
        optimizer.zero_grad()
        model(batch).square().sum(1).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def require_same(found: list[Tensor], expected: list[Tensor], strategy: object, coarsest: torch.dtype) -> None:
    """To the bit, but that local SGD adds the changes of values, which rounds them once more each step."""
    rounding = 8 * torch.finfo(coarsest).eps if strategy == "local-sgd:1" else 0.0
    for one, plain in zip(found, expected, strict=True):
        assert one.dtype == plain.dtype
        torch.testing.assert_close(one, plain, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_model_in_one_dtype(tmp_path: Path, dtype: torch.dtype, strategy: str) -> None:
    def made() -> nn.Module:
        return seeded(lambda: nn.Linear(9, 4)).to(dtype)

    def work(worker: Session) -> list[Tensor]:
        model = made()
        return learned(model, paceline.distributed(sgd(model), model=model, strategy=strategy), dtype)

    alone = made()
    expected = learned(alone, sgd(alone), dtype)
    for found in run_job(tmp_path, work, workers=2):
        require_same(found, expected, strategy, dtype)


@pytest.mark.parametrize("strategy", [*STRATEGIES, {"norm.*": "bsp", "*": "bsp"}])
def test_a_model_of_several_dtypes_has_a_table_for_each(tmp_path: Path, strategy: str | dict[str, str]) -> None:
    def work(worker: Session) -> tuple[list[Tensor], str]:
        model = seeded(Normalised)
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        return learned(model, optimizer, torch.float32), repr(optimizer)

    alone = seeded(Normalised)
    expected = learned(alone, sgd(alone), torch.float32)
    for found, shown in run_job(tmp_path, work, workers=2):
        assert ".bfloat16: " in shown
        assert ".float32: " in shown
        require_same(found, expected, strategy, torch.bfloat16)


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """What a script may set, in the process that also has the server."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_updates_do_not_depend_on_the_default_dtype_of_the_script(
    tmp_path: Path, default_dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(9, 4).to(dtype)
        nn.init.constant_(model.weight, 0.25)
        nn.init.zeros_(model.bias)
        return model, make(model.parameters(), lr=0.1, fused=True)

    def work(worker: Session) -> list[Tensor]:
        model, optimizer = made()
        return learned(model, paceline.distributed(optimizer, model=model), dtype)

    alone, optimizer = made()
    expected = learned(alone, optimizer, dtype)
    for found in run_job(tmp_path, work, workers=3):
        for one, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(one, plain, rtol=1e-5, atol=1e-6)


def test_steps_are_counted_beyond_what_the_default_dtype_can_count(default_dtype: torch.dtype, tmp_path: Path) -> None:
    def work(worker: Session) -> float:
        weight = nn.Parameter(torch.zeros(3, dtype=torch.float32))
        optimizer = paceline.distributed(torch.optim.Adam([weight], lr=0.01))
        for _ in range(300):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return float(optimizer.state_dict()["state"][0]["step"])

    assert run_job(tmp_path, work, workers=1) == [300.0]
