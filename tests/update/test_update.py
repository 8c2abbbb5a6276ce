import math

import pytest
import torch
from tests.update.tables import table
from torch import nn

from paceline.core.partition import Range
from paceline.errors import UsageError
from paceline.training.parameter_server import PushedHyper
from paceline.update.named_rules import SGD, Add, granularity, resolve, rule, torch_optim
from paceline.update.rules import RuleSpec
from paceline.update.shard import Shard
from paceline.update.torch_rule import from_optimizer, pushed_hyper

HERE = "tests.update.test_update"


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


class Own(torch.optim.SGD):
    """A subclass, which servers do not know."""


class Sign:
    """A complete rule."""

    granularity = "tensor"

    def update(self, values: list, gradients: list, hyper: list, groups: list) -> None:
        """Do nothing."""

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state(self, state: dict) -> None:
        """Do nothing."""


class Half:
    """An incomplete rule."""

    granularity = "element"

    def update(self, values: list, gradients: list, hyper: list, groups: list) -> None:
        """Do nothing."""


class Coarse(Sign):
    granularity = "rows"


class Greedy(Sign):
    def __init__(self, lr: float) -> None:
        self.lr = lr


def test_takes_the_groups_of_an_optimizer_as_plain_numbers() -> None:
    groups = [{"params": parameters()}, {"params": parameters(), "lr": 0.5, "betas": [0.8, 0.9]}]
    spec = from_optimizer(torch.optim.Adam(groups, lr=0.1))
    assert spec.name == "torch.optim.Adam"
    assert [group["lr"] for group in spec.groups] == [0.1, 0.5]
    assert spec.groups[1]["betas"] == (0.8, 0.9)
    assert spec.groups[0]["foreach"] is None
    assert not {"params", "param_names"} & set(spec.groups[0])


def test_leaves_out_what_a_scheduler_adds() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "initial_lr" in optimizer.param_groups[0]
    assert from_optimizer(optimizer).groups[0].keys() == optimizer.defaults.keys()


def test_a_push_carries_the_numbers_of_now_and_the_switches_as_declared() -> None:
    declared = from_optimizer(torch.optim.Adam(parameters(), lr=0.1))
    loaded = torch.optim.Adam(parameters(), lr=0.5, fused=True)  # as a saved state may say
    loaded.param_groups[0]["initial_lr"] = 1.0
    assert pushed_hyper(loaded.param_groups, declared) == ({**declared.groups[0], "lr": 0.5},)


