"""What workers start and leave behind ends with them, also what has left their group; what cleans up after them may."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.data.service.feeders import until
from tests.faults.running import running
from tests.faults.running import write_script as write_whole
from tests.launch.launching import launched, processes_of, read_until, wait_gone, write_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes there are")

LEFT_WITHIN_S = 30.0

# Processes of their own session: below the worker, fallen to the launcher, the same without its environment, and forked
# without a new program. Each says its number.
LEAVERS = """
SLEEP = ["sh", "-c", "echo left $$; exec sleep 1000"]
def leave(run):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: run()
        os._exit(0)
    os.wait()
def pause():
    os.write(1, b"left %d\\n" % os.getpid())
    while True: signal.pause()
if place.incarnation == 0:
    subprocess.Popen(SLEEP, start_new_session=True)
    leave(lambda: os.execvp("sh", SLEEP))
    leave(lambda: os.execve("/bin/sh", ["sh", "-c", "echo left unmarked $$; exec sleep 1000"], {}))
    leave(pause)
"""
NUM_LEFT = 4
PAUSE = "while True: signal.sigtimedwait([], 0.05)\n"
TURNING = PAUSE.rstrip() + "; print('turn', flush=True)\n"


def pids(lines: list[str]) -> set[int]:
    return {int(line.split()[-1]) for line in lines}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_what_left_its_session_ends_with_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    with launched(write_script(tmp_path, LEAVERS + TURNING), num_workers=1) as process:
        left = pids(read_until(process, "left", times=NUM_LEFT))
        # What has wiped its mark is known once it has fallen to the launcher, and that has had a turn since.
        until(lambda: sum(parent_of(pid) == process.pid for pid in left) == NUM_LEFT - 1)
        read_until(process, "turn", times=3)
        process.send_signal(number)

        assert wait_gone(left, LEFT_WITHIN_S) == set()


def test_what_left_its_session_ends_with_the_run(tmp_path: Path) -> None:
    with launched(write_script(tmp_path, LEAVERS), num_workers=1) as process:
        left = pids(read_until(process, "left", times=NUM_LEFT))

        assert process.wait(120) == 0
        assert wait_gone(left, 0) == set()


def test_what_a_worker_has_left_ends_when_it_is_started_again(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('life', place.incarnation, os.getpid())\n" + LEAVERS + PAUSE)
    with launched(script, num_workers=1, crash_policy={"on_crash": "restart"}) as process:
        [worker] = pids(read_until(process, "life 0"))
        left = read_until(process, "left", times=NUM_LEFT)
        # Which worker has left what wiped its environment cannot be told: that ends with the job.
        marked = pids([line for line in left if "unmarked" not in line])
        os.kill(worker, signal.SIGKILL)
        read_until(process, "life 1")

        assert wait_gone(marked, LEFT_WITHIN_S) == set()


def test_a_job_within_a_job_ends_with_it_and_cleans_up(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    within = write_script(inner, "print('folder', spec.run_dir)\n" + LEAVERS + PAUSE)
    command = [sys.executable, str(Path(__file__).with_name("driver.py"))]
    script = write_script(
        tmp_path,
        f"""
import json
for name in ("PACELINE_SPEC", "PACELINE_LAUNCHER_PID", "PACELINE_OWNER_PID"): del os.environ[name]
subprocess.run([*{command!r}, json.dumps(dict(script={str(within)!r}, num_workers=1, quiet=True))])
""",
    )
    with launched(script, num_workers=1) as process:
        folder = Path(read_until(process, "folder")[0].split()[-1])
        left = pids(read_until(process, "left", times=NUM_LEFT))
        family = processes_of(folder)  # with its guard, which clears the folder
        process.kill()

        assert wait_gone(left | family, LEFT_WITHIN_S) == set()
        assert not folder.exists()


SPAWNER = """
import multiprocessing
def wait(semaphore): semaphore.acquire()
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    semaphore = context.Semaphore(0)
    context.Process(target=wait, args=(semaphore,)).start()
    print("ready", spec.run_dir, os.getpid(), "/dev/shm/sem." + semaphore._semlock.name.lstrip("/"), flush=True)
    while True: signal.sigtimedwait([], 0.05)
"""


@pytest.mark.parametrize("victim", ["launcher", "worker", "politely"])
def test_semaphores_of_processes_that_were_killed_are_removed(victim: str, tmp_path: Path) -> None:
    with launched(write_script(tmp_path, SPAWNER), num_workers=1) as process:
        *_, run_dir, pid, name = read_until(process, "ready")[0].split()
        family = processes_of(Path(run_dir))  # with the tracker, which removes them
        assert Path(name).exists()
        if victim == "worker":
            os.kill(int(pid), signal.SIGKILL)
        else:
            process.send_signal(signal.SIGTERM if victim == "politely" else signal.SIGKILL)

        assert wait_gone(family, LEFT_WITHIN_S) == set()
        assert not Path(name).exists()


LOADER = """
import os, torch
from multiprocessing.synchronize import SemLock
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    names, make_name = [], SemLock._make_name
    SemLock._make_name = staticmethod(lambda: names.append(make_name()) or names[-1])
    batches = iter(DataLoader(TensorDataset(torch.zeros(1000)), multiprocessing_context="spawn", num_workers=1))
    next(batches)
    print("ready", os.getpid(), *("/dev/shm/sem." + name.lstrip("/") for name in names), flush=True)
    while True: __import__("signal").pause()
"""


@pytest.mark.parametrize(
    "victim",
    ["launcher", *(pytest.param(victim, marks=pytest.mark.campaign) for victim in ("worker", "politely"))],
)
def test_a_loader_that_spawns_leaves_no_semaphores(victim: str, tmp_path: Path) -> None:
    with running(tmp_path / "run", write_whole(tmp_path, LOADER), options=("-n", "1")) as run:
        _, _, _, pid, *names = run.wait_for("ready")[0].split()
        assert [Path(name).exists() for name in names].count(True) > 1
        family = run.family()
        if victim == "worker":
            os.kill(int(pid), signal.SIGKILL)
        else:
            run.process.send_signal(signal.SIGTERM if victim == "politely" else signal.SIGKILL)

        assert wait_gone(family, LEFT_WITHIN_S) == set()
        assert not [name for name in names if Path(name).exists()]
