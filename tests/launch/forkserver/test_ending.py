"""A forked process ends without unloading what it shares, unless Python's own end has something left to do."""

import ctypes
import io
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from paceline.launch.forkserver import ending
from paceline.launch.forkserver.ending import QuickEnd


class Ended(BaseException):
    """In the place of the end of this process."""


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What Python would call at exit; the end of the process raises Ended."""

    def end(code: int) -> None:
        raise Ended(code)

    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(ending.atexit, "register", registered.append)
    monkeypatch.setattr(ending.os, "_exit", end)
    monkeypatch.setattr(ending.gc, "get_objects", list)
    return registered


def run_to_end(program: Callable[[], None], at_exit: list[Callable[[], None]]) -> int | None:
    """The code that the process ended with, or None where the end was left to Python."""
    quick = QuickEnd()
    quick.prepare()
    with suppress(SystemExit, ValueError, KeyboardInterrupt):
        quick.run(program)
    [call] = at_exit
    try:
        call()
    except Ended as ended:
        return ended.args[0]
    return None


def leave(code: object) -> Callable[[], None]:
    def program() -> None:
        raise SystemExit(code)

    return program


def fail(error: type[BaseException]) -> Callable[[], None]:
    def program() -> None:
        raise error

    return program


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (lambda: None, 0),
        (leave(None), 0),
        (leave(3), 3),
        (leave(-1), 255),
        (leave("no data"), 1),
        (fail(ValueError), 1),
        (fail(KeyboardInterrupt), None),  # Python ends it by that signal
    ],
)
def test_the_exit_code_is_pythons(
    program: Callable[[], None], code: int | None, at_exit: list[Callable[[], None]]
) -> None:
    assert run_to_end(program, at_exit) == code


def test_a_fork_server_that_forks_nothing_ends_as_python_does(at_exit: list[Callable[[], None]]) -> None:
    QuickEnd()

    at_exit[0]()  # and raises nothing


class Ends:
    def __del__(self) -> None:
        """Do something at the end."""


def generate() -> object:
    try:
        yield 1
    finally:
        pass


@pytest.mark.parametrize(("kept", "code"), [(Ends, None), (generate, None), (dict, 0), (io.StringIO, None)])
def test_objects_that_do_something_when_they_end_leave_the_end_to_python(
    kept: Callable[[], object], code: int | None, at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = [kept()]
    monkeypatch.setattr(ending.gc, "get_objects", lambda: objects)

    assert run_to_end(lambda: None, at_exit) == code


def test_files_that_are_closed_have_ended(
    tmp_path: Path, at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "file", "w") as file:
        monkeypatch.setattr(ending.gc, "get_objects", lambda: [file])
        assert run_to_end(lambda: None, at_exit) is None
    at_exit.clear()

    assert run_to_end(lambda: None, at_exit) == 0


def test_a_library_that_the_script_loads_leaves_the_end_to_python(
    at_exit: list[Callable[[], None]], tmp_path: Path
) -> None:
    library = shutil.copy(msgspec._core.__file__, tmp_path)

    assert run_to_end(lambda: None, at_exit) == 0
    at_exit.clear()
    assert run_to_end(lambda: ctypes.PyDLL(library) and None, at_exit) is None


def test_output_that_cannot_be_written_leaves_the_end_to_python(
    at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def flush(self) -> None:
            raise OSError("no room")

    monkeypatch.setattr(sys, "stdout", Full())

    assert run_to_end(lambda: None, at_exit) is None
