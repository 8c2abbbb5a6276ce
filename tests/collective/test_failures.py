"""Which worker is to blame for connections that have ended: one that has ended without a word, and none that runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from paceline.collective import failures
from paceline.collective.failures import FailureReports, Liveness
from paceline.errors import DeadlineExceeded, PeerError


@pytest.fixture
def workers(tmp_path: Path) -> list[Liveness]:
    found = [Liveness(tmp_path, rank) for rank in range(3)]
    for one in found:
        one.start()
    return found


def test_a_worker_that_has_ended_is_named_and_not_one_that_is_busy(workers: list[Liveness]) -> None:
    failure_reports = FailureReports(HashStore(), 0, workers[0])
    workers[2].stop()
    told = failure_reports.explain("call 1", [1, 2], None, "closed")
    assert str(told) == "worker 0, call 1: worker 2 is gone: its connection has ended. closed"
    late = FailureReports(HashStore(), 0, workers[0]).explain("call 1", [1, 2], 2.0, "closed")
    assert type(late) is PeerError
    assert "worker 2 is gone" in str(late)


def test_workers_that_all_run_are_not_said_to_be_gone(workers: list[Liveness]) -> None:
    store = HashStore()
    told = FailureReports(store, 0, workers[0]).explain("call 1", [1, 2], None, "closed")
    assert str(told) == "worker 0, call 1: the connection to workers 1, 2 has ended. closed"
    told = FailureReports(store, 1, workers[1]).explain("call 1", [0, 2], None, "closed")
    assert "worker 0 gave up: it lost its connection to workers 1, 2 (call 1)" in str(told)
    late = FailureReports(HashStore(), 0, workers[0]).explain("call 1", [1], 2.0, "")
    assert isinstance(late, DeadlineExceeded)
    assert "waited 2 s for worker 1" in str(late)


FORKING = """
import os, pathlib, sys
from paceline.collective.failures import Liveness
kept = Liveness(pathlib.Path(sys.argv[1]), 2)
kept.start()
if os.fork() == 0:
    sys.stdin.read()
"""


def test_a_process_that_ends_unlocks_its_file_though_a_child_of_it_runs_on(tmp_path: Path) -> None:
    own, told = Liveness(tmp_path, 0), [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(told, stdin=subprocess.PIPE) as forking:
        forking.wait(60)  # its child reads on, until this block is left
        assert own.has_ended(2)
    assert not own.has_ended(7), "of a worker that has never connected nothing is known"


def test_two_threads_that_connect_at_once_lock_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, opened = Liveness(tmp_path, 0), list[int]()
    second = threading.Thread(target=own.start, daemon=True)

    def open_slowly(*args: Any) -> int:
        opened.append(os.open(*args))
        if len(opened) == 1:
            second.start()
            second.join(0.2)  # it comes to its end here, unless it waits for the first
        return opened[-1]

    monkeypatch.setattr(failures, "os", _Patched(open=open_slowly))
    first = threading.Thread(target=own.start, daemon=True)
    first.start()
    first.join(60)
    second.join(60)
    assert not first.is_alive()
    assert len(opened) == 1
    own.stop()


class _Patched:
    """The module `os` with another `open`."""

    def __init__(self, **changed: Any) -> None:
        self.__dict__ = vars(os) | changed
