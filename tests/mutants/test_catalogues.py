"""Every mistake in the catalogues is one that a program can have: with it, the file is still valid Python."""

import subprocess
import sys
from pathlib import Path

from tests.mutants.catalogue import MUTANTS
from tests.mutants.node_catalogue import NODE_MUTANTS
from tests.mutants.row_catalogue import CORE_MUTANTS, ORDER_MUTANTS
from tests.mutants.row_catalogue import NODE_MUTANTS as ROW_NODE_MUTANTS
from tests.mutants.version_catalogue import VERSION_MUTANTS

import paceline

SOURCE = Path(paceline.__file__).parent


def test_no_mistake_is_one_of_spelling(tmp_path: Path) -> None:
    """Such a file is not imported, and a hunter would take that for a find."""
    of_nodes = [entry.mutant for entry in (*NODE_MUTANTS, *VERSION_MUTANTS)]
    for number, mutant in enumerate([*MUTANTS, *of_nodes, *CORE_MUTANTS, *ORDER_MUTANTS, *ROW_NODE_MUTANTS]):
        text = (SOURCE / mutant.file).read_text()
        assert text.count(mutant.old) == 1, mutant.name
        (tmp_path / f"mutant_{number}.py").write_text(f"# {mutant.name}\n{text.replace(mutant.old, mutant.new)}")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "E9,F821,F822,F823"]
    checked = subprocess.run(
        [*command, "--target-version", "py311", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stdout[-3000:]
