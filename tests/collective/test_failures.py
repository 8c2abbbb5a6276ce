"""Which worker is to blame for connections that have ended: one that has ended without a word, and none that runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import HashStore

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
