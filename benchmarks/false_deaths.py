"""Is a slow server taken for dead? `python benchmarks/false_deaths.py --minutes 60 [--by stops] [--json]`, as root.

Two hosts (network namespaces) have a worker, a server and the replica of the other server each. Once they train, every
process of a server has a tenth of a core: the kernel gives it 10 ms of each 100 ms, or it is stopped and woken by
signals, for up to 4.5 s at a time. Told are the servers and replicas that another process took the place of, which
should be none, and what shows that they were slow.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import psutil
from cyclopts import App, Parameter
from measuring import machine, print_json, progress
from replicated_job import ReplicatedJob, replicated
from turns import BENCHMARKS

SHARE: Final = 0.1
PERIOD_S: Final = 0.1  # of the kernel's quota
STOPS_S: Final = 0.05, 5.0  # the shortest and the longest turn of stopping and running
START_S: Final = 120.0
END_S: Final = 300.0
CONTROLLER: Final = Path("/sys/fs/cgroup/cpu")  # of control groups of version 1, or with `cpu.max` of version 2
VERSION_2: Final = Path("/sys/fs/cgroup")

app = App(name="false_deaths.py", help="Slow servers down, and see if one is taken for dead.", help_format="plaintext")


@app.default
def false_deaths(
    *,
    minutes: float = 5.0,
    by: Literal["quota", "stops"] = "quota",
    lag: int = 0,
    seed: int = 1,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train for so long with slow servers, and print what became of them.

    Parameters
    ----------
    minutes
        How long.
    by
        What slows them: a quota of the kernel's (control groups), or SIGSTOP and SIGCONT.
    lag
        Clocks by which the replicas may lag.
    seed
        Of the lengths of the stops.
    json
        Print only one line of JSON on stdout.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves nothing then, either
    progress(f"{machine()}; {minutes:g} min with a tenth of a core for each process of a server, by {by}")
    asked = "node:1+replicas:1" + (f"+lag:{lag}" if lag else "")
    worker = [sys.executable, str(BENCHMARKS / "false_deaths_worker.py"), str(60.0 * minutes)]
    network, port = ("10.231.11", 29443) if by == "quota" else ("10.231.12", 29445)
    with replicated(asked, worker, network, port) as job:
        job.wait_for("clock 0\n", START_S)
        processes = list(job.processes().values())
        slow = quotas if by == "quota" else stops
        before_s, began_s = used_s(processes), time.monotonic()
        with slow(processes, random.Random(seed)) as num_slowed:
            wait_while_training(job, 60.0 * minutes)
            took_s = time.monotonic() - began_s
            share = (used_s(processes) - before_s) / took_s / len(processes)
            num_gone = sum(not process.is_running() for process in processes)
            num_changes = job.num_changes()
            counted = num_slowed()
        job.end(END_S)
        found = {
            "name": "false_deaths",
            "machine": machine(),
            "by": by,
            "servers": asked,
            "minutes": took_s / 60.0,
            "processes": len(processes),
            "false_deaths": num_changes + num_gone,
            "core_share": share,
            "times_slowed": counted,
            "steps": [int(line.split()[-1]) for line in job.lines if "steps " in line],
        }
    if json:
        print_json(found)
    else:
        for name, value in found.items():
            progress(f"{name}: {value}")
    return 1 if num_changes + num_gone else 0


def wait_while_training(job: ReplicatedJob, seconds: float) -> None:
    """Block for so long, or until a worker has ended, which fails."""
    deadline_s = time.monotonic() + seconds
    while (left_s := deadline_s - time.monotonic()) > 0:
        with suppress(psutil.TimeoutExpired):
            psutil.Process(job.workers[0].pid).wait(min(left_s, 1.0))
        if any(worker.poll() for worker in job.workers):
            job.end(END_S)


def used_s(processes: Sequence[psutil.Process]) -> float:
    """Return the processor time that processes have used."""
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(each.user + each.system for each in times)


@contextmanager
def quotas(processes: Sequence[psutil.Process], _chance: random.Random) -> Iterator[Callable[[], int]]:
    """Give each process its share in every period of the kernel's; yields what counts the periods that ended early."""
    with ExitStack() as exit_:
        groups = [exit_.enter_context(quota(process)) for process in processes]

        def num_slowed() -> int:
            lines = [line.split() for group in groups for line in (group / "cpu.stat").read_text().splitlines()]
            return sum(int(line[1]) for line in lines if line[0] == "nr_throttled")

        yield num_slowed


@contextmanager
def quota(process: psutil.Process) -> Iterator[Path]:
    """Keep a process in a control group of its own; it is in the topmost one afterwards."""
    is_first = (CONTROLLER / "cpu.cfs_quota_us").exists()
    top = CONTROLLER if is_first else VERSION_2
    group = top / f"paceline-{process.pid}"
    group.mkdir()
    try:
        period_us, share_us = int(1e6 * PERIOD_S), int(1e6 * PERIOD_S * SHARE)
        if is_first:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(share_us))
        else:
            (group / "cpu.max").write_text(f"{share_us} {period_us}")
        (group / "cgroup.procs").write_text(str(process.pid))
        yield group
    finally:
        with suppress(OSError):  # it has ended
            (top / "cgroup.procs").write_text(str(process.pid))
        group.rmdir()


@contextmanager
def stops(processes: Sequence[psutil.Process], chance: random.Random) -> Iterator[Callable[[], int]]:
    """Stop each process for most of every turn, of any length; yields what counts the stops."""
    ended = threading.Event()
    counts = [0] * len(processes)

    def stop_again(place: int, chance: random.Random) -> None:
        while not ended.is_set():
            turn_s = STOPS_S[0] * (STOPS_S[1] / STOPS_S[0]) ** chance.random()
            with suppress(psutil.NoSuchProcess):
                processes[place].send_signal(signal.SIGSTOP)
                counts[place] += 1
                ended.wait(turn_s * (1.0 - SHARE))
                processes[place].send_signal(signal.SIGCONT)
            ended.wait(turn_s * SHARE)

    threads = [
        threading.Thread(target=stop_again, args=(place, random.Random(chance.random())))
        for place in range(len(processes))
    ]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(counts)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    sys.exit(app())
