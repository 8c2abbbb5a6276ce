"""Kill readers, relays, servers and the trainer: `python -m tests.faults.kill_readers --kills 1000`.

Jobs publish after each step a model whose elements all are the number of the version, over shm and tcp in turn. Readers
follow it through two relays, of which the second follows the first, and directly. Processes are killed by SIGKILL at
random and started again. No reader may see another value or another digest, and those that are left come to newer
versions. Where only readers and relays are killed, no step of the trainer may take longer than a busy machine explains.
A line is printed for each job with how long its steps took, and at the end the number of kills and of steps that were
held up for longer than another step takes. `--first` (as root) gives the job the cores before all others, so that what
holds it up is readers, not their processor time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from tests.faults.running import Run, running
from tests.versions.held_up import MOST_S, Steps, steps_of

from paceline.errors import DeadlineExceeded
from paceline.job.folders import wait_for
from paceline.job.spec import TOKEN_BYTES, write_private

PUBLISHES: Final = Path(__file__).parents[1] / "versions" / "scripts" / "publishes.py"
PATIENCE_S: Final = 200.0
WRONG: Final = 3  # how a reader ends that has seen what it must not
NUM_RELAYS: Final = 2
MOST_BETWEEN: Final = 29  # versions that readers see between two kills
BESIDE: Final = "reader", "relay"
ALL: Final = *BESIDE, "server", "worker"
REST_S: Final = 0.002  # of the trainer after each version
MOST_WORKERS: Final = 3  # that a job starts again
FIRST: Final = "exec chrt --rr 1"  # before other processes, whatever they do
_FORKS: Final = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How often each kind was killed in one job, and the steps of its last worker."""

    killed: Counter[str]
    steps: Steps


class FailedReadersError(Exception):
    """A reader has seen a wrong byte or has not come to newer versions, or the trainer was held up."""


def read(places: list[str], token: str | None, num_read: Any) -> None:
    """Take version after version and check each; the entry of a reader."""
    import paceline

    with paceline.subscribe(places, token=token) as reader:
        while True:
            with reader.wait(timeout_s=PATIENCE_S) as version:
                values = {bound for tensor in version.values() for bound in (tensor.min().item(), tensor.max().item())}
                if values != {float(version.number)} or not version.verify():
                    os._exit(WRONG)
            num_read.value += 1


def relay(told: list[str]) -> None:
    """Run `paceline relay`; the entry of a relay."""
    from paceline.cli import answer

    sys.exit(answer(["relay", *told]))


@dataclass(slots=True)
class Reader:
    """A reader process, and how many versions it has seen."""

    process: Any
    num_read: Any


class Readers:
    """The readers and relays of one job, which are started again when they are killed."""

    def __init__(self, folder: Path, num_readers: int) -> None:
        self._folder = folder / "run"
        self._token = folder / "relay.token"
        write_private(self._token, secrets.token_bytes(TOKEN_BYTES))
        self._ports = [free_port() for _ in range(NUM_RELAYS)]
        self.relays: list[Any] = [self._relay(index) for index in range(NUM_RELAYS)]
        self.readers = [self._reader(index) for index in range(num_readers)]

    def kill(self, kind: str, rng: random.Random) -> None:
        """Kill a reader or a relay, and start another one in its place."""
        if kind == "relay":
            index = rng.randrange(NUM_RELAYS)
            _kill(self.relays[index])
            self.relays[index] = self._relay(index)
        else:
            index = rng.randrange(len(self.readers))
            self.check()
            _kill(self.readers[index].process)
            self.readers[index] = self._reader(index)

    def check(self) -> None:
        """Raise FailedReadersError if one has ended by itself."""
        for reader in self.readers:
            if reader.process.exitcode is not None:
                what = "saw a wrong byte" if reader.process.exitcode == WRONG else "ended"
                raise FailedReadersError(f"a reader {what}, with exit code {reader.process.exitcode}")

    def wait_progress(self) -> None:
        """Wait until each reader has seen another version."""
        before = [reader.num_read.value for reader in self.readers]

        def progressed() -> bool | None:
            self.check()
            return all(reader.num_read.value > was for reader, was in zip(self.readers, before, strict=True)) or None

        wait_for(progressed, PATIENCE_S, lambda: "readers came to no newer version")

    def wait_read(self, num: int) -> None:
        """Wait until the readers have seen so many versions more, all together: some moment for a kill."""
        until = num + sum(reader.num_read.value for reader in self.readers)

        def came() -> bool | None:
            self.check()
            return sum(reader.num_read.value for reader in self.readers) >= until or None

        wait_for(came, PATIENCE_S, lambda: "readers came to no newer version")

    def close(self) -> None:
        """End all of them."""
        for process in (*(reader.process for reader in self.readers), *self.relays):
            _kill(process)

    def _relay(self, index: int) -> Any:
        upstream = [f"paceline://127.0.0.1:{port}" for port in self._ports[:index]] + [str(self._folder)]
        told = [*upstream, "--listen", f"127.0.0.1:{self._ports[index]}", "--token", str(self._token)]
        return _start(relay, told)

    def _reader(self, index: int) -> Reader:
        ports = self._ports if index % 2 else self._ports[::-1]
        ways = [[f"paceline://127.0.0.1:{port}" for port in ports], [f"paceline://127.0.0.1:{ports[0]}"], []]
        places = ways[index % 3]
        num_read = _FORKS.Value("q", 0)
        token = str(self._token) if places else None
        return Reader(_start(read, [*places, str(self._folder)], token, num_read), num_read)