def test_named_parameters_leave_no_names_among_the_numbers() -> None:
    named = nn.Linear(2, 1).named_parameters()
    assert "param_names" not in from_optimizer(torch.optim.SGD(named, lr=0.1)).groups[0]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: Own(parameters(), lr=0.1), r"Own is not a class of torch.optim.*paceline.update.rule\("),
        (lambda: torch.optim.LBFGS(parameters()), "torch.optim.LBFGS cannot run on a server: .*a closure"),
        (lambda: torch.optim.SparseAdam(parameters()), "SparseAdam cannot run on a server: it takes sparse gradients"),
        (lambda: torch.optim.SGD(parameters(), lr=torch.tensor(0.1)), r"lr of torch.optim.SGD is a Tensor.*float\("),
        (lambda: torch.optim.SGD(parameters(), differentiable=True), "differentiable=True, but its steps run on the"),
        (lambda: torch.optim.Adam(parameters(), capturable=True), "capturable=True, but its steps run on the servers"),
    ],
)
def test_refuses_optimizers_that_cannot_run_on_a_server(optimizer: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_optimizer(optimizer())


def test_refuses_a_hyperparameter_that_is_a_text() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer.param_groups[0]["momentum"] = "fast"
    with pytest.raises(
        UsageError, match=r"momentum of torch.optim.SGD is a str \(fast\), but only plain numbers travel"
    ):
        from_optimizer(optimizer)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("Adamm", {}, "There is no optimizer class 'torch.optim.Adamm'"),
        ("lr_scheduler", {}, "There is no optimizer class"),
        ("Optimizer", {}, "abstract base"),
        ("LBFGS", {}, "closure"),
        ("SGD", {"lr": -1.0}, "refuses its arguments.*Invalid learning rate"),
        ("SGD", {"speed": 1.0}, "refuses its arguments.*unexpected keyword argument 'speed'"),
    ],
)
def test_refuses_what_torch_refuses(name: str, numbers: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        torch_optim(name, **numbers)


def test_knows_what_may_be_cut() -> None:
    assert granularity(RuleSpec("add", ({},))) == "element"
    assert granularity(SGD(0.1)) == "element"
    assert granularity(torch_optim("Adafactor")) == "tensor"
    assert granularity(rule(f"{HERE}:Sign")) == "tensor"


def test_resolves_each_rule_anew() -> None:
    spec = rule(f"{HERE}:Sign", lr=0.1)
    allowed = frozenset({spec.name})
    assert type(resolve(spec, allowed)).__name__ == "Sign"
    assert resolve(SGD(0.1), allowed) is not resolve(SGD(0.1), allowed)


def test_refuses_a_path_that_is_not_allowed_before_importing_it() -> None:
    spec = RuleSpec("no_such_module_anywhere:Rule", ({},))
    with pytest.raises(UsageError, match=r"may not be loaded here. Allowed: a:B, c:D\. Start the servers"):
        resolve(spec, frozenset({"c:D", "a:B"}))
    with pytest.raises(UsageError, match="Allowed: none"):
        resolve(spec, frozenset())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module_anywhere:Rule", "cannot be imported: No module named 'no_such_module_anywhere'"),
        (f"{HERE}:Absent", "has no class Absent"),
        (f"{HERE}:HERE", "has no class HERE"),
        (f"{HERE}:Half", "Half is not an update rule: it has no state, load_state"),
        (f"{HERE}:Coarse", "granularity is 'rows', expected 'element' or 'tensor'"),
        (f"{HERE}:Greedy", "Greedy must be built without arguments"),
        ("os.system", "names no update rule. Expected 'add'"),
        ("a b:C", "names no update rule"),
        ("", "names no update rule"),
    ],
)
def test_says_what_is_wrong_with_a_path(path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(RuleSpec(path, ({},)), allowed=None)


def test_rule_checks_the_form_of_a_path_at_once() -> None:
    assert rule("package.module:Rule", lr=0.1) == RuleSpec("package.module:Rule", ({"lr": 0.1},))
    with pytest.raises(UsageError, match="'Rule' names no update rule"):
        rule("Rule")


def test_add_has_no_state() -> None:
    shard = Shard(table(), Range(0, 0, 4), rule=resolve(Add(), allowed=None))
    shard.load_state({"values": torch.ones(4)})
    with pytest.raises(UsageError, match=r"'add' has no state like this, but was given \['0.step'\]"):
        shard.load_state({"values": torch.ones(4), "0.step": torch.tensor(math.pi)})


def test_hyperparameters_of_a_push_are_converted_when_one_has_changed() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    pushed = PushedHyper(from_optimizer(optimizer))
    group = optimizer.param_groups[0]
    first = pushed.of(optimizer.param_groups)
    assert first == pushed_hyper(optimizer.param_groups, pushed.rule)
    assert pushed.of(optimizer.param_groups) is first
    group["lr"] = 0.25
    assert pushed.of(optimizer.param_groups)[0]["lr"] == 0.25
    group["betas"] = betas = [0.5, 0.9]
    assert pushed.of(optimizer.param_groups)[0]["betas"] == (0.5, 0.9)
    betas[0] = 0.75
    assert pushed.of(optimizer.param_groups)[0]["betas"] == (0.75, 0.9), "a list that has changed in place"
    group["lr"] = torch.tensor(0.25)
    with pytest.raises(UsageError, match="only plain numbers travel"):
        pushed.of(optimizer.param_groups)
