"""What `kill -9` of servers costs: `python benchmarks/kills.py [--kills 20] [--transport shm] [--json]`.

A job of two workers is trained while its servers are killed, one after the other, at any moment; then once more without
kills. Told are the pushes that were lost or counted twice, whether the bytes at the end are the same, how long workers
stood still, and by how much longer a dense step takes because a server may be killed, as a fraction: two jobs that take
turns, of which one is not prepared for it; by default, and where gradients are not looked at for NaN.
"""

import json as json_text
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import psutil
import work
from cyclopts import App, Parameter
from kills_worker import CLOCKS_TOLD
from measuring import end_with_sigterm, machine, percentile, print_json, progress
from replicated_job import NUM_HOSTS, replicated
from turns import BENCHMARKS, Stage

from paceline.job.views import FIRST

TIMEOUT_S: Final = 3600.0
CLOCKS_A_KILL: Final = 40
NUM_WORKERS: Final = 2
NETWORK: Final = "10.231.8"
PORT: Final = 29439
NUM_WARM_UP: Final = 3
Consistency = Literal["bsp", "ssp:2", "asynchronous"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: what each worker says of its marks and steps, and when servers were killed.

    `kills_s` is without the kills of processes that had just come up, which are counted in `num_kills`.
    """

    workers: list[dict[str, object]]
    kills_s: list[float]
    num_kills: int

    def total(self, name: str) -> int:
        """Return the sum of a number over the workers' own views of the marks: the greatest, as all see the same."""
        return max(int(str(worker[name])) for worker in self.workers)

    def median_step_s(self) -> float:
        """Return how long a step takes that no kill falls into."""
        return statistics.median(took for worker in self.workers for _, took in worker["steps"])  # type: ignore[union-attr]

    def stalls_ms(self) -> list[float]:
        """Return for each kill the longest step of any worker that ended from then to the next kill."""
        spans = zip(self.kills_s, [*self.kills_s[1:], float("inf")], strict=True)
        steps = [(began, took) for worker in self.workers for began, took in worker["steps"]]  # type: ignore[union-attr]
        longest = [
            max((took for began, took in steps if start < began + took < stop), default=0.0) for start, stop in spans
        ]
        return [1e3 * took for took in longest]


app = App(name="kills.py", help="Kill servers of a job, and see what it costs.", help_format="plaintext")


@app.default
def kills(
    *,
    kills: int = 20,
    servers: Annotated[int, Parameter(alias="-m")] = 1,
    transport: Literal["shm", "tcp"] = "shm",
    consistency: Consistency = "bsp",
    parameters: int = 25_000_000,
    rounds: int = 15,
    again: float = 0.2,
    seed: int = 1,
    replicas: Annotated[bool, Parameter(negative="")] = False,
    lag: int = 0,
    handovers: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Kill servers and print what it costs.

    Parameters
    ----------
    kills
        How many.
    servers
        Number of servers; each kill takes any of them.
    transport
        Transport between the processes.
    consistency
        When updates show; under bsp the bytes at the end are compared with those of a run without kills.
    parameters
        Of the dense step whose overhead is measured; 0 leaves that out.
    rounds
        Number of rounds of the dense step.
    again
        Share of kills after which the process that goes on is killed, too, as it comes up.
    seed
        Of the moments of the kills.
    replicas
        Kill servers that have replicas, of jobs on two hosts (network namespaces, which takes root), both servers of
        each job once, as no replica is made anew. The overhead is that of the steps of such jobs; of the other options
        only `kills`, `consistency`, `lag` and `seed` count.
    lag
        Clocks by which these replicas may lag.
    handovers
        Have servers with replicas hand over to them, as those of a machine that is taken away do, in place of kills.
    json
        Print only one line of JSON on stdout.
    """
    end_with_sigterm()
    chance = random.Random(seed)
    if replicas or handovers:
        asked = "node:1+replicas:1" + (f"+lag:{lag}" if lag else "")
        ends = "handovers" if handovers else "kills"
        progress(f"{machine()}; {kills} {ends} of servers with replicas, {asked}, {consistency}")
        jobs = range((kills + 1) // NUM_HOSTS)
        killed = [run_hosted(consistency, asked, chance, hands_over=handovers) for _ in jobs]
        calm = run_hosted(consistency, asked)
        plain = run_hosted(consistency, "node:1")
        costs = {"overhead": calm.median_step_s() / plain.median_step_s() - 1.0}
    else:
        options = ["-n", str(NUM_WORKERS), "-m", str(servers), "--transport", transport]
        num_clocks = CLOCKS_A_KILL * (kills + 1)
        progress(f"{machine()}; {kills} kills over {transport}, {consistency}, {servers} server(s)")
        killed = [run_job(options, num_clocks, consistency, kills, chance, again)]
        calm = run_job(options, num_clocks, consistency, 0, chance) if consistency == "bsp" else None
        costs = overheads(parameters, rounds) if parameters else {"overhead": None}
    stalls = sorted(stall for job in killed for stall in job.stalls_ms())
    compared = killed + ([calm] if calm is not None else [])
    found = {
        "name": name_of(replicas=replicas, lag=lag, handovers=handovers),
        "machine": machine(),
        "kills": sum(job.num_kills for job in killed),
        "lost": sum(job.total("lost") for job in killed),
        "doubled": sum(job.total("doubled") for job in killed),
        "stall_p50_ms": statistics.median(stalls),
        "stall_p99_ms": percentile(stalls, 0.99),
        "stalls_ms": stalls,
        "same_bytes": int(len({str(worker["digest"]) for job in compared for worker in job.workers}) == 1)
        if consistency == "bsp"
        else None,
        **costs,
    }
    if json:
        print_json(found)
    else:
        for name, value in found.items():
            progress(f"{name}: {value}")
    return 0 if not (found["lost"] or found["doubled"] or found["same_bytes"] == 0) else 1


def name_of(*, replicas: bool, lag: int, handovers: bool) -> str:
    """Return what the line of a measurement is called."""
    if not replicas and not handovers:
        return "warm memory"
    return ("handovers" if handovers else "replicas") + (" that lag" if lag else "")


def run_job(
    options: list[str], num_clocks: int, consistency: str, num_kills: int, chance: random.Random, again: float = 0.0
) -> Outcome:
    """Run the job to its end while its servers are killed so often; raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as folder:
        command = [sys.executable, "-m", "paceline", "run", *options, str(BENCHMARKS / "kills_worker.py"), folder]
        job = subprocess.Popen(
            [*command, str(num_clocks), consistency], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        lines: list[str] = []
        news = threading.Condition()
        reader = threading.Thread(target=_read, args=(job, lines, news), daemon=True)
        reader.start()
        try:
            moments: list[float] = []
            num_again = 0
            for number in range(num_kills):
                _wait_for_clock(job, lines, news, CLOCKS_A_KILL * number)
                time.sleep(chance.uniform(0.0, 0.1))
                servers = _servers(job)
                moments.append(time.monotonic())
                _is_killed(chance.choice(sorted(servers)))
                if chance.random() < again:
                    while not (new := _servers(job) - servers) and job.poll() is None:
                        time.sleep(0.001)
                    time.sleep(chance.uniform(0.0, 0.05))
                    num_again += sum(map(_is_killed, new))
            code = job.wait(TIMEOUT_S)
        finally:
            job.terminate()
            reader.join(TIMEOUT_S)
        if code:
            raise RuntimeError(f"the job ended with code {code}:\n" + "".join(lines[-30:]))
        told = [json_text.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
        return Outcome(told, moments, len(moments) + num_again)


def run_hosted(
    consistency: str, servers: str, chance: random.Random | None = None, *, hands_over: bool = False
) -> Outcome:
    """Run a job of a worker on each of two hosts to its end; kill each of the two servers at a moment of `chance`.

    Or have it hand over to its replica (`hands_over`). Raises JobFailedError if the job fails, and CannotShapeError
    where there can be no hosts.
    """
    num_clocks = CLOCKS_A_KILL * (1 + NUM_HOSTS)
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as folder:
        script = [sys.executable, str(BENCHMARKS / "kills_worker.py"), folder, str(num_clocks), consistency]
        with replicated(servers, script, NETWORK, PORT) as job:
            moments: list[float] = []
            for rank in () if chance is None else range(NUM_HOSTS):
                job.wait_for(f"clock {CLOCKS_A_KILL * (rank + 1)}\n", TIMEOUT_S)
                time.sleep(chance.uniform(0.0, 0.1))  # type: ignore[union-attr]
                victim = job.processes()[rank, FIRST.head]
                moments.append(time.monotonic())
                if hands_over:
                    job.hand_over(rank)
                else:
                    _is_killed(victim.pid)
            job.end(TIMEOUT_S)
        told = [json_text.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
        return Outcome(told, moments, len(moments))


def _read(job: "subprocess.Popen[str]", lines: list[str], news: threading.Condition) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        with news:
            lines.append(line)
            news.notify_all()


def _wait_for_clock(job: "subprocess.Popen[str]", lines: list[str], news: threading.Condition, clock: int) -> None:
    """Wait until the job has come to a clock; raises RuntimeError if it ends before."""
    word = f"clock {clock // CLOCKS_TOLD * CLOCKS_TOLD}\n"
    with news:
        came = news.wait_for(lambda: any(line.endswith(word) for line in lines) or job.poll() is not None, TIMEOUT_S)
    if not came or job.poll() is not None:
        raise RuntimeError(f"no {word.strip()} came:\n" + "".join(lines[-30:]))


def _servers(job: "subprocess.Popen[str]") -> set[int]:
    """Return the processes of the servers of a job."""
    found: set[int] = set()
    for member in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "paceline.launch.server" in member.cmdline():
                found.add(member.pid)
    return found


def _is_killed(pid: int) -> bool:
    """Kill a process; return whether it was there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def overheads(num_parameters: int, num_rounds: int) -> dict[str, float | None]:
    """Return the overhead by default, where gradients are looked at for NaN, and where they are not."""
    return {
        "overhead": overhead(num_parameters, num_rounds, "reject"),
        "overhead_unchecked": overhead(num_parameters, num_rounds, "ignore"),
    }


def overhead(num_parameters: int, num_rounds: int, nonfinite: str) -> float:
    """Return how many times as long a dense step takes with a server that may be killed, less 1: a median of rounds."""
    with Stage() as stage:
        sides = {}
        for mode in ("stop", "resume"):
            options = ["-n", str(NUM_WORKERS), "--quiet", "--on-server-crash", mode]
            script = [str(BENCHMARKS / "dense_worker.py"), "{stage}", str(num_parameters), nonfinite]
            sides[mode] = stage.start(mode, [sys.executable, "-m", "paceline", "run", *options, *script], NUM_WORKERS)
        times: dict[str, list[float]] = {mode: [] for mode in sides}
        for number in range(NUM_WARM_UP + num_rounds):
            for mode in list(sides)[:: 1 - 2 * (number % 2)]:
                sides[mode].ask("prepare", number % work.NUM_GRADIENTS)
                times[mode].append(sides[mode].ask("step").seconds)
    pairs = zip(times["stop"][NUM_WARM_UP:], times["resume"][NUM_WARM_UP:], strict=True)
    return statistics.median(resume / stop for stop, resume in pairs) - 1.0


if __name__ == "__main__":
    sys.exit(app())
