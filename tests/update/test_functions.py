"""Functions that come with the package, over dense ranges: what the parts find together is what the whole has."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.functions import Kind, function_at, merge, total
from paceline.update.named_rules import resolve, rule

NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


def over_parts(name: str, values: Tensor, cuts: list[int], **numbers: float) -> list[dict[str, Tensor]]:
    """What a function returns on servers that have the values between these places."""
    places = sorted({0, values.numel(), *(cut % values.numel() for cut in cuts)})
    function = function_at(name, "range", None)
    parts: list[dict[str, Tensor]] = []
    for start, stop in pairwise(places):
        found = function(values[start:stop], start, **numbers)
        parts.append(found if isinstance(found, dict) else {})
    return parts


@settings(deadline=None, max_examples=25)
@given(numbers=NUMBERS, cuts=st.lists(st.integers(0, 100), max_size=3), k=st.integers(0, 50), seed=st.integers(0, 9))
def test_parts_find_together_what_the_whole_has(numbers: list[float], cuts: list[int], k: int, seed: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    whole, parts = over_parts("summary", values, []), over_parts("summary", values, cuts)
    for name, tensor in total(whole).items():
        assert torch.allclose(total(parts)[name], tensor), name
    assert int(total(parts)["nonzero"]) == sum(number != 0 for number in numbers)
    for name, extra in (("top", {}), ("sample", {"seed": seed})):
        one, many = (merge(over_parts(name, values, c, k=k, **extra), k) for c in ([], cuts))
        assert one.keys() == many.keys() == {"ids", "values", "order"}
        assert all(torch.equal(one[key], many[key]) for key in one)
        assert len(one["ids"]) == min(k, len(numbers))
        assert torch.equal(values[one["ids"]], one["values"])


def test_the_top_is_what_sorting_finds_and_equals_go_by_place() -> None:
    values = torch.tensor([1.0, -3.0, 3.0, 0.0, 2.0])
    assert over_parts("top", values, [], k=3)[0]["ids"].tolist() == [1, 2, 4]


def test_every_sample_is_as_likely_as_any_other() -> None:
    counts = torch.zeros(10)
    for seed in range(500):
        counts[over_parts("sample", torch.zeros(10), [], k=3, seed=seed)[0]["ids"]] += 1
    assert (counts - 150).abs().max() < 5 * (500 * 0.3 * 0.7) ** 0.5


def test_values_are_scaled_and_moved_towards_0_in_place() -> None:
    values = torch.tensor([1.0, -0.25, 0.5, -2.0])
    function_at("soft_threshold", "range", None)(values, 0, threshold=0.5)
    assert values.tolist() == [0.5, 0.0, 0.0, -1.5]
    assert not values[1:3].signbit().any()
    function_at("scale", "range", None)(values, 0, factor=-2.0)
    assert values.tolist() == [-1.0, 0.0, 0.0, 3.0]


@pytest.mark.parametrize("kind", ["range", "rows"])
def test_the_same_functions_are_there_for_both_kinds_of_table(kind: Kind) -> None:
    with pytest.raises(UsageError, match="Expected one of sample, scale, soft_threshold, summary, top, or the import"):
        function_at("sum", kind, None)


@pytest.mark.parametrize(
    ("name", "number"), [("top", {"k": -1}), ("sample", {"k": -1}), ("soft_threshold", {"threshold": -0.1})]
)
def test_numbers_out_of_range_are_refused(name: str, number: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="expected 0 or more"):
        over_parts(name, torch.ones(3), [], **number)


def test_a_path_is_looked_up_only_if_it_is_allowed() -> None:
    assert function_at("torch:sqrt", "range", {"torch:sqrt"})(torch.tensor(4.0)) == 2
    with pytest.raises(UsageError, match=r"The function torch:cos may not be loaded here. Allowed: torch:sqrt\."):
        function_at("torch:cos", "range", {"torch:sqrt"})
    with pytest.raises(UsageError, match="Module torch has no function pi"):
        function_at("torch:pi", "range", None)


def test_a_module_that_fails_as_it_is_imported_is_told_for_functions_and_rules() -> None:
    broken = "tests.nodes.broken_module:Rule"
    with pytest.raises(UsageError, match=r"function .* cannot be imported: RuntimeError: this module is broken"):
        function_at(broken, "rows", None)
    with pytest.raises(UsageError, match=r"update rule .* cannot be imported: RuntimeError: this module is broken"):
        resolve(rule(broken), None)
