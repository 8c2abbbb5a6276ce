"""The rules that make weights exactly 0: FTRL-proximal and the soft threshold, each against a plain loop."""

import math
import random

import pytest
import torch
from tests.update.rows.row_rules import random_rows, rows_of

from paceline.update.named_rules import FTRL, SGD, Proximal

NUM_ROWS, WIDTH = 5, 3


class Coordinate:
    """FTRL-proximal for one weight, as the paper has it."""

    def __init__(self, alpha: float, beta: float, l1: float, l2: float) -> None:
        self.alpha, self.beta, self.l1, self.l2 = alpha, beta, l1, l2
        self.z, self.n = 0.0, 0.0

    @property
    def weight(self) -> float:
        if abs(self.z) <= self.l1:
            return 0.0
        rate = (self.beta + math.sqrt(self.n)) / self.alpha + self.l2
        return -(self.z - math.copysign(self.l1, self.z)) / rate

    def push(self, gradient: float) -> None:
        sigma = (math.sqrt(self.n + gradient**2) - math.sqrt(self.n)) / self.alpha
        self.z += gradient - sigma * self.weight
        self.n += gradient**2


@pytest.mark.parametrize(
    "numbers", [(0.1, 1.0, 0.0, 0.0), (0.1, 1.0, 0.8, 0.0), (0.5, 0.1, 0.3, 0.7)], ids=lambda numbers: str(numbers)
)
def test_ftrl_is_the_rule_of_the_paper(numbers: tuple[float, float, float, float]) -> None:
    alpha, beta, l1, l2 = numbers
    rows = rows_of(FTRL(alpha, beta, l1=l1, l2=l2), torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64))
    plain = [[Coordinate(*numbers) for _ in range(WIDTH)] for _ in range(NUM_ROWS)]
    draw = random.Random(5)
    zeros = 0
    for step in range(60):
        present = sorted(draw.sample(range(NUM_ROWS), 1 + step % NUM_ROWS))
        gradient = random_rows(step, len(present), WIDTH)
        rows.update(torch.tensor(present), gradient)
        for row, line in zip(present, gradient.tolist(), strict=True):
            for coordinate, number in zip(plain[row], line, strict=True):
                coordinate.push(number)
        expected = torch.tensor([[coordinate.weight for coordinate in line] for line in plain], dtype=torch.float64)
        torch.testing.assert_close(rows.values, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(rows.values == 0, expected == 0)
        zeros += int((expected[present] == 0).sum())
    assert (zeros > 0) == (l1 > 0)


def test_ftrl_weights_are_exactly_zero_within_l1_and_only_there() -> None:
    rows = rows_of(FTRL(0.1, l1=1.5), torch.zeros(50, WIDTH, dtype=torch.float32))
    for step in range(20):
        rows.update(torch.arange(50), random_rows(step, 50, WIDTH, torch.float32))
        assert torch.equal(rows.values == 0, rows.state["z"].abs() <= 1.5)
        assert not rows.values.signbit()[rows.values == 0].any()
    assert 0 < int((rows.values == 0).sum()) < rows.values.numel()


def test_ftrl_begins_where_its_first_values_are() -> None:
    first = random_rows(3, NUM_ROWS)
    rows = rows_of(FTRL(0.1, l1=0.4, l2=0.2), first)
    rows.update(torch.arange(NUM_ROWS), torch.zeros_like(first))
    torch.testing.assert_close(rows.values, first, rtol=1e-14, atol=0)
    rows.update(torch.arange(NUM_ROWS), torch.full_like(first, 1e-6))
    assert ((rows.values - first).abs() < 1e-4).all()
    assert (rows.values < first).all()


def test_ftrl_without_penalties_steps_as_gradient_descent_with_its_rates() -> None:
    rows = rows_of(FTRL(0.1), torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64))
    values, squares = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64), 0
    for step in range(20):
        gradient = random_rows(step, NUM_ROWS, WIDTH)
        rows.update(torch.arange(NUM_ROWS), gradient)
        squares = squares + gradient**2
        values = values - 0.1 / (1 + squares.sqrt()) * gradient
    torch.testing.assert_close(rows.values, values, rtol=1e-12, atol=1e-12)


def test_the_soft_threshold_is_exact() -> None:
    values = torch.tensor([[3.0, -3.0, 0.5, -0.5, 0.25, 0.0]])
    rows = rows_of(Proximal(0.5, l1=1.0), values)
    rows.update(torch.tensor([0]), torch.zeros_like(values))
    assert rows.values.tolist() == [[2.5, -2.5, 0.0, 0.0, 0.0, 0.0]]
    assert not rows.values.signbit()[0, 2:].any()
    rows.update(torch.tensor([0]), torch.tensor([[1.0, 1.0, -2.0, 2.0, 1.0, -0.5]]))
    assert rows.values.tolist() == [[1.5, -2.5, 0.5, -0.5, 0.0, 0.0]]


def test_without_a_penalty_proximal_is_gradient_descent() -> None:
    ours, theirs = rows_of(Proximal(0.1, l1=0.0), random_rows(1, 5)), rows_of(SGD(0.1), random_rows(1, 5))
    for step in range(5):
        ours.update(torch.arange(5), random_rows(step, 5))
        theirs.update(torch.arange(5), random_rows(step, 5))
    assert torch.equal(ours.values, theirs.values)


def test_proximal_finds_the_solution_of_a_penalized_problem() -> None:
    """Of (w - t)² / 2 + l1 |w| that is the soft threshold of t."""
    target = torch.tensor([[2.0, -0.7, 0.2, -0.2]], dtype=torch.float64)
    rows = rows_of(Proximal(0.3, l1=0.5), torch.ones_like(target))
    for _ in range(100):
        rows.update(torch.tensor([0]), rows.values - target)
    torch.testing.assert_close(rows.values, torch.tensor([[1.5, -0.2, 0.0, 0.0]], dtype=torch.float64))
    assert rows.values[0, 2:].tolist() == [0.0, 0.0]
