"""`paceline.strategies` is the one place of the strategies, as a name and as a module."""

from __future__ import annotations

import inspect

import paceline
from paceline.job.strategy import Distribution
from paceline.strategies import diloco
from paceline.training.arguments import choose_strategy

BY_NAME = ("all_reduce", "diloco", "downpour", "fsdp", "local_sgd")


def test_each_function_is_what_the_name_of_the_strategy_means() -> None:
    for name in BY_NAME:
        made = getattr(paceline.strategies, name)()
        assert made == choose_strategy(name.replace("_", "-"), Distribution()), name


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