def _start(entry: Any, *told: object) -> Any:
    process = _FORKS.Process(target=entry, args=told, daemon=True)
    process.start()
    return process


def _kill(process: Any) -> None:
    process.kill()
    process.join()


def free_port() -> int:
    """Return a port of this machine at which nothing listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def kill_worker(run: Run) -> None:
    """Kill the worker of a job, when it has one."""

    def found() -> int | None:
        for pid in run.family():
            with suppress(psutil.Error):
                if "paceline.launch.worker" in psutil.Process(pid).cmdline():
                    return pid
        return None

    os.kill(wait_for(found, PATIENCE_S, lambda: "the job has no worker"), signal.SIGKILL)


@contextmanager
def publishing(folder: Path, transport: str, rest_s: float, wrap: str) -> Iterator[Run]:
    """Run a job that publishes after each step, and then rests so long; `wrap` as for `running`."""
    end = folder / "end"
    options = ("-n", "1", "-m", "2", "--transport", transport, "--on-crash", "restart")
    told = str(end), str(rest_s)
    with running(folder / "run", PUBLISHES, *told, options=options, wrap=wrap, timeout_s=PATIENCE_S) as run:
        try:
            yield run
        finally:
            end.touch()
        if run.end(PATIENCE_S):
            raise FailedReadersError(f"the job ended otherwise than it should\n{run.output}")


def kill_in_a_job(
    transport: str,
    kinds: tuple[str, ...],
    num_kills: int,
    seed: int,
    num_readers: int = 6,
    most_between: int = MOST_BETWEEN,
    rest_s: float = REST_S,
    wrap: str = "",
) -> Outcome:
    """Kill so often in one job. Raises FailedReadersError."""
    rng, killed, servers = random.Random(seed), Counter[str](), list[int]()
    _FORKS.set_forkserver_preload(["paceline.versions.subscription", "paceline.versions.relay", "paceline.tools.relay"])
    with tempfile.TemporaryDirectory(prefix="paceline-readers-") as name:
        folder = Path(name)
        with publishing(folder, transport, rest_s, wrap) as run:
            readers = Readers(folder, num_readers)
            try:
                readers.wait_progress()
                for _ in range(num_kills):
                    readers.wait_read(rng.randint(0, most_between))  # so that a kill meets any moment
                    may = [each for each in kinds if each != "worker" or killed["worker"] < MOST_WORKERS]
                    kind = rng.choice(may)
                    if kind == "server":
                        servers.append(run.wait_for_server(rng.randrange(2), but=servers))
                        os.kill(servers[-1], signal.SIGKILL)
                    elif kind == "worker":
                        kill_worker(run)
                    else:
                        readers.kill(kind, rng)
                    killed[kind] += 1
                readers.wait_progress()
            finally:
                readers.close()
    (steps,) = steps_of(run)
    if set(kinds) <= set(BESIDE) and steps.longest_s > MOST_S:
        raise FailedReadersError(f"the trainer was held up for {steps.longest_s:.1f} s")
    return Outcome(killed, steps)


def main() -> int:
    """Kill as often as asked; return 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="how many at least")
    parser.add_argument("--each", type=int, default=50, help="how many in one job")
    parser.add_argument("--readers", type=int, default=6, help="at once")
    parser.add_argument("--only", choices=ALL, help="kill nothing else; by default readers and relays, or all, in turn")
    parser.add_argument("--between", type=int, default=MOST_BETWEEN, help="versions seen between two kills, at most")
    parser.add_argument("--rest", type=float, default=REST_S, help="seconds of the trainer between two versions")
    parser.add_argument("--first", action="store_true", help="give the job the cores before all others; as root")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    wrap = FIRST if asked.first else ""
    total, num_steps, num_held_up, num_failed, turn = Counter[str](), 0, 0, 0, 0
    while total.total() < asked.kills and num_failed < 5:
        transport, kinds = ("shm", "tcp")[turn % 2], (BESIDE, ALL)[turn // 2 % 2]
        kinds = kinds if asked.only is None else (asked.only,)
        seed, turn = 1000 * asked.seed + turn, turn + 1
        try:
            found = kill_in_a_job(transport, kinds, asked.each, seed, asked.readers, asked.between, asked.rest, wrap)
        except (FailedReadersError, DeadlineExceeded, AssertionError) as problem:
            print(f"{transport}, seed {seed}: {problem}", flush=True)
            num_failed += 1
        else:
            steps = found.steps
            total += found.killed
            num_steps, num_held_up = num_steps + steps.num, num_held_up + steps.num_held_up
            print(
                f"{total.total()} of {asked.kills} kills: {dict(found.killed)} over {transport}, seed {seed}; "
                f"{steps.num} steps of {1000 * steps.usual_s:.1f} ms, the longest {1000 * steps.longest_s:.1f} ms",
                flush=True,
            )
    print(f"{num_held_up} of {num_steps} steps held up")
    print(f"{total.total()} kills ({dict(total)}); jobs that failed: {num_failed}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
