"""The tests are tested: every known mistake in the core is found by the campaign or a direct check."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.mutants.catalogue import MUTANTS, Mutant

import paceline

ROOT = Path(__file__).parents[2]
SOURCE = Path(paceline.__file__).parent
COPIED = ("core", "collective", "simulate", "errors.py", "version.py", "__init__.py")
NUM_SEEDS = 250


@dataclass(frozen=True, slots=True)
class Hunted:
    """How the hunt for one mutant ended."""

    code: int
    output: str


def hunt(mutant: Mutant | None, folder: Path, num_seeds: int = NUM_SEEDS) -> Hunted:
    """Copy the package, make the mistake, and hunt for it in a process of its own."""
    package = folder / "paceline"
    package.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (SOURCE / name).is_dir() else shutil.copy
        copy(SOURCE / name, package / name)
    if mutant:
        file = package / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return Hunted(-1, f"'{mutant.old}' occurs {text.count(mutant.old)} times in {mutant.file}")
        file.write_text(text.replace(mutant.old, mutant.new))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-P", "-m", "tests.mutants.hunt", str(num_seeds)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200, check=False
        )
    except subprocess.TimeoutExpired:
        return Hunted(-1, "the hunt did not end")
    return Hunted(done.returncode, done.stdout + done.stderr)


def test_names_are_unique_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("num_seeds", [60, pytest.param(NUM_SEEDS, marks=pytest.mark.campaign)])
def test_the_sound_core_survives(tmp_path: Path, num_seeds: int) -> None:
    assert hunt(None, tmp_path, num_seeds) == Hunted(0, "\n")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    result = hunt(mutant, tmp_path)
    assert result.code == 1, f"survived, or could not be hunted: {result.output}"
    assert result.output.startswith(("seed ", "check ")), result.output
