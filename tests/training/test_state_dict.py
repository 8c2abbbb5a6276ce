import pytest
import torch
from tests.update.tables import SEGMENTS, shards_of, start_values, store, with_rule

from paceline.core.partition import Range
from paceline.errors import ProtocolBug, UsageError
from paceline.training.state import gather_optimizer, split_optimizer
from paceline.update.named_rules import Adam
from paceline.update.rules import RuleSpec
from paceline.update.shard import Contribution, Shard
from paceline.update.table import Segment

RULE = RuleSpec("torch.optim.Adam", Adam(lr=0.1).groups * 2)
SPEC = with_rule(RULE, SEGMENTS)
ONE = with_rule(Adam(), (Segment("w", (128,)),))


def trained() -> list[Shard]:
    shards = shards_of(SPEC, 3)
    store(shards, start_values(SPEC))
    gradient = torch.randn(SPEC.numel)
    for shard in shards:
        shard.apply([Contribution(gradient[shard.span.start : shard.span.stop])])
    return shards


def parts_of(shards: list[Shard]) -> list:
    return [(shard.span, shard.state()) for shard in shards]


def test_ids_are_those_of_torch_when_groups_are_interleaved() -> None:
    # Group 0 holds weight and temperature, so torch counts these before bias, frozen and embedding.
    state_dict = gather_optimizer(SPEC, parts_of(trained()))
    assert [group["params"] for group in state_dict["param_groups"]] == [[0, 1], [2, 3, 4]]
    shapes = {index: tuple(state["exp_avg"].shape) for index, state in state_dict["state"].items()}
    assert shapes == {0: (33, 17), 1: (), 2: (5,), 3: (40,), 4: (300,)}
    assert list(state_dict["state"][4]) == ["exp_avg", "exp_avg_sq", "step"]


def test_takes_the_hyperparameters_of_now() -> None:
    now = ({"lr": 0.5}, {"lr": 0.25})
    groups = gather_optimizer(SPEC, parts_of(trained()), now)["param_groups"]
    assert [group["lr"] for group in groups] == [0.5, 0.25]
    assert all(set(group) == {"lr", "params"} for group in groups)


def test_optimizer_state_comes_back() -> None:
    shards = trained()
    state_dict = gather_optimizer(SPEC, parts_of(shards))
    for shard in shards:
        own = split_optimizer(SPEC, state_dict, shard.span)
        kept = {key: value for key, value in shard.state().items() if key != "values"}
        assert own.keys() == kept.keys()
        assert all(torch.equal(own[key], value) for key, value in kept.items())


def test_refuses_gaps_and_overlaps() -> None:
    parts = parts_of(trained())
    for wrong in (parts[:2], parts[1:], [*parts, parts[1]], []):
        with pytest.raises(UsageError, match="expected 0 to 907 without gap or overlap"):
            gather_optimizer(SPEC, wrong)


def test_refuses_shards_of_different_versions() -> None:
    shards = shards_of(ONE, 2)
    for shard, times in zip(shards, (1, 2), strict=True):
        for _ in range(times):
            shard.apply([Contribution(torch.ones(64))])
    with pytest.raises(ProtocolBug, match=r"parameter 'w': its 2 shards disagree about 'step', 2 of them have it"):
        gather_optimizer(ONE, parts_of(shards))


def test_refuses_shards_of_which_one_never_ran() -> None:
    shards = shards_of(ONE, 2)
    shards[0].apply([Contribution(torch.ones(64))])
    with pytest.raises(ProtocolBug, match=r"disagree about 'exp_avg', 1 of them have it"):
        gather_optimizer(ONE, parts_of(shards))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3.0, "state 'x' of parameter 'w' is a float, expected a tensor"),
        (torch.zeros(2), r"has shape \(2,\), expected \(128,\), which can be cut"),
    ],
)
def test_refuses_states_that_cannot_be_cut(value: object, message: str) -> None:
    state_dict = {"state": {0: {"x": value, "skipped": None}}, "param_groups": []}
    with pytest.raises(UsageError, match=message):
        split_optimizer(ONE, state_dict, Range(0, 0, 64))
