"""The command itself, once with real runs."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.launch.config import RunConfig, read_config
from paceline.tuning import api

SCRIPT = Path(__file__).with_name("scripts") / "line.py"
TWO = {"method": "grid", "metric": "loss", "pruning": "halving", "parameters": {"x": [1.0, 2.0]}}


def test_real_runs_are_followed_and_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    described = tmp_path / "two.json"
    described.write_text(json.dumps({**TWO, "run": {"transport": "memory"}}))
    out = tmp_path / "out"
    assert answer(["tune", "--out", str(out), str(described), "-n", "2", str(SCRIPT)]) == 0
    shown = capfd.readouterr()
    first, second = shown.err.splitlines()
    assert first.startswith("trial 0 of 2  |  x 1  |  loss 0.5, the best so far")
    assert "pruned: was behind others after report" in second
    assert "2 trials: 1 finished, 1 pruned" in shown.out
    assert f"paceline run --config {out / 'best.toml'} {SCRIPT}" in shown.out
    assert read_config(out / "best.toml") == RunConfig({"transport": "memory", "workers": 2}, ("--x=1.0",))
    assert answer(["tune", "--resume", str(out)]) == 0  # there is nothing left to do
    assert "2 trials: 1 finished, 1 pruned" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("told", "options", "said"),
    [
        ({**TWO, "parameters": {}}, [], "s.json: there is nothing to search"),
        ({**TWO, "run": {"wrkers": 2}}, [], "s.json: options of the run: Unknown option: --wrkers"),
        ({**TWO, "run": {"workers": "two"}}, [], "two"),
        ({**TWO, "parameters": {"run.consistency": ["bsp", "often"]}}, [], "often"),
        ({**TWO, "parameters": {"run.strategy": ["sometimes"]}}, [], "'sometimes' is not known"),
        (TWO, ["-j", "0"], "--jobs must be at least 1"),
        (TWO, ["--trial-timeout", "0"], "--trial-timeout-s must be more than 0"),
        (TWO, ["--out", "."], "is not empty"),
        (TWO, ["--resume", "."], "--resume goes on with a search as it was begun"),
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
    assert not list(tmp_path.glob("**/trials"))


def test_a_search_needs_a_file_and_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["tune", str(tmp_path / "s.yaml")]) == 2
    assert "expected a file that says what is searched, and a script" in capsys.readouterr().err
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
