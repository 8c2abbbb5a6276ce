"""Collective calls between hosts, encrypted: a line that is cut for a while, and one that stays so."""

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.shaped_network import CannotShapeError, Line, ShapedNetwork
from tests.collective.groups import CREDENTIALS

from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("collective_worker.py")
PATIENCE_S = 200.0
NUM_CALLS = 3  # that show that calls go on
CUT_S = 1.0


def test_a_line_that_is_cut_costs_that_while_and_one_that_stays_cut_ends_the_call_of_both(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o700)
    authority = Authority.make(CREDENTIALS.job)
    for rank in range(2):
        authority.issue(tmp_path / "keys", Holder("worker", rank))
    with ExitStack() as undo:
        try:
            network = undo.enter_context(ShapedNetwork([Line(400.0, 400.0)] * 2))
        except CannotShapeError as problem:
            pytest.skip(str(problem))
        workers = [start(network, tmp_path, rank, undo) for rank in range(2)]
        wait_for_calls(tmp_path, workers, NUM_CALLS)
        network.cut(1)
        threading.Event().wait(CUT_S)
        before = max(num_calls(tmp_path, rank) for rank in range(2))
        network.heal(1)
        wait_for_calls(tmp_path, workers, before + NUM_CALLS)
        network.cut(1)
        told = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]

    assert [worker.returncode for worker in workers] == [0, 0], told
    for rank, words in enumerate(told):
        assert words.startswith(f"worker {rank}"), words
        assert f": worker {1 - rank} is gone: the connection to 127." in words, words  # silent, or without a route


def start(network: ShapedNetwork, folder: Path, rank: int, undo: ExitStack) -> subprocess.Popen[str]:
    """Start a worker on its host."""
    command = network.command(rank, sys.executable, str(WORKER), str(folder), str(rank), network.address(rank))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    undo.callback(worker.communicate)
    undo.callback(worker.kill)
    return worker


def num_calls(folder: Path, rank: int) -> int:
    """How many sums a worker has."""
    path = folder / f"calls-{rank}"
    return int(path.read_text()) if path.exists() else 0


def wait_for_calls(folder: Path, workers: list[subprocess.Popen[str]], number: int) -> None:
    """Block until both workers have so many sums."""
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while min(num_calls(folder, rank) for rank in range(2)) < number:
        pause.wait(0.02)
        assert all(worker.poll() is None for worker in workers)
        assert time.monotonic() < deadline
