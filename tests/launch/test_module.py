"""Modules that are run by their names are what `python -m` makes of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.launch import local
from paceline.launch.guard import Guard
from paceline.launch.manifests.command import launch
from paceline.launch.plan import LocalRun
from paceline.launch.script import find_module, source_of
from paceline.tools.tune.driver import PROGRAM, TrialProcess
from paceline.tools.tune.study import Folder, Trial

MODULE = """
import sys
from . import other
import beside
print(__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], other.__name__, beside.__name__)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    for name, text in (("__init__", ""), ("other", ""), ("train", MODULE), ("__main__", MODULE)):
        (package / f"{name}.py").write_text(text)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_worker_runs_a_module_as_python_does(here: Path, name: str) -> None:
    words = ["-m", name, "-n", "3"]
    plain, ours = (
        subprocess.run([sys.executable, *start, *words], capture_output=True, text=True, timeout=200, check=False)
        for start in ([], ["-m", "paceline.launch.worker"])
    )
    assert (ours.stdout, ours.stderr) == (plain.stdout, "")
    assert plain.stdout.count("package") > 3


def test_the_command_line_tells_a_module_from_a_number(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LocalRun] = []
    monkeypatch.setattr(local, "run_local", lambda run, _: asked.append(run) or 0)
    assert cli.answer(["run", "-m", "2", "-n", "3", "-m", "package.train", "-n", "9", "-m", "x"]) == 0
    [run] = asked
    assert (run.num_servers, run.num_workers, run.script) == (2, 3, here / "package" / "train.py")
    assert run.words == ("-m", "package.train", "-n", "9", "-m", "x")
    assert run.folder == here


def test_a_search_runs_a_module_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = {"method": "grid", "metric": "loss", "parameters": {"lr": [0.1]}}
    (here / "search.json").write_text(json.dumps(search))
    begun: list[Folder] = []

    def begin(folder: Folder, *_: object, **__: object) -> None:
        begun.append(folder)
        raise UsageError("the test has seen enough")

    monkeypatch.setattr("paceline.tools.tune.command.run_search", begin)
    assert cli.answer(["tune", "-m", "2", "--out", "out", "search.json", "-m", "package.train", "-n", "9"]) == 2
    [folder] = begun
    task = Folder.reopen(folder.path).task
    assert (task.program, task.args, task.working_folder) == (("-m", "package.train"), ("-n", "9"), str(here))
    assert task.search.run == {"servers": 2}

    started: list[list[str]] = []

    def start(words: list[str], **_: object) -> None:
        started.append(words)
        raise OSError("the test has seen enough")

    guard = Guard(here / "empty", temporary=False)
    monkeypatch.setattr("paceline.tools.tune.driver.subprocess.Popen", start)
    try:
        with pytest.raises(OSError, match="seen enough"):
            TrialProcess.start(Trial(0, {"lr": 0.1}, "running"), folder, guard, 0, (), PROGRAM)
    finally:
        guard.dismiss(10.0)
    assert started[0][-2:] == ["-m", "package.train"]
    assert "-P" not in started[0], "else the working folder would not be looked in"


def test_a_comparison_runs_a_module_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[LocalRun] = []

    def run_local(run: LocalRun, _: object) -> int:
        asked.append(run)
        raise UsageError("the test has seen enough")

    monkeypatch.setattr("paceline.tools.compare.runs.run_local", run_local)
    words = ["compare", "-m", "2", "--strategies", "bsp", "-m", "package.train", "--out", "out", "--", "-n", "9"]
    assert cli.answer(words) == 2
    assert asked[0].words == ("-m", "package.train", "-n", "9")
    assert asked[0].num_servers == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package.nothing", "there is no module package.nothing .looked in "),
        ("beside.py", "there is no module beside.py .*; to run the file, leave out -m: paceline run beside.py"),
        ("empty", "empty is a package without a __main__, so it cannot be run: name a module in it"),
        ("sys", "the module sys is built into Python and has no code to run"),
    ],
)
def test_what_cannot_be_run_is_said(here: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        source_of(name, [str(here), *sys.path])


def test_looking_for_a_module_imports_nothing(here: Path) -> None:
    (here / "package" / "__init__.py").write_text("raise AssertionError")
    assert find_module("package.train", [str(here)]).origin == str(here / "package" / "train.py")
    assert "package" not in sys.modules


def test_slurm_runs_a_module_and_ray_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("-m", "package.train", "--lr=1", emit="slurm") == 0
    told = capsys.readouterr().out
    assert " python -m package.train --lr=1\n" in told
    assert "#SBATCH --job-name=train\n" in told
    with pytest.raises(UsageError, match=r"-m package.train is for --emit slurm; Ray brings scripts .* as files"):
        launch("-m", "package.train", emit="kuberay", image="x")
