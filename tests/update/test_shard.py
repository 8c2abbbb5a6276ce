import math

import pytest
import torch
from msgspec.structs import replace
from tests.update.tables import table

from paceline.core.partition import Range
from paceline.errors import ProtocolBug
from paceline.update.clipping import with_clip
from paceline.update.named_rules import SGD, Adam, resolve, torch_optim
from paceline.update.rules import RuleSpec
from paceline.update.shard import Contribution, Shard
from paceline.update.summing import CHUNK, num_nonfinite
from paceline.update.table import Segment, TableSpec

TWO = (Segment("a", (2,)), Segment("b", (2,)))


def shard_of(spec: TableSpec, span: Range | None = None) -> Shard:
    return Shard(spec, span or Range(0, 0, spec.numel), rule=resolve(spec.rule, frozenset()))


def adding(scale: str = "sum", nonfinite: str = "reject") -> Shard:
    return shard_of(replace(table(segments=TWO), scale=scale, nonfinite=nonfinite))


def vector(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def test_starts_at_zero_and_stores_a_copy() -> None:
    shard = adding()
    assert not shard.initialised
    assert not shard.values.any()
    given = vector(1, 2, 3, 4)
    shard.store(given)
    given.zero_()
    out = torch.empty(4)
    shard.copy_values(out)
    assert shard.initialised
    assert out.tolist() == [1, 2, 3, 4]
    assert shard.version == 0


@pytest.mark.parametrize(
    ("scale", "counts", "expected"),
    [
        ("sum", (1, 1), 8.0),
        ("sum", (1, 3), 8.0),
        ("mean", (1, 3), 4.0),
        ("samples", (2, 2), 4.0),
        ("samples", (1, 3), (1 * 2 + 3 * 6) / 4),
        ("samples", (0, 3), 6.0),
        ("samples", (0, 0), 4.0),
    ],
)
def test_scales(scale: str, counts: tuple[float, float], expected: float) -> None:
    shard = adding(scale)
    shard.apply([Contribution(torch.full((4,), g), count) for g, count in zip((2.0, 6.0), counts, strict=True)])
    assert shard.values.tolist() == [expected] * 4


def test_equal_counts_are_a_mean_to_the_last_bit() -> None:
    gradients = [torch.randn(4) for _ in range(3)]
    by_samples, by_mean = adding("samples"), adding("mean")
    by_samples.apply([Contribution(g, 7.0) for g in gradients])
    by_mean.apply([Contribution(g) for g in gradients])
    assert torch.equal(by_samples.values, by_mean.values)


def test_adds_in_the_order_given() -> None:
    # 1 is lost beside 1e8 in float32, so the order shows.
    shard = adding()
    shard.apply([Contribution(torch.full((4,), g)) for g in (1e8, -1e8, 1.0)])
    other = adding()
    other.apply([Contribution(torch.full((4,), g)) for g in (1.0, 1e8, -1e8)])
    assert shard.values.tolist() == [1.0] * 4
    assert other.values.tolist() == [0.0] * 4


def test_sums_longer_than_a_chunk_are_whole() -> None:
    spec = replace(table(segments=[Segment("w", (2 * CHUNK + 5,))]), scale="sum")
    shard = shard_of(spec)
    gradients = [torch.randn(spec.numel) for _ in range(3)]
    shard.apply([Contribution(g) for g in gradients])
    assert torch.equal(shard.values, (gradients[0] + gradients[1]) + gradients[2])


def test_absent_from_some_counts_as_zero_and_its_memory_is_not_looked_at() -> None:
    shard = adding("mean")
    one = Contribution(vector(2, 2, math.nan, math.inf), absent=frozenset({1}))
    shard.apply([one, Contribution(vector(4, 4, 8, 8))])
    assert shard.values.tolist() == [3, 3, 4, 4]
    assert shard.screen(one.gradient, one.absent) == 0
    assert shard.screen(one.gradient) == 2


def test_absent_differs_from_present_zero_under_exact_adam() -> None:
    spec = table(Adam(lr=0.1), TWO)
    absent, zero = shard_of(spec), shard_of(spec)
    for shard in (absent, zero):
        shard.apply([Contribution(torch.ones(4))])
    before = absent.values.clone()
    absent.apply([Contribution(torch.zeros(4), absent=frozenset({1}))])
    zero.apply([Contribution(torch.zeros(4))])
    assert torch.equal(absent.values[2:], before[2:])
    assert absent.state()["1.step"] == 1
    assert not torch.equal(zero.values[2:], before[2:])


@pytest.mark.parametrize("name", ["SGD", "Adamax", "Adagrad", "RMSprop", "ASGD", "Adadelta", "Rprop"])
@pytest.mark.parametrize("foreach", [None, True])
def test_never_writes_to_a_single_contribution(name: str, foreach: bool | None) -> None:
    numbers = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {}
    shard = shard_of(table(torch_optim(name, lr=0.1, foreach=foreach, **numbers), TWO))
    shard.store(vector(1, 2, 3, 4))
    gradient = vector(1, -2, 3, -4)
    for _ in range(3):
        shard.apply([Contribution(gradient)])
    assert gradient.tolist() == [1, -2, 3, -4]


def test_keeps_no_hold_of_a_contribution() -> None:
    shard = shard_of(table(SGD(lr=1.0, momentum=0.5), TWO))
    gradient = torch.ones(4)
    shard.apply([Contribution(gradient)])
    gradient.fill_(100.0)
    shard.apply([Contribution(torch.zeros(4))])
    assert shard.values.tolist() == [-1.5] * 4


def test_hyperparameters_of_the_first_contribution_win_and_stay() -> None:
    shard = shard_of(table(SGD(lr=1.0), TWO))
    hyper = ({**shard.spec.rule.groups[0], "lr": 2.0},)
    other = ({**shard.spec.rule.groups[0], "lr": 8.0},)
    shard.apply([Contribution(torch.ones(4), hyper=hyper), Contribution(torch.ones(4), hyper=other)])
    assert shard.values.tolist() == [-2.0] * 4
    shard.apply([Contribution(torch.ones(4))])
    assert shard.values.tolist() == [-4.0] * 4
    assert shard.hyper == hyper


def test_hyperparameters_cannot_replace_the_parameters() -> None:
    shard = shard_of(table(SGD(lr=1.0), TWO))
    shard.apply([Contribution(torch.ones(4), hyper=({"lr": 1.0, "params": None},))])
    shard.apply([Contribution(torch.ones(4))])
    assert shard.values.tolist() == [-2.0] * 4


def test_screens_without_changing_anything() -> None:
    shard = adding()
    gradient = vector(1, math.nan, math.inf, -math.inf)
    assert shard.screen(gradient) == 3
    assert shard.screen(vector(1, 2, 3, 4)) == 0
    assert shard.num_zeroed == 0


def test_finite_elements_whose_sum_overflows_are_finite() -> None:
    assert num_nonfinite(torch.full((4,), 3e38)) == 0


def test_zero_takes_nonfinite_elements_as_zero_and_counts_them() -> None:
    shard = adding("sum", "zero")
    first = vector(1, math.nan, 1, 1)
    shard.apply([Contribution(first), Contribution(vector(math.inf, 2, 2, -math.inf))])
    assert shard.values.tolist() == [1, 2, 3, 1]
    assert shard.num_zeroed == 3
    assert math.isnan(first[1])


@pytest.mark.parametrize("policy", ["reject", "halt"])
def test_the_other_policies_leave_the_decision_to_the_caller(policy: str) -> None:
    shard = adding("sum", policy)
    shard.apply([Contribution(vector(1, math.nan, 1, 1))])
    assert shard.num_zeroed == 0
    assert math.isnan(shard.values[1])


def test_state_goes_by_segment_and_continues_in_a_shard_that_already_ran() -> None:
    spec = table(Adam(lr=0.1), (Segment("a", (64,)), Segment("b", (64,)), Segment("c", ())))
    span = Range(1, 64, 129)
    one, two = shard_of(spec, span), shard_of(spec, span)
    one.apply([Contribution(torch.randn(65))])
    two.apply([Contribution(torch.randn(65))])
    state = {key: value.clone() for key, value in one.state().items()}
    assert set(state) == {"values", *(f"{i}.{name}" for i in (1, 2) for name in ("step", "exp_avg", "exp_avg_sq"))}
    two.load_state(state, version=one.version)
    gradient = torch.randn(65)
    for shard in (one, two):
        shard.apply([Contribution(gradient)])
    assert torch.equal(one.values, two.values)
    assert one.version == two.version == 2
    assert two.state()["1.step"] == 2


def test_state_loaded_before_the_first_update_is_what_state_returns() -> None:
    spec = table(Adam(lr=0.1), TWO)
    one, two = shard_of(spec), shard_of(spec)
    one.apply([Contribution(torch.randn(4))])
    two.load_state(one.state())
    assert {key: value.tolist() for key, value in two.state().items()} == {
        key: value.tolist() for key, value in one.state().items()
    }


def test_loading_an_empty_state_starts_the_rule_anew() -> None:
    spec = table(SGD(lr=1.0, momentum=0.5), TWO)
    shard = shard_of(spec)
    fresh = {key: value.clone() for key, value in shard.state().items()}
    for _ in range(2):
        shard.load_state(fresh)
        shard.apply([Contribution(torch.ones(4))])
        assert shard.values.tolist() == [-1.0] * 4


def test_an_empty_range_counts_its_updates() -> None:
    shard = shard_of(table(Adam()), Range(1, 4, 4))
    shard.apply([Contribution(torch.empty(0)), Contribution(torch.empty(0))])
    assert shard.version == 1
    assert set(shard.state()) == {"values"}


def test_refuses_what_does_not_fit() -> None:
    shard = adding()
    with pytest.raises(ProtocolBug, match=r"got gradient of shape \(3,\).*expected \(4,\)"):
        shard.apply([Contribution(torch.zeros(3))])
    with pytest.raises(ProtocolBug, match=r"torch.float64, expected \(4,\) and torch.float32"):
        shard.store(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ProtocolBug, match="without contributions"):
        shard.apply([])
    with pytest.raises(ProtocolBug, match="hyperparameters of 2 groups, expected 1"):
        shard.apply([Contribution(torch.zeros(4), hyper=({}, {}))])
    with pytest.raises(ProtocolBug, match=r"state '7.x' belongs to no segment"):
        shard.load_state({"values": torch.zeros(4), "7.x": torch.zeros(2)})
    assert shard.version == 0


def test_refuses_to_cut_what_must_stay_whole() -> None:
    spec = table(torch_optim("Adafactor"), [Segment("m", (8, 8))])
    with pytest.raises(ProtocolBug, match=r"Adafactor needs whole tensors.*server 1 cuts 'm' to its elements 0 to 32"):
        shard_of(spec, Range(1, 0, 32))


class Misnaming:
    """A rule whose state belongs to no piece."""

    granularity = "element"

    def update(self, values: list, gradients: list, hyper: list, groups: list) -> None:
        values[0].copy_(gradients[0] * hyper[0]["lr"])

    def state(self) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros(4)}

    def load_state(self, state: dict) -> None:
        """Have none."""


def test_runs_a_rule_of_your_own_and_checks_the_names_of_its_state() -> None:
    spec = table(RuleSpec(f"{__name__}:Misnaming", ({"lr": 3.0},)))
    shard = Shard(spec, Range(0, 0, 4), rule=Misnaming())
    shard.apply([Contribution(torch.ones(4))])
    assert shard.values.tolist() == [3.0] * 4
    with pytest.raises(ProtocolBug, match=r"names a state 'momentum', expected '<piece>\.<name>'"):
        shard.state()


def test_a_norm_to_clip_to_counts_for_its_own_update_alone() -> None:
    spec = replace(table(segments=TWO), scale="samples", rule=SGD(lr=1.0))
    shard = shard_of(spec)
    gradient, rate = vector(3, 0, 0, 4), spec.rule.groups
    shard.apply([Contribution(gradient, 1, hyper=with_clip(rate, 1.0))])
    torch.testing.assert_close(shard.values, -gradient / 5)
    assert shard.hyper == rate  # what snapshots and replicas take over
    shard.store(torch.zeros(4))
    shard.apply([Contribution(gradient, 1)])
    assert shard.values.tolist() == (-gradient).tolist()
