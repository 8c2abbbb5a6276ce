from pathlib import Path

import pytest

from paceline.errors import PacelineError, UsageError
from paceline.tools.reproduce import programs
from paceline.tools.reproduce.programs import ProgramRuns


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(programs, "_SOURCE_TREE", tmp_path)
    return tmp_path


def write(tree: Path, text: str) -> None:
    (tree / "program.py").write_text(f"import json, os, sys, time\n{text}\n")


def test_the_last_line_has_the_numbers_and_a_program_runs_once(tree: Path) -> None:
    write(tree, "open('runs', 'a').write('x')\nprint('first')\nprint(json.dumps(sys.argv[1:] + [os.environ['KIND']]))")
    runs = ProgramRuns()
    for _ in range(2):
        found = runs.numbers("program.py", ("--steps", "2"), timeout_s=60, environment={"KIND": "tcp"})
        assert found == ["--steps", "2", "--json", "tcp"]
    assert (tree / "runs").read_text() == "x"


def test_a_package_without_its_source_tree_says_what_to_do(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"this claim runs program.py, which is part of the source tree.*pip install"):
        ProgramRuns().numbers("program.py", (), timeout_s=60)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sys.exit('no root here')", "python program.py --json ended with exit code 1:\nno root here"),
        ("print('nothing')", "python program.py --json printed no numbers:\nnothing"),
        ("print(json.dumps({'skipped': 'no tc'}))", "python program.py --json was not possible here: no tc"),
    ],
)
def test_a_program_that_fails_is_told(tree: Path, text: str, told: str) -> None:
    write(tree, text)
    with pytest.raises(PacelineError) as caught:
        ProgramRuns().numbers("program.py", (), timeout_s=60)
    assert str(caught.value) == told


def test_a_program_that_takes_too_long_is_ended(tree: Path) -> None:
    write(tree, "import threading\nprint('begun', file=sys.stderr, flush=True)\nthreading.Event().wait()")
    with pytest.raises(PacelineError, match="did not end within 1 s"):
        ProgramRuns().numbers("program.py", (), timeout_s=1)
