"""Processes that were forked find what one started afresh finds, and do without the fork server when they have to."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.faults.running import LEFT_WITHIN_S, run_to_end, running, write_script
from tests.launch.launching import processes_of, wait_gone

from paceline.errors import EXIT_KILLED
from paceline.job.environment import child_environment, fork_server_environment
from paceline.launch.child import Launch, Process
from paceline.launch.forkserver import server as server_module
from paceline.launch.forkserver.child import import_path
from paceline.launch.forkserver.server import NUM_SPARES, Forked, ForkServer
from paceline.launch.guard import clear

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a launcher adopt what others fork")

TIMEOUT_S = 200.0
ENVIRONMENT = child_environment(2, 2)


def open_fork_server(folder: Path) -> tuple[ForkServer, Process]:
    """A fork server for the script in this folder, which need not exist, and its process."""
    fork_server = ForkServer(
        fork_server_environment(ENVIRONMENT, folder), folder, "paceline.api.preloaded", folder / "script.py"
    )
    return fork_server, fork_server.start_server(fork_server.launch)


def wait_settled(fork_server: ForkServer, process: Process) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not fork_server.settled():
        select.select([process.stdout], [], [], 0.01)
        assert time.monotonic() < deadline_s, f"process {process.pid} is not ready"


def plan(script: Path, *args: str) -> Launch:
    command = (sys.executable, "-m", "paceline.launch.worker", str(script), *args)
    return Launch(role="worker", name="worker 0", rank=0, command=command, environment=ENVIRONMENT)


def end(process: Process) -> tuple[int, str, str]:
    """The exit code, and all that was said."""
    assert process.stdout is not None
    assert process.stderr is not None
    if process.stdin is not None:
        process.stdin.close()
    with process.stdout, process.stderr:
        said = process.stdout.read().decode(), process.stderr.read().decode()
    return process.wait(), *said


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    fork_server, process = open_fork_server(tmp_path_factory.mktemp("scripts"))
    with fork_server:
        wait_settled(fork_server, process)
        yield fork_server
    assert end(process) == (0, "", "")


# -- what a forked process is ----------------------------------------------------------------------------------------

# All by which a script could tell how its process was started.
LOOK = """
import json, os, signal, sys, threading, warnings
import numpy, torch
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "folder": os.getcwd(),
    "environment": {**os.environ, "PACELINE_OWNER_PID": ""}, "warnings": sys.warnoptions,
    "filters": [str(entry) for entry in warnings.filters if "sympy" not in str(entry)],  # the first optimizer's
    "flags": list(sys.flags), "command": open("/proc/self/cmdline", "rb").read().hex(),
    "listed": open("/proc/self/environ", "rb").read().hex(), "descriptors": os.listdir("/proc/self/fd"),
    "threads": len(os.listdir("/proc/self/task")), "main": threading.current_thread() is threading.main_thread(),
    "signals": [str(signal.getsignal(number)) for number in (1, 2, 13, 15, 17)],
    "cores": sorted(os.sched_getaffinity(0)), "stdin": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpgrp() == os.getpid(), "parent": os.getppid(),
    "streams": [[file.line_buffering, file.write_through, file.encoding] for file in (sys.stdout, sys.stderr)],
}))
"""


def test_a_script_cannot_tell_that_its_process_was_forked(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_script(tmp_path, LOOK)
    folders = os.pathsep.join(filter(None, [ENVIRONMENT.get("PYTHONPATH"), f"{tmp_path}/x"]))
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(5)}  # more than a socket takes at once
    changed = {"ODD": os.fsdecode(b"\xff\n"), "PYTHONPATH": folders, "HOME": "", **large}
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PATH"} | changed
    launch = replace(plan(script, "-x", "a b"), environment=environment)

    forked = fork_server.start(launch)
    monkeypatch.setattr(fork_server, "_ready", False)
    afresh = fork_server.start(launch)

    assert isinstance(forked, Forked)
    assert isinstance(afresh, subprocess.Popen)
    found, expected = end(forked), end(afresh)
    assert json.loads(found[1]) == json.loads(expected[1])
    assert found == expected
    assert json.loads(found[1])["leads"]
    assert json.loads(found[1])["parent"] == os.getpid()


def order(script: Path) -> Launch:
    """A process that takes orders."""
    return replace(plan(script), role="data")


def prepare(fork_server: ForkServer, num: int) -> None:
    """Wait until so many processes are forked ahead, and no other is asked for."""
    give_up = time.monotonic() + LEFT_WITHIN_S
    while len(fork_server._spares) < num:
        assert time.monotonic() < give_up
        fork_server.prepare_spare()
        coming = fork_server._coming
        if coming is not None:
            select.select([coming.channel], [], [], LEFT_WITHIN_S)
            if len(fork_server._spares) == num:
                coming.close()
                fork_server._coming = None


def test_processes_that_take_orders_may_be_forked_ahead(fork_server: ForkServer, tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os\nprint(os.getpid(), os.environ['ODD'], end='')")
    prepare(fork_server, NUM_SPARES)
    fork_server.prepare_spare()  # there are enough
    assert fork_server._coming is None
    spares = [spare.process.pid for spare in fork_server._spares]

    other = fork_server.start(plan(script))
    started = [
        fork_server.start(replace(order(script), environment={**ENVIRONMENT, "ODD": str(number)}))
        for number in range(NUM_SPARES + 1)
    ]

    for number, process in enumerate(started):
        assert end(process) == (0, f"{process.pid} {number}", "")
    assert [process.pid for process in started[:NUM_SPARES]] == spares[::-1]
    assert len({process.pid for process in (other, *started)}) == NUM_SPARES + 2
    assert end(other)[0] == 1  # its environment lacks the variable


def test_a_process_that_is_about_to_be_forked_ahead_is_waited_for(fork_server: ForkServer, tmp_path: Path) -> None:
    fork_server.prepare_spare()
    assert fork_server._coming is not None
    assert fork_server._spares == []

    started = fork_server.start(order(write_script(tmp_path, "print('here')")))

    assert fork_server._coming is None
    assert end(started) == (0, "here\n", "")


def test_a_process_that_was_forked_ahead_and_killed_is_replaced(fork_server: ForkServer, tmp_path: Path) -> None:
    prepare(fork_server, 1)
    [spare] = fork_server._spares
    os.kill(spare.process.pid, signal.SIGKILL)
    assert spare.process.wait() == -9

    started = fork_server.start(order(write_script(tmp_path, "print('here')")))

    assert (started.pid != spare.process.pid, end(started)) == (True, (0, "here\n", ""))
    assert spare.channel.fileno() == -1


def test_a_process_that_was_forked_ahead_ends_with_its_fork_server(tmp_path: Path) -> None:
    fork_server, process = open_fork_server(tmp_path)
    with fork_server:
        wait_settled(fork_server, process)
        prepare(fork_server, 1)
        [spare] = fork_server._spares
    assert spare.process.wait() == EXIT_KILLED
    assert end(process) == (0, "", "")


def test_it_stays_on_its_cores(fork_server: ForkServer, tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os\nprint(os.sched_getaffinity(0))")
    last = max(os.sched_getaffinity(0))

    assert end(fork_server.start(replace(plan(script), cores=(last,)))) == (0, f"{{{last}}}\n", "")


def test_each_has_chance_of_its_own(fork_server: ForkServer, tmp_path: Path) -> None:
    text = "import random, numpy, torch\nprint(random.random(), numpy.random.random(), torch.initial_seed())"
    script = write_script(tmp_path, text)

    drawn = [end(fork_server.start(plan(script)))[1].split() for _ in range(3)]

    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True)), drawn


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, ("first\nlast\n", "")),
        ("sys.exit(3)", 3, ("", "")),
        ("sys.exit('no data')", 1, ("", "no data\n")),
        ("import os; os.kill(os.getpid(), 9)", -9, ("", "")),
        ("import os; os.abort()", -6, ("", None)),
        ("raise KeyboardInterrupt", 130, ("", "")),
        ("raise ValueError('boom')", 1, ("", None)),
    ],
)
def test_it_ends_as_its_script_does(
    fork_server: ForkServer, tmp_path: Path, statement: str, code: int, said: tuple[str, str | None]
) -> None:
    ended, stdout, stderr = end(fork_server.start(plan(write_script(tmp_path, f"import sys\n{statement}"))))

    assert (ended, stdout) == (code, said[0])
    assert stderr == said[1] if said[1] is not None else "runpy" not in stderr
    if "boom" in statement:
        assert stderr.splitlines()[-1] == "ValueError: boom"


def test_what_a_script_leaves_to_the_end_of_python_is_done(fork_server: ForkServer, tmp_path: Path) -> None:
    text = """
