"""Rows under the rules of torch.optim: the dense optimizer where all rows are present, lazy where some are not."""

import pytest
import torch
from tests.update.rows.row_rules import Rows, random_rows, rows_of

from paceline.update.named_rules import SGD, Adagrad, Adam, AdamW, RowwiseAdagrad, torch_optim
from paceline.update.rows.rules import count_step
from paceline.update.rules import RuleSpec

NUM_ROWS = 6
ALL = torch.arange(NUM_ROWS)

EXACT = {
    "sgd": SGD(0.1),
    "decay": SGD(0.1, weight_decay=0.1),
    "momentum": SGD(0.1, 0.9),
    "dampened": SGD(0.1, 0.9, 0.3, weight_decay=0.1),
    "nesterov": SGD(0.1, 0.9, nesterov=True),
    "up": torch_optim("SGD", lr=0.1, momentum=0.5, maximize=True),
    "adagrad": Adagrad(0.1, weight_decay=0.1, initial_accumulator_value=0.2),
}
CLOSE = {
    "adagrad-decay": Adagrad(0.1, 0.05),
    "adam": Adam(0.01, weight_decay=0.1),
    "amsgrad": Adam(0.01, (0.8, 0.9), amsgrad=True),
    "adamw": AdamW(0.01, weight_decay=0.1),
    "adam-decoupled": torch_optim("Adam", lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
}


class Twins:
    """Rows, and the same matrix under the dense optimizer."""

    def __init__(self, spec: RuleSpec, dtype: torch.dtype) -> None:
        self.rows = rows_of(spec, random_rows(9, NUM_ROWS, dtype=dtype))
        self.matrix = torch.nn.Parameter(self.rows.values.clone())
        numbers = {key: value for key, value in spec.groups[0].items() if not (key == "foreach" and value)}
        if spec.name.endswith("AdamW"):
            del numbers["decoupled_weight_decay"]
        self.dense = getattr(torch.optim, spec.name.rpartition(".")[2])([self.matrix], **numbers)

    def step(self, seed: int, present: torch.Tensor = ALL) -> None:
        """One step of both; the dense one has zeros where rows are absent."""
        gradient = random_rows(seed, len(present), dtype=self.matrix.dtype)
        self.rows.update(present, gradient)
        self.matrix.grad = torch.zeros_like(self.matrix)
        self.matrix.grad[present] = gradient
        self.dense.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spec", EXACT.values(), ids=EXACT)
def test_with_all_rows_present_it_is_the_dense_optimizer_bit_for_bit(spec: RuleSpec, dtype: torch.dtype) -> None:
    twins = Twins(spec, dtype)
    for step in range(20):
        twins.step(step)
    assert torch.equal(twins.rows.values, twins.matrix)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("spec", CLOSE.values(), ids=CLOSE)
def test_with_a_count_for_each_row_it_is_so_but_for_rounding(
    spec: RuleSpec, dtype: torch.dtype, tolerance: float
) -> None:
    twins = Twins(spec, dtype)
    for step in range(20):
        twins.step(step)
    torch.testing.assert_close(twins.rows.values, twins.matrix.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", [SGD(0.1), Adagrad(0.1)], ids=lambda spec: spec.name)
def test_rules_that_rest_on_zeros_lose_nothing_by_being_lazy(spec: RuleSpec) -> None:
    twins = Twins(spec, torch.float64)
    for step in range(20):
        twins.step(step, torch.tensor([step % NUM_ROWS, (step + 1) % NUM_ROWS]))
    assert torch.equal(twins.rows.values, twins.matrix)


@pytest.mark.parametrize("spec", [SGD(0.1, 0.9), SGD(0.1, weight_decay=0.1), Adam(0.01)], ids=lambda spec: spec.name)
def test_an_absent_row_rests_where_the_dense_rule_and_present_zeros_move_it(spec: RuleSpec) -> None:
    """T11: lazy rules are algorithms of their own."""
    twins, zeros = Twins(spec, torch.float64), Twins(spec, torch.float64).rows
    first = random_rows(1, NUM_ROWS)
    twins.step(1)
    zeros.update(ALL, first)
    rested = twins.rows.values[0].clone()
    twins.step(2, ALL[1:])
    zeros.update(ALL, torch.zeros_like(first))
    assert torch.equal(twins.rows.values[0], rested)
    assert (twins.matrix[0] != rested).all()
    assert (zeros.values[0] != rested).all()
    torch.testing.assert_close(zeros.values[0], twins.matrix.detach()[0], rtol=1e-14, atol=1e-14)


def sparse_adam(
    matrix: torch.nn.Parameter, optimizer: torch.optim.SparseAdam, present: torch.Tensor, seed: int
) -> None:
    """One step of torch's own lazy Adam."""
    gradient = random_rows(seed, len(present))
    matrix.grad = torch.sparse_coo_tensor(present[None], gradient, matrix.shape, check_invariants=True)
    optimizer.step()


def lazy_pair() -> tuple[Rows, torch.nn.Parameter, torch.optim.SparseAdam]:
    """Rows under Adam and the same matrix under SparseAdam; they add eps at different places, so it is tiny."""
    rows = rows_of(Adam(0.01, eps=1e-30), random_rows(9, NUM_ROWS))
    matrix = torch.nn.Parameter(rows.values.clone())
    return rows, matrix, torch.optim.SparseAdam([matrix], lr=0.01, eps=1e-30)


def test_adam_equals_sparse_adam_while_all_rows_are_present() -> None:
    rows, matrix, optimizer = lazy_pair()
    for step in range(10):
        rows.update(ALL, random_rows(step, NUM_ROWS))
        sparse_adam(matrix, optimizer, ALL, step)
    torch.testing.assert_close(rows.values, matrix.detach(), rtol=1e-13, atol=1e-13)


def test_adam_counts_the_steps_of_each_row_and_sparse_adam_those_of_the_table() -> None:
    """T11: which count corrects the averages has to be said."""
    rows, matrix, optimizer = lazy_pair()
    for step in range(10):
        rows.update(ALL[:3], random_rows(step, 3))
        sparse_adam(matrix, optimizer, ALL[:3], step)
    torch.testing.assert_close(rows.values, matrix.detach(), rtol=1e-13, atol=1e-13)
    rows.update(ALL, random_rows(99, NUM_ROWS))
    sparse_adam(matrix, optimizer, ALL, 99)
    start = random_rows(9, NUM_ROWS)
    torch.testing.assert_close(rows.values[:3], matrix.detach()[:3], rtol=1e-13, atol=1e-13)
    moved, moved_sparse = (rows.values - start)[3:], (matrix.detach() - start)[3:]
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.01))  # as any first step of Adam
    late = 0.01 * (0.1 / 0.001**0.5) * (1 - 0.999**11) ** 0.5 / (1 - 0.9**11)
    torch.testing.assert_close(moved_sparse.abs(), torch.full_like(moved, late))
    assert rows.state["step"][:, 0].tolist() == [11, 11, 11, 1, 1, 1]


