"""How much training gets done while processes are killed: `python benchmarks/goodput.py [--every 30,15] [--json]`.

A job of two workers trains undisturbed for a while; then a process of it is killed every so many seconds, a server and
a worker by turns, which are started again (`--on-crash restart`). Told is the goodput: the steps that its workers have
made in that time, in the place of those at the undisturbed rate of the same job. What a kill costs is the time in which
as many steps would have been made as were lost by it; from that follows the goodput at rarer kills, which is computed.
"""

import bisect
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import psutil
from cyclopts import App, Parameter
from goodput_worker import pid_path, steps_path
from measuring import machine, print_json, progress
from turns import BENCHMARKS

NUM_WORKERS: Final = 2
CALM_S: Final = 30.0
RARE_S: Final = 300.0
START_S: Final = 120.0
END_S: Final = 60.0
POLL_S: Final = 0.05

app = App(name="goodput.py", help="Kill processes of a job, and see what it gets done.", help_format="plaintext")


@app.default
def goodput(
    *,
    every: str = "30,15",
    kills: int = 8,
    consistency: str = "bsp",
    seed: int = 1,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Kill, and print how much was done.

    Parameters
    ----------
    every
        Seconds between two kills, several with commas between them; a job for each.
    kills
        How many, in each job.
    consistency
        When updates show.
    seed
        Of the moments of the kills, which are drawn from the second half of each span.
    json
        Print only one line of JSON on stdout.
    """
    progress(f"{machine()}; {kills} kills a job, {consistency}")
    ways: list[dict[str, object]] = []
    for span_s in map(float, every.split(",")):
        share = share_done(span_s, kills, consistency, random.Random(seed))
        cost_s = span_s * (1.0 - share)
        ways.append({"name": f"{span_s:g} s", "goodput": share, "kill_costs_s": cost_s, "kills": kills})
        progress(f"a kill every {span_s:g} s: goodput {share:.3f}, so one costs {cost_s:.2f} s")
        ways[-1]["computed_for_300_s"] = 1.0 - cost_s / RARE_S
    if json:
        print_json({"name": "goodput", "machine": machine(), "ways": ways})
    return 0


def share_done(span_s: float, num_kills: int, consistency: str, chance: random.Random) -> float:
    """Run a job, calm and then with a kill in every span; return its goodput. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(prefix="paceline-goodput-") as name:
        folder = Path(name)
        restarts = ("--on-crash", "restart", "--max-restarts", str(num_kills))
        options = ["-n", str(NUM_WORKERS), "--quiet", *restarts, "--consistency", consistency]
        script = [str(BENCHMARKS / "goodput_worker.py"), name]
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                [sys.executable, "-m", "paceline", "run", *options, *script], stdout=output, stderr=output
            )
        try:
            wait_for_steps(job, folder)
            calm_s = time.monotonic()
            time.sleep(CALM_S)
            began_s = time.monotonic()
            for number in range(num_kills):
                wait_until(began_s + span_s * (number + chance.uniform(0.5, 1.0)))
                os.kill(victim(job, folder, number), signal.SIGKILL)
                wait_until(began_s + span_s * (number + 1))
            ended_s = time.monotonic()
            if job.poll() is not None:
                raise RuntimeError(f"the job ended with code {job.returncode}:\n{(folder / 'output').read_text()}")
        finally:
            end(job)
        rate = num_steps(folder, calm_s, began_s) / (began_s - calm_s)
        return num_steps(folder, began_s, ended_s) / (ended_s - began_s) / rate


def wait_for_steps(job: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Block until all workers step; raises RuntimeError if they do not."""
    deadline_s = time.monotonic() + START_S
    while not all(path.exists() and path.stat().st_size for path in map(steps_path, [folder] * 2, range(NUM_WORKERS))):
        if job.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the workers do not step:\n{(folder / 'output').read_text()}")
        time.sleep(POLL_S)


def wait_until(moment_s: float) -> None:
    """Block until this moment."""
    time.sleep(max(0.0, moment_s - time.monotonic()))


def victim(job: "subprocess.Popen[bytes]", folder: Path, number: int) -> int:
    """Return the process to kill: the server and each of the workers, by turns."""
    if number % 2:
        return int(pid_path(folder, number // 2 % NUM_WORKERS).read_text())
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "paceline.launch.server" in process.cmdline():
                return process.pid
    raise RuntimeError("the job has no server")


def num_steps(folder: Path, start_s: float, stop_s: float) -> int:
    """Return how many steps of workers have ended in this time."""
    moments = [list(map(float, steps_path(folder, rank).read_text().split())) for rank in range(NUM_WORKERS)]
    return sum(bisect.bisect(each, stop_s) - bisect.bisect(each, start_s) for each in moments)


def end(job: "subprocess.Popen[bytes]") -> None:
    """End the job, by its own means if they do."""
    job.terminate()
    try:
        job.wait(END_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


if __name__ == "__main__":
    sys.exit(app())
