from __future__ import annotations

from collections.abc import Mapping

import pytest

from paceline.errors import UsageError
from paceline.tools.tune.search_space import Span, read_search

LR = {"lr": {"low": 0.001, "high": 1.0}}


def test_what_is_written_is_what_is_searched() -> None:
    told = {"trials": 5, "parameters": {"lr": {"low": "1e-4", "high": 1, "log": True}, "batch": [16, 32]}}
    search = read_search({**told, "metric": "accuracy", "run": {"grace_s": 2.0}}, "here")
    assert search.parameters == {"lr": Span(1e-4, 1, log=True), "batch": (16, 32)}
    assert (search.method, search.num_trials, search.minimizes) == ("tpe", 5, False)
    assert search.run == {"grace-s": 2.0}


def test_a_grid_is_all_combinations() -> None:
    spans = {"a": {"low": 1, "high": 3}, "b": {"low": 0.0, "high": 1.0, "steps": 3}, "c": ["x"]}
    search = read_search({"method": "grid", "parameters": spans}, "here")
    assert search.num_trials == 9
    assert search.combinations()[1] == {"a": 1, "b": 0.5, "c": "x"}
    whole = read_search(
        {"method": "grid", "parameters": {"n": {"low": 1, "high": 100, "log": True, "steps": 5}}}, "here"
    )
    assert [point["n"] for point in whole.combinations()] == [1, 3, 10, 32, 100]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"trials": 3}, "nothing to search"),
        ({"trials": 3, "parameters": {}}, "nothing to search"),
        ({"trials": 3, "parameters": {"lr": []}}, "'lr': expected different values, got none"),
        ({"trials": 3, "parameters": {"lr": [1, 2, 1]}}, "got 1 twice"),
        ({"trials": 3, "parameters": {"lr": [1, True]}}, "got True twice"),
        ({"trials": 3, "parameters": {"lr": [float("nan")]}}, "that are finite"),
        (
            {"trials": 3, "parameters": {"lr": 0.1}},
            "'lr' is 0.1, expected a list of values, .* or low and high",
        ),
        ({"trials": 3, "parameters": {"lr": {"low": 1}}}, "'lr': high is missing: expected low and high"),
        (
            {"trials": 3, "parameters": {"lr": {"low": 1, "high": 1}}},
            "low must be less than high, got low 1 and high 1",
        ),
        ({"trials": 3, "parameters": {"lr": {"low": 1, "high": float("inf")}}}, "must be finite"),
        ({"trials": 3, "parameters": {"n": {"low": 1, "high": 10**400}}}, "high is 10*, expected .* 64 bits"),
        (
            {"method": "grid", "parameters": {"n": {"low": 0.5, "high": 1, "steps": 10**400}}},
            "steps is 10*, .* 64",
        ),
        ({"trials": 3, "parameters": {"lr": {"low": 0, "high": 1, "log": True}}}, "with log, low must be more than 0"),
        (
            {"trials": 3, "parameters": {"lr": {"low": 0, "high": 1, "lag": True}}},
            "'lag' is not known here",
        ),
        ({"trials": 3, "parameters": {"-lr": [1]}}, "a name has letters"),
        ({"trials": 0, "parameters": LR}, "trials must be at least 1"),
        ({"parameters": LR}, "tpe needs a number of trials"),
        ({"trials": 3, "parameters": LR, "method": "guess"}, "method is 'guess', expected one of grid, ra"),
        ({"trials": 3, "parameters": LR, "metrics": "loss"}, "'metrics' is not known here, expected parameters, meth"),
        ({"trials": 3, "Parameters": LR}, "'Parameters' is not known here, expected parameters"),
        ({"trials": 3, "parameters": ["lr"]}, "such as parameters: {lr: {low: 0.01, high: 1}}"),
        ({"trials": "many", "parameters": LR}, "here: trials is 'many', expected a whole number"),
        ({"trials": 2.5, "parameters": LR}, "here: trials is 2.5, expected a whole number"),
        ({"trials": 3, "seed": None, "parameters": LR}, "here: seed is empty, expected a whole number"),
        ({"trials": 3, "metric": "auc", "parameters": LR}, "here: metric is 'auc', expected one of loss, accuracy"),
        (
            {"trials": 3, "run": ["workers"], "parameters": LR},
            r"run is \['workers'\], expected options of",
        ),
        ({"trials": 3, "run": None, "parameters": LR}, "run is empty, expected options of `paceline run`"),
        ({"trials": 3, "parameters": {"lr": None}}, "parameter 'lr' is empty, expected a list of values"),
        (
            {"trials": 3, "parameters": {"lr": [1, None]}},
            r"'lr' is \[1, None\], expected .* a number, a text",
        ),
        ({"trials": 3, "parameters": {"lr": {"low": "a", "high": 1}}}, "'lr': low is 'a', expected a number"),
        ({"trials": 3, "parameters": {"lr": {"low": 1, "high": 2, "log": "no!"}}}, "log is 'no!', expected true or fa"),
        ({"trials": 3, "parameters": {"lr": {"low": 0.1, "high": 1, "steps": 3}}}, "steps are for a grid"),
        ({"trials": 3, "parameters": {"lr": [1]}, "method": "grid"}, "a grid tries all its combinations"),
        ({"parameters": LR, "method": "grid"}, "'lr': between 0.001 and 1 a grid needs steps"),
        ({"parameters": {"n": {"low": 1, "high": 10**9}}, "method": "grid"}, "a grid of 1000000000 combinations"),
        ({"parameters": {"n": {"low": 1, "high": 9, "steps": 1}}, "method": "grid"}, "steps must be at least 2"),
        ({"trials": 3, "parameters": {"run.workers": [1, 2]}, "run": {"workers": 2}}, "searched as run.workers"),
        (
            {"trials": 3, "parameters": {"run.grace_s": [1], "run.grace-s": [2]}},
            "parameter 'run.grace-s' is there twice",
        ),
        ({"trials": 3, "parameters": LR, "run": {"grace_s": 1, "grace-s": 2}}, "'grace-s' is set twice under run"),
        ({"trials": 3, "parameters": LR, "run": {"run_dir": "x"}}, "'run-dir' cannot be set for trials"),
    ],
)
def test_what_makes_no_search_is_told(told: Mapping[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_search(told, "here")
