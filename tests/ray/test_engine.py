"""Jobs on a real Ray cluster of two nodes, which is started once for all of them."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.launch.launching import wait_gone
from tests.launch.test_launchers import TRAIN
from tests.launch.warm import run_job

# Ray takes its time where others work, too.
pytestmark = pytest.mark.timeout(600)

DRIVER = Path(__file__).with_name("driver.py")
GONE_WITHIN_S = 30.0
START_S = 240.0  # actors import torch beside all else that runs here
ON_SECOND = {"worker_resources": {"second": 1}}

# Worker 1 is killed with its actor in the middle of a clock. Its next life finds what the first has pushed, and then
# has the job lose a server, by the same way.
KILL_ACTORS = """
import os, signal, sys
import psutil
import paceline
from paceline.job.environment import find_place
life = find_place().incarnation
with paceline.connect() as ps:
    table = ps.table("w", shape=(1,), update=paceline.update.Add(), consistency="asynchronous")
    if ps.rank == 0:
        signal.pause()
    table.push([1.0])
    ps.clock()
    print(f"worker {ps.rank} in life {life} has {table.pull().item():g}", flush=True)
    print(os.environ["COLOUR"], sys.argv[1:], os.getcwd(), flush=True)
    if life == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    [launcher] = [process for process in psutil.Process().parents() if "ray/driver.py" in str(process.cmdline())]
    family = launcher.children(recursive=True)
    [server] = [process for process in family if "paceline.launch.server" in str(process.as_dict(["cmdline"]))]
    server.parent().kill()
    signal.pause()
"""

KILL_SELF_THEN_FAIL = """
import os, signal, sys
from paceline.job.environment import find_place
if find_place().incarnation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
print(os.environ["COLOUR"], sys.argv[1:], os.getcwd(), flush=True)
sys.exit("no data")
"""

# What the other script makes itself.
SAMPLES = """
import torch
def make():
    torch.manual_seed(0)
    torch.nn.Linear(4, 2)
    return torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
