"""The session belongs to one process: to all of its threads, and to none that it forks or starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.errors import UsageError

TIMEOUT_S = 200.0


def run(*command: str, script: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-W", "error", *command, str(script)]
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


FORKS = """
import os, sys
import torch, paceline

paceline.init()
table = paceline.init().table("w", shape=(2,), update=paceline.update.Add(), scale="sum")
table.push(torch.ones(2))
paceline.init().clock()
sys.stdout.flush()
for how in ("exit", "use", "anew"):
    child = os.fork()
    if not child:
        assert paceline.rank() == int(os.environ.get("PACELINE_RANK", "0"))
        if how == "use":
            try:
                table.push(torch.ones(2))
            except paceline.errors.PeerError as error:
                assert "was forked from the worker and takes no part in its job" in str(error), error
            else:
                sys.exit(4)
        if how == "anew":
            own = paceline.init().table("w", shape=(2,), update=paceline.update.Add())
            assert own.pull().tolist() == [0.0, 0.0]
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, how
table.push(torch.ones(2))
paceline.init().clock()
paceline.barrier()
print("sum", table.pull().tolist(), flush=True)
"""


def test_a_forked_child_ends_without_touching_the_job_of_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKS)
    done = run(script=script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "sum [2.0, 2.0]\n", "")


LAUNCHED = (
    FORKS
    + """
import subprocess, threading
from pathlib import Path

if paceline.rank() == 0:
    other = Path(__file__).with_name("other.py")
    done = subprocess.run([sys.executable, str(other)], capture_output=True, text=True)
    assert done.stdout == "alone 0 of 1\\n", done
    assert f"was started by a worker (process {os.getpid()}), whose place it does not take" in done.stderr, done.stderr

try:
    paceline.connect()
except paceline.errors.UsageError as error:
    assert "joined its job before, as worker" in str(error) and "paceline.init(), which returns it" in str(error), error
else:
    sys.exit(5)


def train():
    for _ in range(3):
        table.push(torch.ones(2))
        paceline.init().clock()
    paceline.barrier()
    print("thread", paceline.rank() in (0, 1), table.pull().tolist(), flush=True)


threading.Thread(target=train).start()  # the main program ends before it
"""
)
OTHER = """
import paceline

paceline.init()
with paceline.connect() as ps:
    ps.table("w", shape=(2,), update=paceline.update.Add()).push([5.0, 5.0])
    ps.clock()
print("alone", paceline.rank(), "of", paceline.size())
"""


def test_what_a_worker_starts_takes_no_place_and_its_threads_share_its_session(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    (tmp_path / "other.py").write_text(OTHER)
    done = run("-m", "paceline", "run", "-n", "2", "--quiet", "--no-progress", script=script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[worker {rank}] {said}" for rank in range(2) for said in ("sum [4.0, 4.0]", "thread True [10.0, 10.0]")
    ]


def test_init_finds_what_connect_has_joined() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline.api.script._script.session", None)
        with paceline.connect() as ps:
            assert paceline.init() is ps
        with pytest.raises(UsageError, match="it is closed: connect again"):
            paceline.init(ps)


THREADS = """
import paceline

with paceline.connect() as ps:
    table = ps.table("w", shape=(1,), update=paceline.update.Add(), scale="sum")
    table.push([1.0])
    ps.clock()
    print(f"{ps.size} {table.pull().tolist()} {paceline.init() is ps}\\n", end="")  # threads write by the piece
"""


def test_connect_finds_the_worker_where_workers_are_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(THREADS)
    done = run("-m", "paceline", "run", "-n", "2", "--quiet", "--no-progress", "--transport", "memory", script=script)
    assert done.returncode == 0, done.stderr
    assert [line.endswith("2 [2.0] True") for line in done.stdout.splitlines()] == [True, True]
