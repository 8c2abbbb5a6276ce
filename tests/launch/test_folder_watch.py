"""What is in a folder is looked for in a thread: a file server that does not answer holds up nothing else."""

import threading
from itertools import chain, count, repeat

from paceline.job.folders import wait_for
from paceline.launch.folder_watch import FolderWatch

PATIENCE_S = 60.0


def test_what_was_seen_last_counts_while_a_look_does_not_return() -> None:
    stuck, answers, asked = threading.Event(), threading.Event(), count()

    def look() -> int:
        number = next(asked)
        if number == 1:
            stuck.set()
            assert answers.wait(PATIENCE_S)
        return number

    with FolderWatch(look, -1, every_s=0.0) as watch:
        assert stuck.wait(PATIENCE_S)
        assert watch.seen == 0
        answers.set()
        assert wait_for(lambda: watch.seen if watch.seen > 0 else None, PATIENCE_S, lambda: "it looks no more") > 0


def test_an_error_of_the_file_server_leaves_what_was_seen() -> None:
    outcomes = chain([OSError(5, "Input/output error")], repeat("there"))

    def look() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    with FolderWatch(look, "", every_s=0.0) as watch:
        assert wait_for(lambda: watch.seen or None, PATIENCE_S, lambda: "it looks no more") == "there"
