"""What shares memory with a parameter, or waits for its gradient, is right or refused under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.training.model_checks import (
    require_dense_gradients,
    require_no_aliases,
    require_no_gradient_hooks,
    require_own_memory,
)


def tied_by_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight.data = model[0].weight.data
    return model


def test_parameters_of_one_memory_are_refused_and_slices_of_one_are_not() -> None:
    whole, apart = torch.zeros(4, 4), "'m': the parameters 'a' and 'b' have memory in common"
    for first, second in ((whole, whole), (whole, whole[1]), (whole[:3], whole[2:]), (whole[0], whole.view(-1)[3:5])):
        with pytest.raises(UsageError, match=apart):
            require_own_memory({"a": first, "b": second}, "m")
    meta = torch.zeros(4, device="meta")
    for first, second in ((whole[:2], whole[2:]), (whole[:0], whole), (meta, meta), (whole[:, :2], whole[:, 2:])):
        require_own_memory({"a": first, "b": second}, "m")


def test_what_slices_cannot_follow_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'m': the layer '1' makes sparse gradients"):
        require_dense_gradients(nn.Sequential(nn.Linear(1, 1), nn.Embedding(2, 2, sparse=True)), "m")
    model = nn.Linear(2, 2)
    require_no_gradient_hooks(model.named_parameters(), "m")
    hooks: list[Callable[..., object]] = [model.weight.register_hook, model.bias.register_post_accumulate_grad_hook]
    for register, name in zip(hooks, ("weight", "bias"), strict=True):
        handle = register(lambda _: None)
        with pytest.raises(UsageError, match=f"'m': parameter '{name}' has a hook on its gradient"):
            require_no_gradient_hooks(model.named_parameters(), "m")
        handle.remove()  # pyright: ignore[reportAttributeAccessIssue]
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    require_no_aliases(model, "m")
    model.register_buffer("follower", model.weight.detach()[1])
    with pytest.raises(UsageError, match="'m': buffer 'follower' has the memory of parameter 'weight'"):
        require_no_aliases(model, "m")


@pytest.mark.parametrize("strategy", ["bsp", "downpour:2", {"0.*": "bsp", "*": "ssp:1"}])
def test_tied_memory_is_refused_where_servers_hold_values(tmp_path: Path, strategy: object) -> None:
    def work(_: Session) -> None:
        model = tied_by_memory()
        with pytest.raises(UsageError, match=r"the parameters '0.weight' and '1.weight' have memory in common"):
            paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, strategy=strategy)

    run_job(tmp_path, work, workers=1)


@pytest.mark.parametrize("carrier", ["memory", "shm"])
def test_a_buffer_follows_the_parameter_whose_memory_it_has(tmp_path: Path, carrier: str) -> None:
    def work(_: Session) -> tuple[Tensor, Tensor]:
        model = nn.Linear(16, 16, bias=False)  # large enough for a view of the server's memory
        model.register_buffer("sparse", torch.eye(16).to_sparse(), persistent=False)  # which has no storage
        model.register_buffer("follower", model.weight.detach(), persistent=False)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        before = model.weight.detach().clone()
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        assert not torch.equal(before, model.weight)
        return model.get_buffer("follower").clone(), model.weight.detach().clone()

    for follower, weight in run_job(tmp_path, work, workers=2, carrier=carrier):
        assert torch.equal(follower, weight)
