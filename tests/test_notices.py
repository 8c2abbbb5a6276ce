"""Notices are lines on stderr, and records of `logging` where a script configures it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli import answer
from paceline.launch.output import Console
from paceline.notices import tell


def said_by(program: str) -> str:
    """What a process writes on stderr whose script is this program; it ends well."""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return found.stderr


def test_a_notice_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    tell("one\ntwo")
    assert capsys.readouterr().err == "paceline: one two\n"


def test_what_a_terminal_obeys_is_not_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Notices and errors quote what other processes and files say."""
    tell("worker 1 says \x1b[2J")
    Console().announce("worker 1 says \x1b[2J\n\tand goes on")
    assert answer(["top", f"{tmp_path}/\x1b[2J"]) == 2
    assert "\x1b" not in (said := capsys.readouterr().err)
    assert said.count("?[2J") == 3
    assert "\n\tand goes on\n" in said


def test_a_notice_is_one_write_so_that_no_other_process_writes_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=writes.append, flush=lambda: None))
    tell("it is slower than it could be")
    assert writes == ["paceline: it is slower than it could be\n"]


@pytest.mark.parametrize(
    ("configures", "expected"),
    [
        ("", "paceline: late\npaceline: two machines\n"),
        (
            "logging.basicConfig(format='%(levelname)s %(name)s %(rank)s %(message)s')",
            "WARNING paceline - late\nINFO paceline 3 two machines\n",
        ),
        ("logging.basicConfig(format='%(message)s', handlers=[logging.StreamHandler()])", "late\ntwo machines\n"),
        ("logging.getLogger('paceline').setLevel('WARNING')", "paceline: late\n"),
        ("logging.getLogger('paceline').addHandler(logging.NullHandler())", ""),
        ("sys.stderr.close()", ""),
        ("sys.stderr = None", ""),
    ],
)
def test_a_script_decides_what_becomes_of_notices(configures: str, expected: str) -> None:
    program = (
        "import logging, sys\nfrom paceline.notices import NEWS, set_rank, tell\n"
        f"{configures}\ntell('late')\nset_rank(3)\ntell('two machines', NEWS)\n"
    )
    assert said_by(program) == expected


def test_a_record_has_the_name_of_the_folder_that_it_comes_from() -> None:
    program = (
        "import logging\nfrom paceline.transport.rate_limited_log import RateLimitedLog\n"
        "from paceline.notices import tell\n"
        "logging.basicConfig(format='%(name)s %(filename)s: %(message)s')\n"
        "RateLimitedLog(tell).add('cause', 'a stranger is turned away')\n"
    )
    assert said_by(program) == "paceline.transport rate_limited_log.py: a stranger is turned away\n"
