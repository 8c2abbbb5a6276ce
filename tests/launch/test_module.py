"""Modules that are run by their names are what `python -m` makes of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.launch import local
from paceline.launch.manifests.command import launch
from paceline.launch.plan import LocalRun
from paceline.launch.script import find_module, source_of

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
