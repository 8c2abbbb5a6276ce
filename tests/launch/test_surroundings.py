"""Where a run is started: folders that are gone or closed, Python told by options, no /proc."""

import cProfile
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.job.environment import child_environment
from paceline.job.folders import require_text
from paceline.launch.forkserver import child as title
from paceline.launch.local import guarded_folder, prepare_run_dir
from paceline.launch.plan import DEFAULT_PROGRAMS, LocalRun, plan_launches
from paceline.launch.rendezvous.detect import Detected
from paceline.launch.rendezvous.store import TorchRendezvous, open_store
from paceline.launch.script import check_script
from paceline.observe import resources

ASK = """
import json, sys
from paceline.job.environment import child_environment
from paceline.job.folders import require_text
print(json.dumps({name: text for name, text in child_environment(1, 1, {}).items() if name.startswith("PYTHON")}))
"""


def test_what_python_is_told_by_options_is_told_to_all_processes() -> None:
    told = subprocess.run(
        [sys.executable, "-X", "dev", "-OO", "-B", "-s", "-W", "error::ResourceWarning", "-c", ASK],
        capture_output=True,
        text=True,
        check=True,
        env={},
        timeout=200,
    )
    assert json.loads(told.stdout) == {
        "PYTHONUNBUFFERED": "1",
        "PYTHONDEVMODE": "1",
        "PYTHONOPTIMIZE": "2",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONWARNINGS": "default,error::ResourceWarning",
    }


def test_workers_of_a_script_that_sets_variables_import_torch_themselves(tmp_path: Path) -> None:
    fresh: list[bool] = []
    for text in ("import torch", "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch"):
        (tmp_path / "script.py").write_text(text)
        run = LocalRun(script=tmp_path / "script.py", num_workers=1)
        server, worker = plan_launches(run, DEFAULT_PROGRAMS, tmp_path, child_environment(1, 1, {}))
        assert not server.is_fresh
        fresh.append(worker.is_fresh)
    assert fresh == [False, True]
    told = (str(tmp_path / "script.py"), "none.py")
    profiled = LocalRun(script=Path(cProfile.__file__), module="cProfile", args=told, num_workers=1)
    assert plan_launches(profiled, DEFAULT_PROGRAMS, tmp_path, child_environment(1, 1, {}))[1].is_fresh


def test_coverage_begins_before_torch_is_imported(tmp_path: Path) -> None:
    for module, is_fresh in (("coverage", True), ("cProfile", False)):
        run = LocalRun(script=tmp_path / f"{module}.py", module=module)
        launches = plan_launches(run, DEFAULT_PROGRAMS, tmp_path, child_environment(1, 1, {}))
        assert [launch.is_fresh for launch in launches if launch.role == "worker"] == [is_fresh] * run.num_workers


def test_a_working_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.answer(["run", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "paceline: the working folder cannot be used: No such file or directory; cd to one that is there\n"
    )


def test_without_a_folder_for_temporary_files_the_user_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdtemp(prefix: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    with pytest.raises(
        UsageError, match=r"cannot make a temporary folder .*No usable temporary directory found. Point TMPDIR"
    ):
        prepare_run_dir(None)


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_text(tmp_path / "Ordner mit Ü und 空格")
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/Ord\xe9r"))
    with pytest.raises(UsageError, match=r"the name of the folder .*Ord.udce9r' is not a text .*name another folder"):
        prepare_run_dir(latin)
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(latin))
    with pytest.raises(UsageError, match="is not a text"):
        prepare_run_dir(None)


def test_of_two_launchers_that_find_a_run_directory_empty_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with guarded_folder(tmp_path):
        (tmp_path / "token").touch()
        monkeypatch.setattr("paceline.launch.local.prepare_run_dir", lambda wanted: wanted)  # it has looked before
        with pytest.raises(UsageError, match="is not empty"), guarded_folder(tmp_path):
            pass
        assert (tmp_path / "token").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"trace"}


def test_a_user_without_a_home_needs_one_for_jobs_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def getpwuid(number: int) -> None:
        raise KeyError(f"uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    for name in ("HOME", "XDG_CACHE_HOME", "PACELINE_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    found = Detected(launcher="torchrun", job="job", rank=0, size=1, master=("127.0.0.1", 1), has_store=True)
    assert isinstance(open_store(found), TorchRendezvous)
    with pytest.raises(UsageError, match=r"has no home, .*: set HOME, or name another folder, PACELINE_RUN_DIR"):
        open_store(Detected(launcher="Slurm", job="job", rank=0, size=1))


def test_a_script_that_cannot_be_read_is_refused_before_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))  # root may read everything

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"cannot read the script .*train.py: .*Permission denied"):
        check_script(tmp_path / "train.py")


def test_without_proc_nothing_is_counted_and_no_title_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path(title.STAT.parent / "cmdline").read_bytes()
    monkeypatch.setattr(title, "STAT", tmp_path / "stat")
    monkeypatch.setattr(resources, "_PROCESS", tmp_path / "self")
    title.set_process_title(("another",), {})
    assert Path("/proc/self/cmdline").read_bytes() == before
    assert resources.ResourceUsage().usage() is None
