"""What is said of a script before any run of a comparison starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.errors import UsageError
from paceline.tools.compare.lacking import check_imports, notes_on
from paceline.tools.compare.runs import ComparedEntry

WHOLE = """
import os, torch.nn
import beside
from folder.inner import x
from paceline import parallelize
try:
    import never_there
except ImportError:
    never_there = None
if os.environ.get("NEVER"):
    import not_there_either
def later():
    import nor_this
optimizer = paceline.distributed(parallelize(model))
paceline.report(loss=1.0)
"""


def entries(*texts: str) -> list[ComparedEntry]:
    return [ComparedEntry.parse(text, 4) for text in texts]


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_nothing_is_said_of_a_script_that_has_all(tmp_path: Path) -> None:
    path = script(tmp_path, WHOLE)
    (tmp_path / "beside.py").touch()
    (tmp_path / "folder").mkdir()
    check_imports(path)
    assert notes_on(path, entries("bsp", "pipeline:2")) == []


def test_a_module_that_is_not_there_ends_it_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, "import torch\nimport never_there.inner\n")
    with pytest.raises(UsageError, match=r"train.py, line 2: it imports never_there, which is not installed here"):
        check_imports(path)
    out = tmp_path / "out"
    assert answer(["compare", str(path), "--strategies", "bsp", "--out", str(out)]) == 2
    assert "imports never_there" in capsys.readouterr().err
    assert not out.exists()


def test_what_a_strategy_needs_and_the_script_names_nowhere_is_noted(tmp_path: Path) -> None:
    path = script(tmp_path, "import paceline\npaceline.distributed(1)\n")
    no_report, no_cut = notes_on(path, entries("bsp", "pipeline:2", "tensor:2"))
    assert "names no paceline.report" in no_report
    assert "names no paceline.parallelize, which pipeline:2@4, tensor:2@4 need" in no_cut
    assert len(notes_on(path, entries("bsp", "all-reduce"))) == 1


@pytest.mark.parametrize("content", [b"\x00\x01", b"def broken(:\n"])
def test_what_is_no_text_of_python_is_left_to_what_starts_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    check_imports(path)
    assert check_imports(tmp_path / "archive.pyz") is None