def test_steps_are_counted_beyond_what_16_bits_can_add_up() -> None:
    digits = torch.zeros(2, 2, dtype=torch.bfloat16)
    counts = [count_step(digits).tolist() for _ in range(1000)]
    assert counts == [[[float(step)]] * 2 for step in range(1, 1001)]


def test_rowwise_adagrad_adds_the_mean_of_the_squares_of_a_row() -> None:
    rows = rows_of(RowwiseAdagrad(0.1, initial_accumulator_value=0.5, eps=1e-3), random_rows(9, NUM_ROWS))
    values, total = random_rows(9, NUM_ROWS), torch.full((NUM_ROWS,), 0.5, dtype=torch.float64)
    for step in range(10):
        present, gradient = ALL[step % 3 :: 2], random_rows(step, len(ALL[step % 3 :: 2]))
        rows.update(present, gradient)
        for row, line in zip(present.tolist(), gradient, strict=True):
            total[row] += sum(number * number for number in line.tolist()) / 4
            values[row] -= 0.1 * line / (total[row].sqrt() + 1e-3)
    torch.testing.assert_close(rows.values, values, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(rows.state["sum"][:, 0], total, rtol=1e-13, atol=1e-13)


def test_rowwise_adagrad_is_adagrad_where_rows_have_one_number() -> None:
    ours, theirs = rows_of(RowwiseAdagrad(0.1), random_rows(9, 5, 1)), rows_of(Adagrad(0.1), random_rows(9, 5, 1))
    for step in range(10):
        ours.update(ALL[:5], random_rows(step, 5, 1))
        theirs.update(ALL[:5], random_rows(step, 5, 1))
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-13, atol=1e-13)


def test_adagrad_of_a_sum_is_not_that_of_its_parts() -> None:
    """T15: two pushes make two updates, unless they are added before."""
    parts, whole = (rows_of(Adagrad(0.1), random_rows(9, NUM_ROWS)) for _ in range(2))
    first, second = random_rows(1, NUM_ROWS), random_rows(2, NUM_ROWS)
    parts.update(ALL, first)
    parts.update(ALL, second)
    whole.update(ALL, first + second)
    assert not torch.allclose(parts.values, whole.values)
