"""What every rule for rows keeps to; a new rule joins by a line in RULES."""

import math

import pytest
import torch
from tests.update.rows.row_rules import RULES, Rows, random_rows, rows_of

from paceline.errors import UsageError
from paceline.update.kernels import Kernel
from paceline.update.named_rules import FTRL, SGD, Add, Proximal, RowwiseAdagrad, resolve, rule, torch_optim
from paceline.update.rows import rules
from paceline.update.rows.rules import RowRule, StateColumn, row_rule
from paceline.update.rules import RuleSpec

HERE = "tests.update.rows.test_row_rules"
every_rule = pytest.mark.parametrize("spec", RULES.values(), ids=RULES)


def train(rows: Rows, steps: range, num_rows: int = 8) -> None:
    """Update some rows at each step, others at the next."""
    for step in steps:
        positions = torch.randperm(num_rows, generator=torch.Generator().manual_seed(step))[: 2 + step % 5]
        rows.update(positions, random_rows(step, len(positions), dtype=rows.values.dtype))


def assert_same(ours: Rows, theirs: Rows) -> None:
    for name, column in ours.all().items():
        torch.testing.assert_close(column, theirs.all()[name], rtol=0, atol=0, equal_nan=True, msg=name)


@every_rule
def test_is_a_row_rule_with_columns_that_can_be_told_apart(spec: RuleSpec) -> None:
    made = row_rule(spec, allowed=frozenset({spec.name}))
    names = [column.name for column in made.columns]
    assert isinstance(made, RowRule)
    assert len(set(names)) == len(names)
    assert made.echo in ("", *names)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_moves_the_rows_that_are_given_and_no_others(spec: RuleSpec, dtype: torch.dtype) -> None:
    rows = rows_of(spec, random_rows(100, 8, dtype=dtype))
    before = {name: column.clone() for name, column in rows.all().items()}
    given, gradient = torch.tensor([6, 1, 3]), random_rows(7, 3, dtype=dtype)
    pushed = gradient.clone()
    rows.update(given, gradient)
    absent = torch.tensor([0, 2, 4, 5, 7])
    assert torch.equal(gradient, pushed)
    assert (rows.values[given] != before["values"][given]).any(dim=1).all()
    for name, column in rows.all().items():
        assert column.dtype == dtype
        assert column[given].isfinite().all()
        torch.testing.assert_close(column[absent], before[name][absent], rtol=0, atol=0, equal_nan=True)


@every_rule
def test_no_rows_are_an_update_too(spec: RuleSpec) -> None:
    rows = rows_of(spec, random_rows(100, 8))
    twin = rows_of(spec, random_rows(100, 8))
    rows.update(torch.empty(0, dtype=torch.int64), torch.empty(0, 4, dtype=torch.float64))
    assert_same(rows, twin)


@every_rule
def test_present_zeros_are_harmless(spec: RuleSpec) -> None:
    rows = rows_of(spec, torch.zeros(3, 4, dtype=torch.float16))
    rows.update(torch.arange(3), torch.zeros(3, 4, dtype=torch.float16))
    assert torch.equal(rows.values, torch.zeros(3, 4, dtype=torch.float16))


@every_rule
def test_goes_on_from_state_that_was_kept_elsewhere(spec: RuleSpec) -> None:
    rows, whole = rows_of(spec, random_rows(100, 8)), rows_of(spec, random_rows(100, 8))
    train(whole, range(12))
    train(rows, range(6))
    moved = rows_of(spec, rows.values)
    moved.state = {name: column.clone() for name, column in rows.state.items()}
    train(moved, range(6, 12))
    assert_same(moved, whole)


@every_rule
def test_the_order_of_rows_and_their_neighbours_do_not_matter(spec: RuleSpec) -> None:
    forward, backward, alone = (rows_of(spec, random_rows(100, 8)) for _ in range(3))
    positions = torch.arange(8)
    for step in range(4):
        gradient = random_rows(step, 8)
        echo = None if step % 2 else random_rows(step + 50, 8)
        forward.update(positions, gradient, echo)
        backward.update(positions.flip(0), gradient.flip(0), None if echo is None else echo.flip(0))
        for row in range(8):
            one = slice(row, row + 1)
            alone.update(positions[one], gradient[one], None if echo is None else echo[one])
    assert_same(forward, backward)
    assert_same(forward, alone)


@every_rule
def test_bits_do_not_depend_on_chance(spec: RuleSpec) -> None:
    first, second = (rows_of(spec, random_rows(100, 8, dtype=torch.float32)) for _ in range(2))
    train(first, range(10))
    train(second, range(10))
    assert_same(first, second)


