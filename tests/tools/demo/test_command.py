from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.tools.demo import command as data


def test_it_says_which_extras_are_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "matplotlib" else ModuleSpec(name, None)

    monkeypatch.setattr(data, "find_spec", find)
    assert answer(["demo"]) == 2
    assert "needs matplotlib, not installed here: pip install 'paceline[demo]'" in capsys.readouterr().err


def test_there_is_nothing_to_compare_in_one_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["demo", "--workers", "1"]) == 2
    assert "2 or more workers" in capsys.readouterr().err


def test_it_trains_and_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = answer(["demo", "--report", str(tmp_path / "out"), "--epochs", "1", "--only", "single"])
    shown = capfd.readouterr()
    assert code == 0, shown.err
    assert "[1/1] single process" in shown.err
    assert "report.html" in shown.out
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "falling to 0" in (tmp_path / "out" / "report.html").read_text()
