from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.launch.plan import LocalRun, Programs
from paceline.tools.compare import command, runs

SCRIPT = Path(__file__).with_name("scripts") / "lines.py"


def test_it_runs_one_after_another_and_a_failure_does_not_end_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    told = [str(SCRIPT), "--strategies", "ssp:3,bsp", "-n", "2", "--out", str(out)]
    code = answer(["compare", *told, "--", "--refuse", "ssp:3"])
    shown = capfd.readouterr()

    assert code == 1, shown.err
    assert "[2/2] bsp@2" in shown.err
    assert "ssp:3@2 failed: this strategy is refused" in shown.out
    numbers = json.loads((out / "comparison.json").read_text())
    assert numbers["ssp:3@2"] == {"failed": "this strategy is refused"}
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    run = numbers["bsp@2"]
    assert (run["workers"], run["samples"], run["steps"]) == (2, 64, 4)
    assert run["peak_bytes"] > 10e6
    assert 4 * 1001 < run["sent_bytes_per_worker_and_step"] < 40 * 1001  # a gradient at least, and first values


def test_bytes_of_all_reduce_are_counted_as_those_to_servers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert answer(["compare", str(SCRIPT), "--strategies", "all-reduce", "-n", "2", "--out", str(out)]) == 0
    run = json.loads((out / "comparison.json").read_text())["all-reduce@2"]
    assert 4 * 1001 < run["sent_bytes_per_worker_and_step"] < 40 * 1001  # a gradient at least


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--strategies", "sometimes"], "'sometimes' is not known"),
        (["--strategies", "bsp", "-m", "0"], "--servers must be at least 1"),
        (["--strategies", "bsp", "--out", "."], "is not empty"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "something").write_text("")
    monkeypatch.chdir(tmp_path)
    assert answer(["compare", str(SCRIPT), *options]) == 2
    assert told in capsys.readouterr().err


def test_it_says_which_extra_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(command, "find_spec", find)
    assert answer(["compare", str(SCRIPT), "--strategies", "bsp", "--out", str(tmp_path / "out")]) == 2
    assert "not installed here: pip install 'paceline[plots]'" in capsys.readouterr().err


def test_a_stopped_run_stops_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str | None] = []

    def stop(run: LocalRun, _: Programs) -> int:
        started.append(run.strategy)
        assert run.copy_to is not None
        run.copy_to.write_text("[worker 0] KeyboardInterrupt\npaceline: stopped by SIGINT\n")
        return 130

    monkeypatch.setattr(runs, "run_local", stop)
    with pytest.raises(SystemExit, match="130"):
        answer(["compare", str(SCRIPT), "--strategies", "bsp,all-reduce", "--out", str(tmp_path / "out")])
    assert started == ["bsp"]
