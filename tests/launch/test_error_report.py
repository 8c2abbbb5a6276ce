"""What a worker writes when its script ends with an error."""

from __future__ import annotations

import runpy
from importlib.util import module_from_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.api import threads
from paceline.errors import UsageError
from paceline.launch.script_exit import report_error


def test_the_place_is_in_the_users_code_also_where_an_installed_package_makes_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "wraps_a_call.py").write_text("import paceline\n\ndef call():\n    paceline.ssp(-1)\n")
    monkeypatch.syspath_prepend(installed)
    script = tmp_path / "train.py"
    script.write_text("import wraps_a_call\n\nwraps_a_call.call()\n")
    with pytest.raises(UsageError) as caught:
        runpy.run_path(str(script))
    report_error(caught.value, str(script))
    assert f"at {script}:3; run with --traceback for more" in capsys.readouterr().err


def test_an_error_is_one_write_so_that_no_other_process_writes_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import paceline\n\npaceline.ssp(-1)\n")
    with pytest.raises(UsageError) as caught:
        runpy.run_path(str(script))
    writes: list[str] = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=writes.append, flush=lambda: None))
    report_error(caught.value, str(script))
    assert len(writes) == 1
    assert writes[0].endswith(f"at {script}:3; run with --traceback for more\n")


def test_the_place_is_told_of_a_worker_that_is_a_thread_whose_script_has_a_relative_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import paceline\n\npaceline.ssp(-1)\n")
    script = threads._spec("__main__", "train.py")
    assert script.loader is not None
    with pytest.raises(UsageError) as caught:
        script.loader.exec_module(module_from_spec(script))
    report_error(caught.value, threads._path_of(script))
    assert "at train.py:3; run with --traceback for more" in capsys.readouterr().err


def test_the_place_is_the_line_of_a_with_whose_context_manager_pythons_own_module_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from contextlib import ExitStack\n\nimport paceline\n\n"
        "with ExitStack() as held:\n    held.callback(paceline.ssp, -1)\n"
    )
    with pytest.raises(UsageError) as caught:
        runpy.run_path(str(script))
    report_error(caught.value, str(script))
    assert f"at {script}:5; run with --traceback for more" in capsys.readouterr().err
