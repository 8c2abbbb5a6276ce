"""Kill servers in the middle of what they do: `python -m tests.faults.kill_campaign --kills 1000 --seed 1`.

A job after the other is trained, of every carrier, policy and number of servers, while its servers are killed by
SIGKILL at the places of `scripts/struck.py`: under `paceline run`, where another process goes on with their memory, and
on two hosts (network namespaces, which take root) with TLS, where servers have replicas. These may lag: then what has
not left for the replica is lost with the server. Every push has a mark, which must be there once, in dense tables and
in rows, and under bsp the bytes are those of a job without a kill. A line is printed for each job, and the number of
kills at the end.
"""

import argparse
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.shaped_network import CannotShapeError, Line, ShapedNetwork
from tests.faults.running import SCRIPTS, SOURCES, running

OUTLIVED: Final = SCRIPTS / "outlived.py"
CARRIERS: Final = "shm", "tcp", "replicas", "lagging"
REPLICATED: Final = {"replicas": "replicas over tls", "lagging": "replicas that lag by two clocks, over tls"}
LAG: Final = "+lag:2"
CONSISTENCIES: Final = "bsp", "ssp:2", "essp:1", "asynchronous"
NUM_WORKERS: Final = 2
MASTER_PORT: Final = "29441"
TIMEOUT_S: Final = 1800.0
MAX_FAILED: Final = 5
LEAST_CLOCKS: Final = 40
CLOCKS_A_KILL: Final = 8, 20  # of a server: with its memory kept, and with a replica, which has to be made anew


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose servers are killed `num_kills` times each; over several hosts they have replicas."""

    carrier: str  # shm, tcp, or one of `REPLICATED`
    consistency: str
    num_servers: int
    num_kills: int
    seed: int = 0

    @property
    def num_clocks(self) -> int:
        return LEAST_CLOCKS + self.num_kills * CLOCKS_A_KILL[self.carrier in REPLICATED]

    def __str__(self) -> str:
        return f"{REPLICATED.get(self.carrier, self.carrier)}, {self.consistency}, {self.num_servers} server(s)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: the digests of the values that workers have seen at its end, its kills, what it wrote."""

    digests: set[str]
    num_kills: int
    output: str


class FailedJobError(Exception):
    """A job has lost or doubled a push, ended with other bytes, not ended well, or not been killed as often."""


def check(job: Job) -> int:
    """Run a job while its servers are killed; return how often they were. Raises FailedJobError."""
    outcome = run(job)
    if outcome.num_kills != job.num_servers * job.num_kills:
        raise FailedJobError(f"{job}, seed {job.seed}: {outcome.num_kills} kills, of {job.num_kills} a server")
    if job.consistency == "bsp":
        calm = undisturbed(job.carrier, job.num_servers, job.num_kills)
        if calm != outcome.digests:
            raise FailedJobError(f"{job}, seed {job.seed}: other bytes than without a kill\n{outcome.output}")
    return outcome.num_kills


@cache
def undisturbed(carrier: str, num_servers: int, num_kills: int) -> set[str]:
    """Return the digest of the values of a job that would be killed so often, and is not."""
    return run(Job(carrier, "bsp", num_servers, num_kills), is_killed=False).digests


def run(job: Job, *, is_killed: bool = True) -> Outcome:
    """Run a job to its end; raises FailedJobError if it does not end well, or a push is not there once."""
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as name:
        folder = Path(name)
        environment = {"STRUCK": f"{folder / 'deaths'}:{job.num_kills if is_killed else 0}:{job.seed}"}
        output = (_run_hosted if job.carrier in REPLICATED else _run_here)(job, folder, environment)
        num_kills = sum(len(path.read_bytes()) for path in folder.glob("deaths-?"))
    lines = [line.split() for line in re.findall(r"^(?:\[worker \d\] )?ended (.*)$", output, re.MULTILINE)]
    if len(lines) != NUM_WORKERS or any(line[:3] != ["0", "0", "0"] for line in lines):
        raise FailedJobError(f"{job}, seed {job.seed}: the job ended otherwise than it should\n{output}")
    return Outcome({line[4] for line in lines}, num_kills, output)


