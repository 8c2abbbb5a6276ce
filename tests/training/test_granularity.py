"""Optimizers that look at whole tensors are not given parts of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.job.mesh import MeshShape
from paceline.model_parallel.arrangement import ModelPart
from paceline.model_parallel.split_layers import ColumnLinear, RankShare, RowLinear
from paceline.training.all_reduce import AllReduce
from paceline.training.parameter_server import ParameterServer
from paceline.training.strategy import Settings, distribute
from paceline.update.torch_rule import granularity_of


class Sign(torch.optim.Optimizer):
    """Looks at each element by itself, and keeps a state."""

    def __init__(self, params: Any, lr: float = 0.1, *, by_norm: bool = False) -> None:
        super().__init__(params, {"lr": lr, "by_norm": by_norm})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("kept", torch.zeros_like(parameter))
                kept.mul_(0.9).add_(parameter.grad)
                scale = kept.norm() if group["by_norm"] else 1.0
                parameter.sub_(kept.sign() * scale, alpha=group["lr"])


class Picky(Sign):
    """Cannot be made from parameters and defaults alone."""

    def __init__(self, params: Any, secret: object) -> None:
        del secret
        super().__init__(params)


def weights() -> list[Tensor]:
    return [nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (lambda: torch.optim.AdamW(weights()), "element"),
        (lambda: torch.optim.Adafactor(weights()), "tensor"),
        (lambda: torch.optim.LBFGS(weights()), "tensor"),
        (lambda: Sign(weights()), "element"),
        (lambda: Sign(weights(), by_norm=True), "tensor"),
        (lambda: Sign([{"params": weights()}, {"params": weights(), "by_norm": True}]), "tensor"),
        (lambda: Picky(weights(), object()), "tensor"),
        (lambda: type("AdamW", (torch.optim.AdamW,), {})(weights()), "element"),
        (lambda: type("Adam", (torch.optim.Adafactor,), {})(weights()), "tensor"),
    ],
)
def test_what_a_class_looks_at_is_known_or_tried_out(optimizer: Any, expected: str) -> None:
    assert granularity_of(optimizer()) == expected


@pytest.mark.parametrize("strategy", [ParameterServer(), AllReduce()], ids=["parameter-server", "all-reduce"])
def test_parts_of_tensors_are_not_given_to_rules_for_whole_ones(strategy: Any) -> None:
    share = RankShare(cast("Any", None), 0, 2)
    model = nn.Sequential(
        ColumnLinear(nn.Linear(4, 4, bias=False), share, {}, None, "0"),
        RowLinear(nn.Linear(4, 4, bias=False), share, {}, None, "1"),
        nn.Linear(4, 4, bias=False),
    )
    part = ModelPart(MeshShape(1, 1, 2), 0, None)
    settings = Settings(Consistency.parse("bsp"), "samples", 1, "reject", "model", part=part)

    def distributed(optimizer: torch.optim.Optimizer) -> object:
        return distribute(strategy, optimizer, model, settings, cast("Any", None))

    for made in (torch.optim.Adafactor(model.parameters()), Sign(model[1:].parameters(), by_norm=True)):
        with pytest.raises(
            UsageError, match=r"looks at whole tensors, and of '[01]\.weight' each tensor rank has a part"
        ):
            distributed(made)
    for made in (torch.optim.AdamW(model.parameters()), torch.optim.Adafactor(model[2].parameters())):
        with pytest.raises(AttributeError):  # it goes on to the job, of which there is none here
            distributed(made)


@pytest.mark.parametrize("strategy", ["bsp", "all-reduce", "local-sgd:2", {"*": "all-reduce"}], ids=str)
def test_an_optimizer_that_evaluates_the_model_in_its_step_is_refused(tmp_path: Path, strategy: Any) -> None:
    def work(_: Session) -> None:
        model = nn.Linear(2, 1)
        with pytest.raises(UsageError, match=r"torch\.optim\.LBFGS .*evaluates the model several times a step"):
            paceline.distributed(torch.optim.LBFGS(model.parameters()), strategy=strategy, model=model)

    run_job(tmp_path, work)
