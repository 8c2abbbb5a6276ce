"""What the machine allows too little of is said in one sentence."""

import errno
import os
import resource
from pathlib import Path

import pytest

from paceline import cli
from paceline.api.join import start
from paceline.errors import PacelineError, UsageError
from paceline.launch import limits, local
from paceline.launch.limits import check_limits, explain
from paceline.launch.script import check_script


@pytest.mark.parametrize(
    ("limit", "found", "words"),
    [
        (resource.RLIMIT_FSIZE, 0, "ulimit -f"),
        (resource.RLIMIT_AS, 400 << 20, "torch alone needs"),
        (resource.RLIMIT_NOFILE, 30, "allows 30 open files"),
    ],
)
def test_limits_that_let_no_job_run_are_refused(
    limit: int, found: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_limits(3)
    known = resource.getrlimit
    monkeypatch.setattr(limits.resource, "getrlimit", lambda one: (found, found) if one == limit else known(one))
    with pytest.raises(UsageError, match=words):
        check_limits(3)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files; raise the limit"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"), "/x: No space left on device; free some space"),
        (MemoryError(), "out of memory: start fewer"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_a_shortage_ends_a_command_in_one_line(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(local, "run_local", fail)
    assert cli.answer(["run", "--quiet", "train.py"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("paceline: ")
    assert words in told
    assert len(told.splitlines()) == 1
    assert words in explain(error)


def test_an_error_of_the_code_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(local, "run_local", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.answer(["run", "--quiet", "train.py"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x = 1\ndef (:\n", r"line 2: invalid syntax: def \(:"),
        (b"\n\xff = 2\n", "line 2: (.*codec can't decode|Non-UTF-8 code)"),
        (b"x = 1\0", "null bytes"),
    ],
)
def test_a_script_that_no_worker_could_begin_is_refused_once(tmp_path: Path, content: bytes, words: str) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        check_script(script)


def test_a_worker_that_may_start_no_threads_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("paceline.api.join._embed", fail)
    with pytest.raises(PacelineError, match=r"this process cannot join: can't start new thread: .*`ulimit -u`"):
        start()


def test_without_a_temporary_folder_a_run_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setattr(local.tempfile, "tempdir", str(missing))
    with pytest.raises(UsageError, match=r"cannot make a temporary folder .*missing.*Point TMPDIR"):
        local.prepare_run_dir(None)


def test_a_process_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("paceline.launch.local.Child", fail)
    stage = object.__new__(__import__("paceline.launch.local", fromlist=["LocalBackend"]).LocalBackend)
    stage._console = stage._guard = None
    with pytest.raises(PacelineError, match="cannot start worker 1: Too many open files; raise"):
        stage._add(type("Launch", (), {"name": "worker 1"})(), fail)