def _run_here(job: Job, folder: Path, environment: dict[str, str]) -> str:
    """Run a job by `paceline run`, where a server's memory outlives it."""
    options = ("-n", str(NUM_WORKERS), "-m", str(job.num_servers), "--transport", job.carrier)
    asked = (job.consistency, str(job.num_clocks))
    with running(
        folder / "run", OUTLIVED, *asked, options=options, environment=environment, timeout_s=TIMEOUT_S
    ) as found:
        found.end(TIMEOUT_S)
    return found.output


def _run_hosted(job: Job, folder: Path, environment: dict[str, str]) -> str:
    """Run a job of a worker on each of two hosts, with servers that have replicas; raises CannotShapeError."""
    with ShapedNetwork([Line()] * NUM_WORKERS, network="10.231.9") as network, ExitStack() as exit_:
        told = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(SOURCES),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": MASTER_PORT,
            "WORLD_SIZE": str(NUM_WORKERS),
            "PACELINE_RUN_DIR": str(folder / "runs"),
            "PACELINE_SERVERS": f"node:{max(job.num_servers // NUM_WORKERS, 1)}+replicas:1"
            f"{LAG if job.carrier == 'lagging' else ''}",
        }
        command = [sys.executable, str(OUTLIVED), job.consistency, str(job.num_clocks)]
        workers: list[subprocess.Popen[str]] = []
        logs = [exit_.enter_context((folder / f"output-{host}").open("w+")) for host in range(NUM_WORKERS)]
        for host, log in enumerate(logs):
            place = os.environ | told | environment | {"RANK": str(host)}
            worker = subprocess.Popen(
                network.command(host, *command), env=place, stdout=log, stderr=subprocess.STDOUT, text=True
            )
            exit_.callback(worker.wait)
            exit_.callback(worker.kill)
            workers.append(worker)
        for worker in workers:
            worker.wait(TIMEOUT_S)
        return "".join((folder / f"output-{host}").read_text() for host in range(NUM_WORKERS))


def jobs(kills_a_job: int, seed: int, carriers: Sequence[str] = CARRIERS) -> Iterator[Job]:
    """Yield jobs without an end: of every kind in turn, in an order and with places of kills by the seed."""
    chance = random.Random(seed)
    for turn in itertools.count():
        kinds = list(itertools.product(carriers, CONSISTENCIES, (1, 2)))
        chance.shuffle(kinds)
        for carrier, consistency, servers in kinds:
            num_servers = servers * NUM_WORKERS if carrier in REPLICATED else servers
            yield Job(carrier, consistency, num_servers, kills_a_job // num_servers, seed * 1000 + turn)


def main() -> int:
    """Kill as often as asked; return 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="how many at least")
    parser.add_argument("--each", type=int, default=60, help="how many in one job")
    parser.add_argument("--seed", type=int, default=1, help="of the order of jobs and of the places of kills")
    parser.add_argument("--carriers", nargs="+", choices=CARRIERS, default=CARRIERS)
    asked = parser.parse_args()
    num_failed, num_kills, left_out = 0, dict.fromkeys(asked.carriers, 0), ""
    for job in jobs(asked.each, asked.seed, asked.carriers):
        if sum(num_kills.values()) >= asked.kills or num_failed == MAX_FAILED:
            break
        if left_out and job.carrier in REPLICATED:
            continue
        try:
            found = check(job)
        except CannotShapeError as problem:
            left_out = f"; none of servers with replicas: {problem}"
        except FailedJobError as problem:
            print(problem, flush=True)
            num_failed += 1
        else:
            num_kills[job.carrier] += found
            total = f"{sum(num_kills.values())} of {asked.kills} kills"
            print(f"{total}: {found} in a job of {job}, seed {job.seed}", flush=True)
    counted = ", ".join(f"{carrier} {count}" for carrier, count in num_kills.items())
    print(f"{sum(num_kills.values())} kills ({counted}){left_out}; jobs that failed: {num_failed}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
