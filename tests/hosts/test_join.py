"""A worker of another machine joins a run over a network, and is lost when its line is cut; the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.shaped_network import ShapedNetwork
from tests.faults.running import SCRIPTS
from tests.hosts.test_nodes import PATIENCE_S, hosts

from paceline.errors import EXIT_LOST
from paceline.job.credentials.holders import Holder
from paceline.job.credentials.key_store import issue_keys, make_keys
from paceline.observe.runs import read_run
from paceline.observe.trace import trace_path

PORT = 29441
SCRIPT = SCRIPTS / "counted.py"


class Command:
    """A process of `paceline` on a host, and the lines that it has written."""

    def __init__(self, network: ShapedNetwork, host: int, *words: str) -> None:
        self.process = subprocess.Popen(
            network.command(host, sys.executable, "-m", "paceline", *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self.news = threading.Condition()
        self.is_over = False
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.news:
                self.lines.append(line.rstrip("\n"))
                self.news.notify_all()
        with self.news:
            self.is_over = True
            self.news.notify_all()

    def wait_for(self, words: str) -> str:
        with self.news:
            self.news.wait_for(lambda: self.is_over or any(words in line for line in self.lines), PATIENCE_S)
            found = [line for line in self.lines if words in line]
        assert found, "\n".join((words, "is not in", *self.lines))
        return found[0]

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self.thread.join(PATIENCE_S)
        return code


@contextmanager
def command(network: ShapedNetwork, host: int, *words: str) -> Iterator[Command]:
    started = Command(network, host, *words)
    try:
        yield started
    finally:
        started.process.kill()
        started.end()
        assert started.process.stdout is not None
        started.process.stdout.close()


def wait_for_steps(run_dir: Path, worker: int) -> None:
    """Block until the folder of the run has a step of a worker."""
    path, deadline_s = trace_path(run_dir, "worker", worker), time.monotonic() + PATIENCE_S
    while not (path.exists() and b'"step"' in path.read_bytes()):
        threading.Event().wait(0.02)
        assert time.monotonic() < deadline_s, f"no steps of worker {worker} have come"


def test_a_worker_joins_from_another_machine_and_is_lost_with_its_line(tmp_path: Path) -> None:
    keys, issued, run_dir, enough = (tmp_path / name for name in ("keys", "issued", "run", "enough"))
    make_keys(keys)
    issue_keys(keys, Holder("worker", 2), issued)
    with hosts(2) as network:
        where = f"{network.address(0)}:{PORT}"
        listen = ("--listen", where, "--keys", str(keys), "--run-dir", str(run_dir), "--no-progress")
        with command(network, 0, "run", "-n", "1:3", *listen, str(SCRIPT), str(enough)) as run:
            run.wait_for(f"on other machines workers join by: paceline join {where} --keys KEYS {SCRIPT}")
            run.wait_for("[worker 0] has batches")
            joins = ("join", where, "--keys", str(issued), str(SCRIPT), str(enough))
            with command(network, 1, *joins) as joined:
                joined.wait_for("[worker 2] has batches")
                run.wait_for("worker 2 joins from machine host-1")
                wait_for_steps(run_dir, 2)
                network.cut(1)
                run.wait_for("the connection to machine host-1, which has joined, has ended: ")
                run.wait_for("worker 2 from machine host-1 was killed by SIGKILL; the others go on without it")
                joined.wait_for("the run is out of reach")
                assert joined.end() == 1
            enough.touch()
            assert run.end() == EXIT_LOST, run.lines
            counts = run.wait_for("[worker 0] counts").split()
    assert [float(number) for number in counts[4:]] == [float(counts[3])]
    assert {each.worker for each in read_run(run_dir).steps} == {0, 2}
