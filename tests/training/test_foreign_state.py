"""An optimizer takes up the state of a plain torch optimizer, in each form in which other programs keep it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.jobs import run_job
from tests.training.recipes import seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import paceline
from paceline.errors import UsageError

STEPS = 3
FORMS = ("numbers", "names", "json", "dcp")
OTHERS: dict[str, Any] = {
    "groups": {"0.*": "bsp", "*": "all-reduce"},
    "local-sgd": "local-sgd:2",
    "downpour": "downpour:2",
}


def model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    first, second = list(net.parameters())[:1], list(net.parameters())[1:]
    return torch.optim.Adam([{"params": second}, {"params": first, "lr": 0.02}], lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, begin: int) -> None:
    for step in range(begin, begin + STEPS):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()


def saved(form: str, folder: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """A model and an optimizer after some steps, in this form, and what the parameters are after some more."""
    net = model()
    optimizer = optimizer_of(net)
    train(net, optimizer, 0)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    if form == "names":
        state["optimizer"] = get_optimizer_state_dict(net, optimizer)
    if form == "json":
        numbers = json.loads(json.dumps({str(key): 0 for key in state["optimizer"]["state"]}))
        state["optimizer"]["state"] = {key: state["optimizer"]["state"][int(key)] for key in numbers}
    if form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it takes this for a single process, which it is
            dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
        dcp_to_torch_save(folder / "dcp", folder / "all.pt")
    else:
        torch.save(state, folder / "all.pt")
    train(net, optimizer, STEPS)
    return torch.load(folder / "all.pt", weights_only=True), [each.detach() for each in net.parameters()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, form: str, strategy: str) -> None:
    state, expected = saved(form, tmp_path)

    def work(_: object) -> list[Tensor]:
        net = model()
        plain = optimizer_of(net)
        optimizer = paceline.distributed(plain, model=net, strategy=strategy)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(deepcopy(state["optimizer"]))  # torch keeps its tensors
        train(net, optimizer, STEPS)
        with optimizer.snapshot():
            return [each.detach().clone() for each in net.parameters()]

    for found in run_job(tmp_path, work, workers=2, servers=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", OTHERS)
@pytest.mark.usefixtures("joined")
def test_every_strategy_has_the_state_that_it_is_given(tmp_path: Path, form: str, strategy: str) -> None:
    given = saved(form, tmp_path)[0]["optimizer"]
    net = model()
    name = f"{strategy}-from-{form}"
    optimizer = paceline.distributed(optimizer_of(net), strategy=OTHERS[strategy], name=name, model=net)
    optimizer.load_state_dict(deepcopy(given))
    expected, found = saved("numbers", tmp_path)[0]["optimizer"]["state"], optimizer.state_dict()["state"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce", *OTHERS])
@pytest.mark.usefixtures("joined")
def test_a_state_has_the_memory_layout_of_its_parameter(strategy: str) -> None:
    """Files keep none, and fused steps take those of parameter and state for equal."""

    def channels_last() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 1)))
        net = net.to(memory_format=torch.channels_last)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(torch.arange(96.0).view(2, 3, 4, 4)).square().mean().backward()
        optimizer.step()

    alone, plain = channels_last()
    step(alone, plain)
    state = deepcopy(plain.state_dict())
    for values in state["state"].values():
        values.update({key: value.contiguous() for key, value in values.items()})
    net, wrapped = channels_last()
    name = f"layouts-{strategy}"
    optimizer = paceline.distributed(wrapped, strategy=OTHERS.get(strategy, strategy), name=name, model=net)
    net.load_state_dict(alone.state_dict())
    optimizer.load_state_dict(state)
    found = optimizer.state_dict()
    assert found["state"][0]["exp_avg"].stride() == next(alone.parameters()).stride()
    again, resumed = channels_last()
    again.load_state_dict(alone.state_dict())
    resumed.load_state_dict(found)
    step(alone, plain)
    step(again, resumed)
    torch.testing.assert_close(list(again.parameters()), list(alone.parameters()), rtol=0, atol=0)


@pytest.mark.usefixtures("joined")
def test_the_state_of_an_outer_optimizer_may_have_texts_for_numbers() -> None:
    net = model()
    optimizer = paceline.distributed(optimizer_of(net), strategy="diloco:1", name="foreign-outer", model=net)
    train(net, optimizer, 0)
    state = deepcopy(optimizer.state_dict())
    train(net, optimizer, STEPS)
    texts = {table: {str(number): of for number, of in outer.items()} for table, outer in state["outer"].items()}
    optimizer.load_state_dict({**state, "outer": texts})
    assert state["outer"]["foreign-outer"][0]["momentum_buffer"].any()
    torch.testing.assert_close(optimizer.state_dict()["outer"], state["outer"], rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce", *OTHERS])
@pytest.mark.usefixtures("joined")
def test_a_state_of_no_parameter_is_refused(strategy: str) -> None:
    net = model()
    chosen = OTHERS.get(strategy, strategy)
    optimizer = paceline.distributed(optimizer_of(net), strategy=chosen, name=f"foreign-{strategy}", model=net)
    state = optimizer_of(net).state_dict()
    state["state"] = {"2.weight": {"step": torch.tensor(1.0)}}
    with pytest.raises(UsageError, match=r"has a state of '2.weight', which is in none of its groups"):
        optimizer.load_state_dict(state)


def stepped(optimizer: torch.optim.Optimizer, net: nn.Module) -> dict[str, Any]:
    train(net, optimizer, 0)
    return optimizer.state_dict()


def adam_with(**settings: Any) -> dict[str, Any]:
    net = model()
    return stepped(torch.optim.Adam(net.parameters(), **{"lr": 0.1, **settings}), net)


def with_value(key: str, value: object) -> dict[str, Any]:
    """The state of Adam, in which the first parameter has this instead of a state of its own."""
    state = adam_with()
    state["state"][0] = {**state["state"][0], key: value}
    return state


def sgd() -> dict[str, Any]:
    net = model()
    return stepped(torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), net)


def wider() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return stepped(torch.optim.Adam(net.parameters(), lr=0.3), net)


NOT_OF_ADAM: dict[str, tuple[Callable[[], Any], str]] = {
    "no groups": (lambda: {**adam_with(), "param_groups": None}, "'param_groups' .* is None, expected a list of dicts"),
    "a group of nothing": (
        lambda: {"state": {}, "param_groups": [{}]},
        r"a group .* is \{\}, expected a dict with 'par",
    ),
    "a group of 3": (lambda: {"state": {}, "param_groups": [3]}, "a group .* is 3, expected a dict with 'params'"),
    "params of 3": (lambda: {"state": {}, "param_groups": [{"params": 3}]}, "expected a dict with 'params', a list of"),
    "no state": (lambda: {**adam_with(), "state": None}, "'state' .* is None, expected a dict by parameter"),
    "a list": (lambda: {**adam_with(), "state": [1]}, r"'state' .* is \[1\], expected a dict by parameter"),
    "a state of 5": (lambda: {**adam_with(), "state": {0: 5}}, "the state of parameter 0 .* is 5, expected a dict"),
    "another optimizer": (sgd, "has ..momentum_buffer.., and Adam keeps|lacks .'betas', 'eps'., which Adam n"),
    "another model": (wider, r"'exp_avg' of parameter '.*' has shape \(5, 4\), expected \(3, 4\): it is of another"),
    "one number for all": (lambda: with_value("exp_avg", torch.ones(1)), r"has shape \(1,\), expected \(3, 4\)"),
    "several steps": (lambda: with_value("step", torch.ones(3)), r"'step' .* has shape \(3,\), expected \(\)"),
    "no step": (
        lambda: with_value("step", torch.tensor(float("nan"))),
        "State 'step' is nan, expected a number of steps",
    ),
    "too little": (lambda: with_value("exp_avg", None), r"parameter '.*' lacks \['exp_avg'\], and Adam keeps"),
    "too much": (lambda: with_value("sum", torch.ones(3, 4)), r"parameter '.*' has \['sum'\], and Adam keeps"),
    "a list of numbers": (lambda: with_value("exp_avg", [1.0]), r"'exp_avg' .* is \[1.0\], expected a dense tensor"),
    "no values": (lambda: with_value("exp_avg", torch.ones(3, 4, device="meta")), "expected a dense tensor of real"),
    "sparse": (lambda: with_value("exp_avg", torch.ones(3, 4).to_sparse()), "expected a dense tensor of real"),
    "complex": (lambda: with_value("exp_avg", torch.ones(3, 4) * 1j), "expected a dense tensor of real numbers"),
}
NOT_ON_SERVERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a tensor for a rate": (lambda: adam_with(lr=torch.tensor(0.1)), "lr of .*Adam is a Tensor .*Pass its value"),
    "no number": (lambda: adam_with(lr=0.0) | {"param_groups": [group_with(lr=float("nan"))]}, "not a number .'lr'."),
    "a wrong number": (
        lambda: {**adam_with(), "param_groups": [group_with(betas=(0.9, 1.5))]},
        "Invalid beta parameter",
    ),
    "of another kind": (
        lambda: {**adam_with(), "param_groups": [group_with(capturable=True)]},
        "capturable=True, but its",
    ),
}


def group_with(**settings: object) -> dict[str, object]:
    return {**adam_with()["param_groups"][0], **settings}


@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce", *OTHERS])
@pytest.mark.usefixtures("joined")
def test_what_is_no_state_of_the_optimizer_is_refused_and_changes_nothing(strategy: str) -> None:
    """Torch loads most of it, and fails in the next step, with words of its own, or computes with it."""
    net = model()
    wrapped = torch.optim.Adam(net.parameters(), lr=0.1)
    name = f"of-adam-{strategy}"
    optimizer = paceline.distributed(wrapped, strategy=OTHERS.get(strategy, strategy), name=name, model=net)
    train(net, optimizer, 0)
    before = deepcopy(optimizer.state_dict())
    # Groups load part by part: their servers refuse what the parts of workers have loaded by then.
    on_servers = {} if strategy in ("all-reduce", "local-sgd", "groups") else NOT_ON_SERVERS
    for what, (given, words) in (NOT_OF_ADAM | on_servers).items():
        with pytest.raises(UsageError, match=words):
            optimizer.load_state_dict(given())
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0, msg=f"after {what}")
    train(net, optimizer, STEPS)
    assert optimizer.num_refused == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.ASGD])
@pytest.mark.parametrize("strategy", ["parameter-server", "all-reduce", "groups"])
@pytest.mark.usefixtures("joined")
def test_a_state_takes_on_the_dtype_of_its_parameters(strategy: str, kind: type[torch.optim.Optimizer]) -> None:

    def made(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model().to(dtype)
        net.register_parameter("scale", nn.Parameter(torch.ones((), dtype=dtype)))
        settings = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
        return net, kind(net.parameters(), lr=0.1, **settings)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (net(torch.ones(2, 4, dtype=net.scale.dtype)) * net.scale).square().mean().backward()
        optimizer.step()

    first, plain = made(torch.float32)
    step(first, plain)
    state = plain.state_dict()
    expected, alone = made(torch.float64)
    alone.load_state_dict(deepcopy(state))
    net, wrapped = made(torch.float64)
    name = f"double-{strategy}-{kind.__name__}"
    optimizer = paceline.distributed(wrapped, strategy=OTHERS.get(strategy, strategy), name=name, model=net)
    optimizer.load_state_dict(deepcopy(state))
    step(expected, alone)
    step(net, optimizer)
    with optimizer.snapshot():
        torch.testing.assert_close(list(net.parameters()), list(expected.parameters()), rtol=0, atol=1e-12)
