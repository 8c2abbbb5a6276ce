"""What is in a folder is looked for in a thread: a file server that does not answer holds up nothing else."""

import threading
from collections.abc import Callable
from itertools import chain, count, islice, repeat

import pytest

from paceline.job.folders import wait_for
from paceline.launch.folder_watch import FolderWatch, looks

PATIENCE_S = 60.0
PROBLEM = "nothing is seen"
FAULT, GONE = OSError(5, "Input/output error"), FileNotFoundError(2, "No such file or directory")


def test_what_was_seen_last_counts_while_a_look_does_not_return() -> None:
    stuck, answers, asked = threading.Event(), threading.Event(), count()

    def look() -> int:
        number = next(asked)
        if number == 1:
            stuck.set()
            assert answers.wait(PATIENCE_S)
        return number

    with FolderWatch(look, -1, PROBLEM, every_s=0.0) as watch:
        assert stuck.wait(PATIENCE_S)
        assert watch.seen == 0
        answers.set()
        assert wait_for(lambda: watch.seen if watch.seen > 0 else None, PATIENCE_S, lambda: "it looks no more") > 0


def looking(*outcomes: str | OSError) -> Callable[[], str]:
    """A look that comes to these, and to the last one from then on."""
    each = chain(outcomes, repeat(outcomes[-1]))

    def look() -> str:
        outcome = next(each)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    return look


def test_an_error_of_the_file_server_leaves_what_was_seen() -> None:
    with FolderWatch(looking(FAULT, "there"), "", PROBLEM, every_s=0.0) as watch:
        assert wait_for(lambda: watch.seen or None, PATIENCE_S, lambda: "it looks no more") == "there"


def test_an_error_is_told_once_until_a_look_succeeds_and_a_file_that_is_not_there_is_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    look = looking(GONE, FAULT, FAULT, "there", FAULT, GONE, "there")
    assert list(islice(looks(look, threading.Event(), PROBLEM, 0.0), 2)) == ["there", "there"]
    assert capfd.readouterr().err.splitlines() == [f"paceline: {PROBLEM}: [Errno 5] Input/output error"] * 2
