"""The tests of row tables are tested: every known mistake in them is found, in the cores or in whole nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants.catalogue import Mutant
from tests.mutants.row_catalogue import CORE_MUTANTS, NODE_MUTANTS, NOT_IN_REHEARSALS, ORDER_MUTANTS

import paceline

ROOT = Path(__file__).parents[2]
SOURCE = Path(paceline.__file__).parent
SOON = (
    "an answer that was overtaken is taken in",
    "no server is said to have rows on their way",
    "rehearsed: a late notice ends a newer subscription",
)
FOUND_SOON = [mutant for mutant in ORDER_MUTANTS if mutant.name in SOON]


def hunt(mutant: Mutant | None, folder: Path, kind: str, num_seeds: int) -> tuple[int, str]:
    """Copy the package, make the mistake, and hunt for it in a process of its own; return its exit code and output."""
    package = folder / "paceline"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant:
        file = package / mutant.file
        text = file.read_text()
        assert text.count(mutant.old) == 1, f"'{mutant.old}' occurs {text.count(mutant.old)} times in {mutant.file}"
        file.write_text(text.replace(mutant.old, mutant.new))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-P", "-m", "tests.mutants.row_hunt", kind, str(num_seeds)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_names_are_unique() -> None:
    further = [mutant for mutant in ORDER_MUTANTS if mutant not in CORE_MUTANTS]
    names = [mutant.name for mutant in (*CORE_MUTANTS, *further, *NODE_MUTANTS)]
    assert len(set(names)) == len(names) >= 25
    assert {mutant.name for mutant in CORE_MUTANTS if mutant not in ORDER_MUTANTS} == NOT_IN_REHEARSALS


@pytest.mark.parametrize(
    "mutant", dict.fromkeys((*CORE_MUTANTS, *ORDER_MUTANTS, *NODE_MUTANTS)), ids=lambda mutant: mutant.name
)
def test_each_mistake_can_still_be_made(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text().count(mutant.old) == 1


def test_the_sound_core_survives(tmp_path: Path) -> None:
    assert hunt(None, tmp_path, "cores", 30) == (0, "\n")


@pytest.mark.parametrize("mutant", CORE_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_of_a_core_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    code, output = hunt(mutant, tmp_path, "cores", 100)
    assert (code, output[:5] in ("seed ", "check")) == (1, True), f"survived, or could not be hunted: {output}"


@pytest.mark.parametrize("mutant", [None, *FOUND_SOON], ids=lambda mutant: mutant.name if mutant else "sound")
def test_rehearsals_alone_find_it_soon(mutant: Mutant | None, tmp_path: Path) -> None:
    code, output = hunt(mutant, tmp_path, "order", 40)
    assert (code, output[:5]) == ((1, "seed ") if mutant else (0, "\n")), output


@pytest.mark.campaign
@pytest.mark.parametrize("mutant", [None, *ORDER_MUTANTS], ids=lambda mutant: mutant.name if mutant else "sound")
def test_rehearsals_alone_find_it(mutant: Mutant | None, tmp_path: Path) -> None:
    code, output = hunt(mutant, tmp_path, "order", 400)
    assert (code, output[:5]) == ((1, "seed ") if mutant else (0, "\n")), output


@pytest.mark.campaign
@pytest.mark.parametrize("mutant", NODE_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_of_a_node_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    code, output = hunt(mutant, tmp_path, "nodes", 60)
    assert (code, output[:5] in ("seed ", "check")) == (1, True), f"survived, or could not be hunted: {output}"