import os, sys
class Ends:
    def __del__(self, write=os.write): write(1, b"ended\\n")
sys.kept = Ends(), open(sys.argv[1], "w")
sys.kept[1].write("all")
"""
    written = tmp_path / "file"

    assert end(fork_server.start(plan(write_script(tmp_path, text), str(written)))) == (0, "ended\n", "")
    assert written.read_text() == "all"


def test_the_folders_of_a_server_are_those_of_python_m(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/scripts:/ours")
    monkeypatch.setattr(sys, "path", ["/scripts", "/ours", "/lib", "/lib/site"])

    assert import_path(["/scripts", "/ours"]) == [os.getcwd(), "/scripts", "/ours", "/lib", "/lib/site"]
    assert import_path(["/theirs"]) == [os.getcwd(), "/theirs", "/lib", "/lib/site"]


def test_chance_of_ours_is_left_alone(fork_server: ForkServer, tmp_path: Path) -> None:
    before = random.getstate()
    end(fork_server.start(plan(write_script(tmp_path, ""))))
    assert random.getstate() == before


# -- when the fork server fails -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["importing", "ready"])
def test_processes_are_started_without_it_when_it_was_killed(when: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, "print('here')")
    fork_server, process = open_fork_server(tmp_path)
    with fork_server:
        if when == "ready":
            wait_settled(fork_server, process)
        os.kill(process.pid, signal.SIGKILL)
        assert end(process)[0] == -9
        if when == "importing":
            assert fork_server.settled()

        for _ in range(2):
            started = fork_server.start(plan(script))
            assert isinstance(started, subprocess.Popen)
            assert end(started) == (0, "here\n", "")


def test_one_that_answers_too_late_starts_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FORK_TIMEOUT_S", 0.1)
    script = write_script(tmp_path, "with open(__file__ + '.count', 'a') as file: print('here', file=file)")
    fork_server, process = open_fork_server(tmp_path)
    with fork_server:
        wait_settled(fork_server, process)
        os.kill(process.pid, signal.SIGSTOP)

        assert end(fork_server.start(plan(script))) == (0, "", "")
        os.kill(process.pid, signal.SIGCONT)
    assert end(process)[0] == 0

    assert wait_gone(processes_of(tmp_path), LEFT_WITHIN_S) == set()
    assert Path(f"{script}.count").read_text() == "here\n"


# -- whole runs ------------------------------------------------------------------------------------------------------


def fork_servers_of(run_dir: Path) -> set[int]:
    found = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(run_dir)}
    return {pid for pid, command in found.items() if b"paceline.launch.forkserver.child" in command}


PAUSE = "import signal\nprint('begin', flush=True)\nwhile True: signal.sigtimedwait([], 0.05)"


@pytest.mark.parametrize("guarded", [True, False])
def test_kill_9_of_the_launcher_takes_the_fork_server_along(guarded: bool, tmp_path: Path) -> None:
    with running(tmp_path / "run", write_script(tmp_path, PAUSE), options=("-n", "2"), afresh=True) as run:
        run.wait_for("begin", times=2)
        family, [fork_server] = run.family(), fork_servers_of(run.run_dir)
        assert len(os.listdir(f"/proc/{fork_server}/task")) == 1, "what forks must not have threads"
        if not guarded:
            [guard] = [pid for pid in family if b"guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(guard, signal.SIGKILL)
            assert wait_gone({guard}, LEFT_WITHIN_S) == set()

        run.process.kill()

        assert wait_gone(family, LEFT_WITHIN_S) == set()
        if not guarded:  # no other process clears the directory
            clear(run.run_dir, temporary=False)


KILL_FORK_SERVER = """
import os, signal
import psutil
if os.environ["PACELINE_INCARNATION"] == "0":
    for process in psutil.Process(os.getppid()).children():
        if "paceline.launch.forkserver.child" in process.cmdline():
            process.kill()
            print("killed the fork server", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
print("came to the end")
"""


def test_a_run_goes_on_without_its_fork_server(tmp_path: Path) -> None:
    script = write_script(tmp_path, KILL_FORK_SERVER)

    code, run = run_to_end(tmp_path / "run", script, options=("-n", "1", "--on-crash", "restart"), afresh=True)

    assert code == 0, run.output
    assert run.told() == ["paceline: worker 0 was killed by SIGKILL; restart 1 of 3 in 0.5 s"]
    assert run.saying("[worker 0] killed the fork server")
    assert run.saying("[worker 0] came to the end")


def test_a_signal_is_answered_while_the_fork_server_imports(tmp_path: Path) -> None:
    script = write_script(tmp_path, "")
    (tmp_path / "torch.py").write_text(PAUSE)  # the script's folder comes first, for the fork server too
    with running(tmp_path / "run", script, afresh=True) as run:
        run.wait_for("[fork server] begin")

        run.process.send_signal(signal.SIGTERM)

        assert run.end() == 143
    assert run.lines == ["[fork server] begin", "paceline: stopped by SIGTERM"]