"""
OWN = "paceline.shard(torch.utils.data.DataLoader(data, batch_size=4), seed=1)"
FED = 'paceline.feed(paceline.sources.dataset("samples:make"), batch_size=4, leases=False)'

WAIT = """
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
try:
    signal.pause()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that runs jobs."""

    process: subprocess.Popen[str]

    def start(self, **job: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def read_until(self, word: str) -> list[str]:
        """Read its output up to the line with this word, and return it; a job that ends before it does is an error."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.rstrip("\n"))
            if word in line:
                return lines
            if line.startswith("END "):
                break
        raise AssertionError(f"the launcher, or its job, ended before it said {word!r}: {lines}")

    def run(self, script: Path, text: str, **job: Any) -> tuple[int, list[str]]:
        """Run a script to its end; return the exit code and what was said."""
        self.start(script=str(write(script, text)), **{"quiet": True, "start_timeout_s": START_S, **job})
        return self.result()

    def job(self) -> set[int]:
        """The processes of the job that runs, and what they have started."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        # Not those of Ray, whose programs may lie in a folder of that name, too.
        ours = [child for child in family if re.search(r"paceline[./]launch", str(child.as_dict(["cmdline"])))]
        return {other.pid for child in ours for other in (child, *child.children(recursive=True))}

    def result(self) -> tuple[int, list[str]]:
        *lines, end = self.read_until("END ")
        return int(end.split()[1]), lines


def write(script: Path, text: str) -> Path:
    script.write_text(text)
    return script


@contextmanager
def started(*nodes: dict[str, Any]) -> Generator[Launcher]:
    """Start a launcher on a cluster of these nodes; without any, on the one of two nodes."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with subprocess.Popen(
        [sys.executable, str(DRIVER), *map(json.dumps, nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        family = psutil.Process(process.pid)
        try:
            Launcher(process).read_until("END 0")
            yield Launcher(process)
        finally:
            started = family.children(recursive=True) if process.poll() is None else []
            process.kill()
            for child in started:
                child.kill()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with started() as launcher:
        yield launcher


def test_over_two_nodes_the_bits_are_those_of_one_machine(launcher: Launcher, tmp_path: Path) -> None:
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    write(tmp_path / "samples.py", SAMPLES)

    assert OWN in TRAIN
    fed = TRAIN.replace(OWN, FED)
    code, lines = launcher.run(script, fed, quiet=False, data_servers=1, run_dir=str(run_dir), **ON_SECOND)

    assert code == 0, lines
    assert "paceline: Ray has placed the processes on 2 nodes; they talk over TCP, encrypted" in lines
    write(script, TRAIN)
    local = run_job(script)
    assert sorted(line for line in lines if " has " in line and "]" in line) == sorted(local.stdout.splitlines())
    assert {path.name for path in (run_dir / "trace").iterdir()} == {
        "data-0.jsonl",
        "server-0.jsonl",
        "worker-0.jsonl",
        "worker-1.jsonl",
    }
    steps = [json.loads(line) for line in (run_dir / "trace" / "worker-1.jsonl").read_text().splitlines()]
    assert [step["clock"] for step in steps if step["kind"] == "step"] == [0, 1, 2, 3]
    assert not (run_dir / "token").exists()


def test_a_killed_actor_is_followed_by_another_life_and_a_servers_ends_the_job(
    launcher: Launcher, tmp_path: Path
) -> None:
    asked = {"args": ["--lr", "0.1"], "env": {"COLOUR": "green"}, "on_crash": "restart"}
    code, lines = launcher.run(tmp_path / "kill.py", KILL_ACTORS, run_dir=str(tmp_path / "run"), **asked)

    assert code == 1, lines
    assert f"[worker 1] green ['--lr', '0.1'] {Path.cwd()}" in lines
    assert "[worker 1] worker 1 in life 1 has 2" in lines
    told = [line[max(0, line.find("paceline: ")) :] for line in lines]  # Ray writes, too, and ends no line before
    assert "paceline: worker 1 was killed by SIGKILL; restart 1 of 3 in 0.5 s" in told
    assert "paceline: server 0 was killed by SIGKILL; the run ends" in told


@pytest.mark.campaign
def test_a_script_gets_what_was_asked_for_and_its_end_is_that_of_the_run(launcher: Launcher, tmp_path: Path) -> None:
    code, lines = launcher.run(
        tmp_path / "fail.py",
        KILL_SELF_THEN_FAIL,
        args=["--lr", "0.1"],
        workers=1,
        env={"COLOUR": "green"},
        on_crash="restart",
        **ON_SECOND,
        place_servers="pack",
    )

    assert code == 1
    assert f"[worker 0] green ['--lr', '0.1'] {Path.cwd()}" in lines
    assert "paceline: worker 0 was killed by SIGKILL; restart 1 of 3 in 0.5 s" in lines
    assert "paceline: worker 0 ended with exit code 1; the run stops" in lines
    assert lines[-1] == "    no data"


COUNT_ON = """
import sys, paceline
ps = paceline.init()
table = ps.table("w", shape=(1,), update=paceline.update.Add(), scale="sum")
told = paceline.resumed()
for clock in range(told.clock if told else 0, int(sys.argv[2])):
    table.push([2.0 ** ps.rank])
    ps.clock()
written = paceline.snapshot(sys.argv[1])
if written:
    written.result(60)
print(f"worker {ps.rank} goes on from {told.clock if told else None} and has {table.pull().item():g}\\n", end="")
"""


@pytest.mark.campaign
def test_over_two_nodes_a_job_goes_on_from_a_snapshot(launcher: Launcher, tmp_path: Path) -> None:
    script, kept = tmp_path / "count.py", str(tmp_path / "kept")
    for stop_at, begins in ((2, None), (5, 2)):
        job = {
            "args": [kept, str(stop_at)],
            **ON_SECOND,
            "variables": {"PACELINE_RESUME": kept, "PACELINE_SNAPSHOTS": kept},
        }
        code, lines = launcher.run(script, COUNT_ON, quiet=False, **job)
        assert code == 0, lines
        for rank in range(2):
            assert f"[worker {rank}] worker {rank} goes on from {begins} and has {3 * stop_at}" in lines
        assert (f"paceline: goes on from {kept}/snapshot-1, at clock 2" in lines) == (begins is not None)


def test_a_job_without_room_says_what_there_is(launcher: Launcher, tmp_path: Path) -> None:
    code, lines = launcher.run(tmp_path / "none.py", "", workers=9, start_timeout_s=0.1)

    assert code == -1
    [line] = lines
    assert line.startswith(
        "DeadlineExceeded: the Ray cluster had no room within 0.1 s for 9 workers of 1 CPU and 1 server of 1 CPU; "
        "it has 6 CPU, 3 second, and free are "
    )


@pytest.mark.campaign
def test_ctrl_c_reaches_the_script_and_leaves_nothing(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start(script=str(write(tmp_path / "wait.py", WAIT)), workers=1, quiet=True)
    launcher.read_until("ready")
    left = launcher.job()
    launcher.process.send_signal(signal.SIGINT)

    code, lines = launcher.result()

    assert code == 130
    assert "[worker 0] interrupted" in lines
    assert wait_gone(left, GONE_WITHIN_S) == set()


def test_kill_9_of_the_launcher_leaves_nothing(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start(script=str(write(tmp_path / "wait.py", WAIT)), workers=1, quiet=True)
    launcher.read_until("ready")
    left = launcher.job()

    launcher.process.kill()

    assert wait_gone(left, GONE_WITHIN_S) == set()
