from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import pytest

from paceline.errors import UsageError
from paceline.tools.tune.display import draw_search
from paceline.tools.tune.search_space import Search, read_search
from paceline.tools.tune.study import Study, Trial

LR = {"lr": {"low": 0.01, "high": 1.0, "log": True}}


def made(**told: object) -> Search:
    return read_search({"trials": 12, "parameters": LR, **told}, "here")


def ask(study: Study) -> Trial:
    trial = study.ask()
    assert trial is not None
    return trial


def test_the_journal_keeps_everything_but_a_torn_last_line(tmp_path: Path) -> None:
    journal, search = tmp_path / "journal.log", made(metric="accuracy", seed=4)
    study = Study.open(search, journal)
    for value in (0.5, 0.75, 0.6):
        study.finish(ask(study).number, value, [0.1, value])
    study.fail(ask(study).number, "no data")
    study.prune(ask(study).number, "was behind")
    cut = ask(study)
    before = study.trials()
    with journal.open("a") as file:
        file.write('{"op_code": 5, "worker')

    again = Study.open(search, journal)
    assert [trial.state for trial in again.trials()] == ["finished"] * 3 + ["failed", "pruned", "interrupted"]
    assert again.trials()[:5] == before[:5]
    best = again.best()
    assert best is not None
    assert (best.number, best.value, best.reports) == (1, 0.75, (0.1, 0.75))
    repeated = ask(again)
    assert (repeated.number, repeated.parameters) == (6, cut.parameters)
    assert ask(again).parameters not in [trial.parameters for trial in before]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda line: line[:-9], "is damaged in line {at} of"),
        (lambda line: b"\xff" + line[1:], "is damaged in line {at} of"),
        (lambda line: b"[1]", "line {at} of .*: expected an operation"),
        (lambda line: b"{}", "line {at} of .*: expected an operation"),
        (lambda line: b'{"op_code":8,"trial_id":99}', "line {at} of .*: it is of trial 99, and 2 were begun before"),
        (lambda line: b'{"op_code":77}', "line {at} of .*: AssertionError"),
        (lambda line: b'{"op_code":8,"trial_id":1}', "line {at} of .*: KeyError"),
    ],
)
def test_a_damaged_line_is_named_and_the_lines_before_it_can_be_kept(
    tmp_path: Path, damage: Callable[[bytes], bytes], said: str
) -> None:
    journal, search = tmp_path / "journal.log", made()
    study = Study.open(search, journal)
    for value in (0.5, 0.75, 0.6, 0.7):
        study.finish(ask(study).number, value, [0.1, value])
    before = study.trials()
    lines = journal.read_bytes().splitlines()
    at = [number for number, line in enumerate(lines) if b'"trial_id":1,' in line][1]  # a report of the second trial
    lines[at] = damage(lines[at])
    journal.write_bytes(broken := b"\n".join([*lines, b"torn"]))
    with pytest.raises(UsageError, match=f"{said.format(at=at + 1)}.*Nothing was changed.*head -n {at} ") as caught:
        Study.open(search, journal)
    assert journal.read_bytes().removesuffix(b"torn") == broken.removesuffix(b"torn")

    subprocess.run(str(caught.value).rpartition("trials again: ")[2], shell=True, check=True)
    again = Study.open(search, journal)
    assert again.trials()[0] == before[0]
    assert [trial.state for trial in again.trials()] == ["finished", "interrupted"]
    assert ask(again).parameters == before[1].parameters


def test_a_journal_that_is_none_from_its_first_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal.log"
    journal.write_text("no\nno\n")
    with pytest.raises(UsageError, match=r"line 1 of 2.* start a new search, with another --out"):
        Study.open(made(), journal)


def test_a_grid_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    search = read_search({"method": "grid", "parameters": {"a": [1, 2], "b": ["x", "y"]}}, "here")
    study = Study.open(search, tmp_path / "journal.log")
    first, second, third = ask(study), ask(study), ask(study)
    study.finish(second.number, 1.0)
    again = Study.open(search, tmp_path / "journal.log")
    assert [ask(again).parameters for _ in range(3)] == [first.parameters, third.parameters, {"a": 2, "b": "y"}]
    assert again.ask() is None


@pytest.mark.parametrize("parameters", [LR, {"lr": [0.1, 0.2, 0.3]}, {"n": {"low": 1, "high": 64, "log": True}}])
def test_the_same_seed_suggests_the_same(parameters: Mapping[str, object]) -> None:
    studies = [Study.open(made(seed=seed, parameters=parameters, method="random")) for seed in (1, 1, 2)]
    asked = [[ask(study).parameters for _ in range(12)] for study in studies]
    assert asked[0] == asked[1] != asked[2]


def test_a_trial_behind_the_median_is_stopped() -> None:
    study = Study.open(made(pruning="median"))
    for _ in range(5):
        study.finish(ask(study).number, 1.0, [3.0, 2.0, 1.0])
    good, bad = ask(study), ask(study)
    assert not study.report(good.number, [2.0])
    assert not study.report(good.number, [2.0, 1.5])
    assert study.report(bad.number, [2.5, 2.5])
    assert study.trials()[bad.number].reports == (2.5, 2.5)
    last = ask(study)
    assert not study.report(last.number, [2.0, 1.5, 9.0])  # it is through, like those before it


def test_what_counts_is_what_the_first_trial_has_reported() -> None:
    study = Study.open(made())
    assert study.measured is None
    study.finish(ask(study).number, 1.0, measured=False)
    assert study.measured is False
    assert Study.open(made(metric="accuracy")).measured


def test_a_parameter_that_decides_is_important_and_one_without_effect_is_left_out() -> None:
    study = Study.open(made(method="random", trials=60, parameters={**LR, "batch": [16, 32, 64, 128]}))
    while (trial := study.ask()) is not None:
        study.finish(trial.number, abs(float(trial.parameters["lr"]) - 0.3))
    assert study.importances() == {"lr": 1.0}


def test_where_nothing_has_an_effect_nothing_is_important() -> None:
    """The results come in an order of their own; the same ones say the same each time."""
    found: list[int] = []
    for seed in range(5):
        study, noise = Study.open(made(method="random", trials=40, parameters={**LR, "batch": [16, 32]})), Random(seed)
        while (trial := study.ask()) is not None:
            study.finish(trial.number, noise.random())
        assert study.importances() == study.importances()
        found.append(len(study.importances()))
    assert sum(found) <= 2  # of ten, each by chance once in 41


def test_all_of_it_can_be_drawn(tmp_path: Path) -> None:
    parameters = {**LR, "batch": [16, 32]}
    search, study = made(parameters=parameters), Study.open(made(parameters=parameters))
    draw_search(search, study.trials(), study.best(), study.importances(), tmp_path / "none.png", "nothing")
    assert study.importances() == {}
    for turn in range(12):
        trial = ask(study)
        loss = float(trial.parameters["lr"])
        match turn % 4:
            case 0:
                study.report(trial.number, [3.0, float("nan")])
                study.prune(trial.number, "diverged")
            case 1:
                study.fail(trial.number, "no data")
            case _:
                study.finish(trial.number, loss, [3.0, loss])
    assert study.importances() == {}  # too few
    importances = {"lr": 0.9, "batch": 0.1}
    draw_search(search, study.trials(), study.best(), importances, tmp_path / "all.png", "all")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("none.png", "all.png"))
