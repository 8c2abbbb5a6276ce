"""The tests of workers and servers are tested: every known mistake in these is found by the tests it names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants.node_catalogue import NODE_MUTANTS, NodeMutant
from tests.mutants.version_catalogue import VERSION_MUTANTS

import paceline

ROOT = Path(__file__).parents[2]
SOURCE = Path(paceline.__file__).parent
ALL = (*NODE_MUTANTS, *VERSION_MUTANTS)
FAILED = 1  # the exit code of pytest where tests have failed


def test_names_are_unique_and_each_mistake_can_still_be_made() -> None:
    assert len({entry.mutant.name for entry in ALL}) == len(ALL) >= 20
    for entry in ALL:
        assert (SOURCE / entry.mutant.file).read_text().count(entry.mutant.old) == 1, entry.mutant.name
        assert entry.word in (ROOT / entry.tests).read_text(), entry.mutant.name


@pytest.mark.campaign
@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.mutant.name)
def test_the_mutant_is_killed(entry: NodeMutant, tmp_path: Path) -> None:
    package = tmp_path / "paceline"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / entry.mutant.file
    file.write_text(file.read_text().replace(entry.mutant.old, entry.mutant.new))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", entry.tests]
    command += ["-k", entry.word] if entry.word else []
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == FAILED, f"survived, or could not be hunted: {done.stdout[-2000:]}{done.stderr[-2000:]}"
