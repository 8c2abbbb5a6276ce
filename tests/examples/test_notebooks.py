"""The notebooks run from their first cell to their last, and are kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.examples.conftest import EXAMPLES, Alone

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
WITHOUT_A_SCREEN = "import matplotlib\nmatplotlib.use('agg')\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, alone: Alone, tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []
    script = tmp_path / f"{path.stem}_cells.py"
    script.write_text(WITHOUT_A_SCREEN + "\n".join("".join(cell["source"]) for cell in cells))
    done = alone(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout != ""


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["consistency", "embeddings"]
