"""`paceline.strategies` is the one place of the strategies, as a name and as a module."""

from __future__ import annotations

import inspect

import pytest

import paceline
from paceline.errors import UsageError
from paceline.job.strategy import Distribution
from paceline.strategies import Strategy, diloco
from paceline.training.arguments import choose_strategy

BY_NAME = ("all_reduce", "diloco", "downpour", "fsdp", "local_sgd")


def test_each_function_is_what_the_name_of_the_strategy_means() -> None:
    for name in BY_NAME:
        made = getattr(paceline.strategies, name)()
        assert made == choose_strategy(name.replace("_", "-"), Distribution()), name


def test_a_model_in_slices_by_groups_is_the_same_by_name_and_by_function() -> None:
    for between in (None, "all-reduce", "ssp:3", "parameter-server"):
        name = "fsdp:2" if between is None else f"{between}+fsdp:2"
        assert paceline.strategies.fsdp(2, between=between) == choose_strategy(name, Distribution())


@pytest.mark.parametrize(
    ("workers", "between", "said"),
    [
        (None, "bsp", "all workers keep one model: say how many do in each group"),
        (0, None, "workers is 0, expected 1 or more"),
        (2, "fsdp", "between is 'fsdp', expected how groups of workers become one model"),
        (2, "bsp+tensor:2", "expected how groups"),
        (2, diloco(5), "expected how groups"),
        (2, "ring", "'ring' is not known"),
    ],
)
def test_what_groups_cannot_be_told_is_refused(workers: int | None, between: str | Strategy, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        paceline.strategies.fsdp(workers, between=between)


def test_all_of_them_are_there_and_nowhere_else() -> None:
    functions = [name for name in paceline.strategies.__all__ if inspect.isfunction(getattr(paceline.strategies, name))]
    assert sorted(functions) == sorted(BY_NAME)
    assert paceline.strategies.diloco is diloco
    assert not {"diloco", "downpour", "fsdp", "local_sgd"} & set(paceline.__all__)
    assert "strategy" not in inspect.signature(paceline.all_reduce).parameters
    assert paceline.all_reduce is not paceline.strategies.all_reduce


def test_each_is_described_by_an_example() -> None:
    for name in BY_NAME:
        assert ">>> " in (inspect.getdoc(getattr(paceline.strategies, name)) or ""), name