@every_rule
def test_rows_of_16_bits_are_computed_in_32_and_rounded_once(spec: RuleSpec) -> None:
    narrow = rows_of(spec, random_rows(100, 8, dtype=torch.bfloat16))
    wide = rows_of(spec, narrow.values.float())
    gradient = random_rows(1, 8, dtype=torch.bfloat16)
    narrow.update(torch.arange(8), gradient)
    wide.update(torch.arange(8), gradient.float())
    for name, column in narrow.all().items():
        assert torch.equal(column, wide.all()[name].bfloat16())


def test_a_column_is_as_wide_as_the_row_unless_it_says_otherwise() -> None:
    assert [column.elements(16) for column in row_rule(RULES["adam"], None).columns] == [16, 16, 2]
    assert [column.elements(16) for column in row_rule(RULES["rowwise"], None).columns] == [1]


class Partial:
    columns = ()


class Dense:
    granularity = "element"

    def update(self, values: list, gradients: list, hyper: list, groups: list) -> None: ...

    def state(self) -> dict:
        return {}

    def load_state(self, state: dict) -> None: ...


class Twice:
    columns = (StateColumn("a"), StateColumn("a", 1))
    echo = ""

    def update(self, *given: object) -> None: ...


class Stray(Twice):
    columns = (StateColumn("a"),)
    echo = "b"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (torch_optim("NAdam"), "no form of torch.optim.NAdam for rows. Row tables have add, torch.optim.SGD, .*ftrl"),
        (RuleSpec("nonsense", ({},)), "no form of nonsense for rows. .*'package.module:Rule'"),
        (RuleSpec("torch.optim.SGD", ({"lr": math.nan},)), "torch.optim.SGD: lr is nan, expected a finite number"),
        (RuleSpec("torch.optim.SGD", ({"lr": 0.1},)), "torch.optim.SGD lacks momentum, dampening, nesterov"),
        (RuleSpec("ftrl", ({"alpha": 0.1, "beta": None},)), "ftrl lacks beta, l1, l2. Take it from paceline.update"),
        (rule(f"{HERE}:Partial"), "Partial is not a rule for rows: it has no echo, update"),
        (rule(f"{HERE}:Dense"), "Dense is not a rule for rows: it has no columns, echo"),
        (rule(f"{HERE}:Twice"), "two columns of one name: a, a"),
        (rule(f"{HERE}:Stray"), "echoes 'b', which is none of its columns: a"),
        (rule(f"{HERE}:Absent"), "has no class Absent"),
    ],
    ids=lambda value: value.name if isinstance(value, RuleSpec) else "",
)
def test_says_what_rows_have_instead(spec: RuleSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        row_rule(spec, allowed=None)


def test_loads_nothing_that_is_not_allowed() -> None:
    with pytest.raises(UsageError, match=r"no_such_module:Rule may not be loaded here. Allowed: a:B\. "):
        row_rule(rule("no_such_module:Rule"), frozenset({"a:B"}))


@pytest.mark.parametrize("name", ["ftrl", "revision", "proximal", "rowwise"])
def test_dense_tables_refuse_what_is_for_rows(name: str) -> None:
    with pytest.raises(UsageError, match=r"works on row tables only.* is dense\. Declare it with rows="):
        resolve(RULES[name], allowed=None)


@pytest.mark.parametrize("name", rules._KNOWN)
def test_every_known_rule_is_in_the_contract(name: str) -> None:
    assert name in {spec.name for spec in RULES.values()}


def test_dense_tables_and_rows_share_what_both_have() -> None:
    assert isinstance(resolve(SGD(0.1), None), Kernel)
    assert isinstance(row_rule(SGD(0.1), None), RowRule)
    assert isinstance(row_rule(Add(), None), RowRule)


def test_what_a_table_was_declared_without_cannot_come_later() -> None:
    rows = rows_of(SGD(0.1), random_rows(0, 2))
    rows.hyper = SGD(0.1, 0.9).groups[0]
    with pytest.raises(UsageError, match="momentum is in use now, but it was not when the table was declared"):
        rows.update(torch.arange(2), random_rows(1, 2))
    assert torch.equal(rows.values, random_rows(0, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FTRL(alpha=0.0), "alpha of FTRL is 0.0, expected a number above 0"),
        (lambda: FTRL(beta=float("nan")), "beta of FTRL is nan"),
        (lambda: FTRL(l1=-1.0), "l1 of FTRL is -1.0, expected 0 or a number above"),
        (lambda: RowwiseAdagrad(lr=float("inf")), "lr of RowwiseAdagrad is inf"),
        (lambda: Proximal(0.1, l1=-0.1), "l1 of Proximal is -0.1"),
    ],
)
def test_numbers_out_of_range_are_refused_where_they_are_given(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
