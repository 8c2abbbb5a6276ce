"""A worker that has the launcher's terminal, for a debugger."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.launch.launching import TIMEOUT_S, command

from paceline.errors import UsageError
from paceline.launch.local import make_spec
from paceline.launch.plan import LocalRun

SCRIPT = """
import os, sys, time
if os.environ["PACELINE_RANK"] == "1":
    print("this is", 1)
    if "both" in sys.argv:
        import pdb
        pdb.set_trace()
    breakpoint()
    open(__file__ + ".passed", "w").close()
    sys.exit()
while "both" not in sys.argv and not os.path.exists(__file__ + ".passed"):
    time.sleep(0.05)
breakpoint()
print("reads", sys.stdin.isatty(), "writes", sys.stdout.isatty())
while True:
    time.sleep(0.05)
"""
A_DAY_S = 24 * 3600


class Terminal:
    """The far end of a terminal that a launcher has."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.master, self.process = master, process
        self._seen = b""

    def type(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def read_until(self, word: str) -> str:
        deadline_s = time.monotonic() + TIMEOUT_S
        while word.encode() not in self._seen:
            assert select.select([self.master], [], [], max(0.0, deadline_s - time.monotonic()))[0], self._seen
            self._seen += os.read(self.master, 4096)
        found, _, self._seen = self._seen.partition(word.encode())
        return found.decode()


@contextmanager
def at_terminal(script: Path, **settings: object) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    process = subprocess.Popen(command(script, {**settings}), stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_debugger_reads_the_terminal_that_others_pass_by_and_ctrl_c_goes_to_its_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with at_terminal(script, num_workers=2, debug=0) as terminal:
        before = terminal.read_until("(Pdb) ")
        assert "[worker 0]" not in before
        terminal.type("c")
        assert "reads True writes True" in terminal.read_until("True writes True") + "True writes True"
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_until("(Pdb) ")
        terminal.type("q")
        if sys.version_info >= (3, 14):
            terminal.read_until("[y/n]")
            terminal.type("y")
        said = terminal.read_until("the run stops")
        assert "BdbQuit" in said or sys.version_info >= (3, 14)
        assert "that worker 0 wrote to stderr" not in said
        assert terminal.process.wait(TIMEOUT_S) == 1


def test_without_it_a_debugger_says_where_a_terminal_comes_from(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with at_terminal(script, num_workers=2, debug=0, args=["both"]) as terminal:
        assert "`paceline run --debug RANK script.py` gives one worker" in terminal.read_until("this one") + "this one"


def test_all_wait_for_a_worker_that_is_debugged(tmp_path: Path) -> None:
    patient = make_spec(LocalRun(script=Path("train.py"), debug=1), tmp_path)
    assert patient.wait_timeout_s > A_DAY_S < patient.join_timeout_s
    assert make_spec(LocalRun(script=Path("train.py")), tmp_path).wait_timeout_s < A_DAY_S


def test_the_worker_to_debug_must_be_there() -> None:
    with pytest.raises(UsageError, match="--debug is 2, expected a worker from 0 to 1"):
        LocalRun(script=Path("train.py"), debug=2).validate()
