from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.update.filters.filtering import num_kept, one, pipeline_of, rest, row
from torch import Tensor

from paceline.errors import ProtocolBug
from paceline.update.filters import KKT, FilterSpec, TopK


def stays_zero(weight: float, gradient: float, l1: float, threshold: float) -> bool:
    """The rule for a single coordinate, as it is written in the literature."""
    if weight != 0:
        return False
    above, below = gradient + l1, gradient - l1
    if above < 0 or below > 0:
        return False
    return above > threshold and below < -threshold


EIGHTHS = st.integers(-16, 16).map(lambda n: n / 8)


@settings(deadline=None)
@given(st.lists(st.tuples(EIGHTHS.filter(bool) | st.just(0.0), EIGHTHS), min_size=1, max_size=8), st.integers(0, 7))
def test_a_row_is_left_out_if_the_rule_holds_for_each_of_its_numbers(
    pairs: list[tuple[float, float]], margin: int
) -> None:
    weights, gradient = (torch.tensor([column], dtype=torch.float64) for column in zip(*pairs, strict=True))
    pipeline = pipeline_of(KKT(1.0, margin=margin / 8), width=len(pairs))
    sifted = pipeline.sift(one(5), gradient, 1, lambda _: weights)
    dropped = all(stays_zero(weight, number, 1.0, margin / 8) for weight, number in pairs)
    assert len(sifted.ids) == 1 - dropped
    assert (pipeline.counts.dropped, num_kept(pipeline)) == (dropped, 0)


def test_everything_is_sent_every_so_many_clocks() -> None:
    pipeline = pipeline_of(KKT(1.0, reset_every=3))
    sent = [len(pipeline.sift(one(5), row(0.1, 0.1), clock, lambda _: row(0, 0)).ids) for clock in range(7)]
    assert sent == [1, 0, 0, 1, 0, 0, 1]


def test_values_that_are_not_known_are_not_zero() -> None:
    sifted = pipeline_of(KKT(1.0)).sift(one(5), row(0.1, 0.1), 1, lambda _: row(float("nan"), 0.0))
    assert sifted.ids.tolist() == [5]


def test_a_dropped_row_leaves_what_was_kept_back_of_it() -> None:
    pipeline = pipeline_of(KKT(1.0), TopK(0.5))
    weights = {1: row(1.0, 1.0), 2: row(1.0, 1.0)}

    def values(ids: Tensor) -> Tensor:
        return torch.cat([weights[key] for key in ids.tolist()])

    pipeline.sift(torch.tensor([1, 2]), torch.cat((row(0.5, 0.5), row(9.0, 9.0))), 1, values)
    weights[1] = row(0.0, 0.0)
    assert len(pipeline.sift(one(1), row(0.25, 0.25), 2, values).ids) == 0
    ids, rows = rest(pipeline)
    assert (ids.tolist(), rows.tolist()) == ([1], [[0.5, 0.5]])


def test_values_must_be_there() -> None:
    with pytest.raises(ProtocolBug, match="without a way to look at its values"):
        pipeline_of(KKT(1.0)).sift(one(5), row(0.1, 0.1), 1)


class Lasso:
    """Least squares with an L1 penalty, of which few weights are not zero, solved by proximal gradient steps."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(4)
        self.features = torch.randn(80, 60, generator=random, dtype=torch.float64)
        truth = torch.zeros(60, 1, dtype=torch.float64)
        truth[:6] = 3.0
        self.labels = self.features @ truth + 0.1 * torch.randn(80, 1, generator=random, dtype=torch.float64)
        self.l1 = 0.3
        self.step = 80 / torch.linalg.matrix_norm(self.features, 2).item() ** 2
        self.weights = torch.zeros(60, 1, dtype=torch.float64)

    def gradient(self) -> Tensor:
        return self.features.T @ (self.features @ self.weights - self.labels) / 80

    def objective(self) -> float:
        error = self.features @ self.weights - self.labels
        return (0.5 * error.square().mean() + self.l1 * self.weights.abs().sum()).item()

    def solve(self, num_clocks: int, *filters: FilterSpec) -> int:
        """Return how many rows were dropped."""
        pipeline = pipeline_of(*filters, width=1)
        look: Callable[[Tensor], Tensor] = lambda ids: self.weights[ids]  # noqa: E731
        for clock in range(num_clocks):
            sifted = pipeline.sift(torch.arange(60), self.gradient(), clock, look)
            moved = self.weights[sifted.ids] - self.step * sifted.decoded
            self.weights[sifted.ids] = moved.sign() * (moved.abs() - self.step * self.l1).clamp(min=0)
        return pipeline.counts.dropped


@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_a_lasso_ends_at_the_same_objective_with_fewer_rows_sent(margin: float) -> None:
    plain, filtered = Lasso(), Lasso()
    plain.solve(401)
    dropped = filtered.solve(401, KKT(plain.l1, margin=margin, reset_every=20))
    assert (filtered.weights == 0).sum() > 40
    assert dropped > 0.4 * 401 * 60
    assert abs(filtered.objective() - plain.objective()) < 1e-6
