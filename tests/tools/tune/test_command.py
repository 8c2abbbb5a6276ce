"""The command itself, once with real runs."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import paceline
from paceline.cli import answer
from paceline.errors import UsageError
from paceline.launch.config import RunConfig, read_config
from paceline.tools.tune import api
from paceline.tools.tune.api import Tuned, describe_task
from paceline.tools.tune.driver import DriverOptions
from paceline.tools.tune.study import Folder, Study

SCRIPT = Path(__file__).with_name("scripts") / "line.py"
TWO = {"method": "grid", "metric": "loss", "pruning": "halving", "parameters": {"x": [1.0, 2.0]}}


def test_a_real_run_is_followed_and_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of two trials the better one has finished before."""
    told = tmp_path / "two.json"
    told.write_text(json.dumps({**TWO, "run": {"transport": "memory"}}))
    task = describe_task(told, SCRIPT, (), {"workers": 2})
    with Folder.create(tmp_path / "out", task) as folder:
        study = Study.open(task.search, folder.journal)
        first = study.ask()
        assert first is not None
        study.finish(first.number, 0.5, [1.0, 0.5])
    assert answer(["tune", "--resume", str(folder.path)]) == 0
    shown = capfd.readouterr()
    assert shown.err.startswith("[2/2] trial 1  |  x 2  |  pruned: was worse than others at report ")
    assert "2 trials: 1 finished, 1 pruned" in shown.out
    assert "stopped by SIGTERM" in (said := (folder.trial(1) / "output.txt").read_text())
    assert "did not end" not in said  # each worker has left by itself, in a report
    assert f"paceline run --config {folder.best} {SCRIPT}" in shown.out
    assert read_config(folder.best) == RunConfig({"transport": "memory", "workers": 2}, ("--x=1.0",))
    assert answer(["tune", "--resume", str(folder.path)]) == 0  # there is nothing left to do


@pytest.mark.parametrize(
    ("told", "options", "said"),
    [
        ({**TWO, "parameters": {}}, [], "s.json: there is nothing to search"),
        ({**TWO, "run": {"wrkers": 2}}, [], "s.json: options of the run: Unknown option: --wrkers"),
        ({**TWO, "run": {"workers": "two"}}, [], "two"),
        (
            {**TWO, "run": {"timeout": 0}},
            [],
            "s.json: options of the run: --timeout must be more than 0 seconds, got 0",
        ),
        ({**TWO, "run": {"debug": 7}}, [], "--debug is 7, expected a worker from 0 to 1"),
        ({**TWO, "run": {"log": "nope"}}, [], "--log names 'nope', expected one or several of"),
        ({**TWO, "run": {"record": True, "record-gib": 0}}, [], "--record-gib must be more than 0"),
        ({**TWO, "run": {"snapshot-every": "10m"}}, [], "nothing says where snapshots go"),
        ({**TWO, "parameters": {"run.consistency": ["bsp", "often"]}}, [], "often"),
        ({**TWO, "parameters": {"run.strategy": ["sometimes"]}}, [], "'sometimes' is not known"),
        (
            {**TWO, "run": {"strategy": "bsp"}, "parameters": {"run.consistency": ["bsp", "ssp:2"]}},
            [],
            "--consistency is ssp:2, and --strategy bsp says bsp",
        ),
        ({**TWO, "parameters": {"run.workers": [2, 0]}}, [], "--workers must be at least 1, got 0"),
        ({**TWO, "parameters": {"run.servers": {"low": 0, "high": 3}}}, [], "--servers must be at least 1, got 0"),
        ({**TWO, "parameters": {"run.workers": [2.5]}}, [], "--workers is '2.5', expected a whole number"),
        ({**TWO, "run": {"data_servers": -1}}, [], "--data-servers must be at least 0, got -1"),
        (
            {**TWO, "parameters": {"run.on-crash": ["restart"]}, "run": {"transport": "memory"}},
            [],
            "--on-crash restart needs processes",
        ),
        (TWO, ["-j", "0"], "--jobs must be at least 1"),
        (TWO, ["--trial-timeout-s", "0"], "--trial-timeout-s must be more than 0"),
        (TWO, ["--out", "."], "is not empty"),
        (TWO, ["--resume", "."], "--resume continues a search as it was started"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    told: object, options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(told))
    monkeypatch.chdir(tmp_path)
    assert answer(["tune", *options, "s.json", str(SCRIPT)]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]  # the same command, mended, finds no other search


def test_a_search_needs_a_file_and_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["tune", str(tmp_path / "s.yaml")]) == 2
    assert "expected a file that describes the search, and a script" in capsys.readouterr().err
    assert answer(["tune", str(tmp_path / "s.yaml"), str(SCRIPT)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_it_says_which_extra_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(api, "find_spec", find)
    assert answer(["tune", "s.json", str(SCRIPT)]) == 2
    assert "pip install 'paceline[tune]'" in capsys.readouterr().err


def test_a_program_can_search_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pursued: list[tuple[Folder, DriverOptions]] = []

    def run_search(folder: Folder, terms: DriverOptions, *, progress: bool) -> Tuned:
        pursued.append((folder, terms))
        return Tuned(None, (), folder.path)

    monkeypatch.setattr(api, "run_search", run_search)
    monkeypatch.chdir(tmp_path)
    assert paceline.tune(TWO, SCRIPT, ["--epochs=3"], workers=3, jobs=2).folder == tmp_path / "runs" / "tune-search"
    paceline.tune(TWO, SCRIPT, ["--epochs=3"], workers=3, out="runs/tune-search", resume=True)
    with pytest.raises(UsageError, match="holds another search, script or arguments"):
        paceline.tune(TWO, SCRIPT, ["--epochs=4"], workers=3, out="runs/tune-search", resume=True)
    (first, terms), (second, _) = pursued
    assert first.task == second.task
    assert (first.task.args, first.task.search.run, terms.jobs) == (("--epochs=3",), {"workers": 3}, 2)
