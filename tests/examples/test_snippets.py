"""Every code block of the readme and of the pages runs as it is pasted, or says on its fence why it does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.examples.conftest import Alone
from tests.examples.snippets import NEEDS, PAGES, ROOT, RUN, SHOWN, Snippet, snippets

from paceline.cli import END_OF_OPTIONS, app, split_at_script

SURROUNDINGS = Path(__file__).with_name("surroundings.py")
ALL = [snippet for page in PAGES for snippet in snippets(page)]
WITH_PYTHON = sorted({snippet.page.name for snippet in ALL if snippet.language == "python" and snippet.runs})
WITH_COMMANDS = sorted({snippet.page.name for snippet in ALL if snippet.language != "python" and snippet.runs})
COMMANDS_WITHIN_S = 600.0
FIRST_LINE_WITHIN_S = 120.0


def of_page(name: str) -> list[Snippet]:
    return [snippet for snippet in ALL if snippet.page.name == name]


def test_every_block_says_what_it_is() -> None:
    unknown = [
        snippet.where
        for snippet in ALL
        if snippet.language not in (*RUN, *SHOWN) or not {snippet.value("needs")} <= {None, *NEEDS}
    ]
    assert unknown == []
    run = [snippet for snippet in ALL if snippet.runs]
    assert len(run) > sum(snippet.language in RUN and not snippet.runs for snippet in ALL)


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page: str, alone: Alone, tmp_path: Path) -> None:
    ours = [snippet for snippet in of_page(page) if snippet.language == "python" and snippet.runs]
    fragments = [snippet for snippet in ours if snippet.is_fragment]
    if fragments:
        code = "\n".join(snippet.code for snippet in fragments)
        assert_runs(code, tmp_path / "fragments.py", SURROUNDINGS.read_text(), alone)
    for snippet in ours:
        if not snippet.is_fragment:
            assert_runs(snippet.code, tmp_path / f"line_{snippet.line}.py", "", alone)


def assert_runs(code: str, path: Path, before: str, alone: Alone) -> None:
    """Assert that code runs to its end, with the names that the code before it makes."""
    path.write_text(before + code)
    done = alone(path)
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"


def test_commands_are_understood() -> None:
    calls = [(snippet.where, call) for snippet in ALL if snippet.language in RUN[1:] for call in snippet.calls()]
    assert len(calls) > 40
    for where, call in calls:
        options, script = split_at_script(call)
        try:
            app.parse_args([*options, END_OF_OPTIONS, *script] if script else options, exit_on_error=False)
        except Exception as error:
            pytest.fail(f"{where}: paceline {' '.join(call)}: {error}")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run(page: str, tmp_path: Path) -> None:
    make_folder(tmp_path, of_page(page))
    with terminals() as background:
        for number, snippet in enumerate(of_page(page)):
            if snippet.language == "python" or not snippet.runs:
                continue
            told = tmp_path / f"{number}.out"
            process = shell(snippet.commands(), tmp_path, told)
            if "background" in snippet.words:
                background.append(process)
                wait_until_told(told, process)
            else:
                code = process.wait(COMMANDS_WITHIN_S)
                assert code == int(snippet.value("exit") or 0), f"{snippet.where}\n{told.read_text()}"
            lost = [line.pattern for line in snippet.expected() if not line.search(told.read_text())]
            assert lost == [], f"{snippet.where}\n{told.read_text()}"


def make_folder(folder: Path, page: list[Snippet]) -> None:
    """Lay out what the commands of a page name: its files, the script of the readme, the folders of the repository."""
    for name in ("examples", "benchmarks", "src"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    for snippet in (*of_page("README.md"), *page):
        name = snippet.value("file")
        if name is not None:
            (folder / name).write_text(snippet.code)


def shell(commands: str, folder: Path, told: Path) -> subprocess.Popen[bytes]:
    """Start a shell in a session of its own, which ends at the first command that fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with told.open("wb") as output:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextmanager
def terminals() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What runs beside the other commands of a page; stopped at the end by Ctrl-C."""
    started = list[subprocess.Popen[bytes]]()
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process in started:
            process.wait(COMMANDS_WITHIN_S)


def wait_until_told(told: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process in the background has written its first line."""
    deadline_s = time.monotonic() + FIRST_LINE_WITHIN_S
    while not re.search(r"\n", told.read_text()):
        assert process.poll() is None, told.read_text()
        assert time.monotonic() < deadline_s, "nothing was written"
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
