"""Whether the verdict on a run names what holds it up: faults are put into real jobs, and the verdict is read.

    python benchmarks/culprit.py [--only load,gc] [--steps 1000] [--json]

Three workers and a server take equal steps of 55 ms under bsp; from clock 15 on there is a fault. It is named if the
verdict of `paceline top` is of the right kind and names the right process, and in time if that is within ten steps, as
clocks of the worker that is furthest. Any verdict before the fault is a false one, and so is any in the healthy run.

Needs two cores. The full disk needs root, for a file system of its own; without it, it is left out.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from culprit_worker import AT
from measuring import machine, print_json, progress

from paceline.errors import UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.spec import ClusterSpec
from paceline.observe.progress import RunView
from paceline.observe.verdict import RunVerdict

WORKER: Final = Path(__file__).with_name("culprit_worker.py")
VICTIM: Final = 1
IN_TIME: Final = 10  # clocks
PATIENCE_S: Final = 30.0  # until a fault is named, or is not
START_S: Final = 90.0
LOOK_S: Final = 0.05
THIN_BYTES_PER_S: Final = 3e6
STALL_S: Final = 0.2  # until TCP sends again what was lost
LOSS: Final = 0.2  # of pieces
PIECE: Final = 1 << 15
DISK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Expected:
    """What has to be said of a fault.

    Args:
        kinds: of the verdict.
        subject: the process that it names, "" where it is none.
        cause: text that is in the verdict.
        relayed: whether the connections of the victim go through a relay.
    """

    kinds: tuple[str, ...]
    subject: str
    cause: str = ""
    relayed: bool = False

    def fits(self, verdict: RunVerdict) -> bool:
        """Return whether a verdict says it."""
        return verdict.kind in self.kinds and verdict.subject == self.subject and self.cause in verdict.text


WORKER_1: Final = f"worker {VICTIM}"
FAULTS: Final = {
    "load": Expected(("worker",), WORKER_1, "have its core"),
    "sleeps": Expected(("worker",), WORKER_1, "asleep"),
    "data": Expected(("data",), WORKER_1),
    "memory": Expected(("worker",), WORKER_1, "memory"),
    "gc": Expected(("worker",), WORKER_1, "garbage"),
    "slow_rule": Expected(("server",), "server 0", "apply"),
    "thin_link": Expected(("link",), WORKER_1, relayed=True),
    "lossy_line": Expected(("link",), WORKER_1, relayed=True),
    "hung": Expected(("stopped", "hung"), WORKER_1),
    "killed": Expected(("dead",), WORKER_1),
    "hot_row": Expected(("row",), "row 7"),
    "full_disk": Expected(("disk",), ""),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said of a fault: after how many clocks it was named, None for never, and what else was said before."""

    name: str
    steps: int | None
    said: str
    false: tuple[str, ...]


class Relay:
    """Carries the bytes of connections to a server on this machine, slowly once it is told to."""

    def __init__(self, how: str) -> None:
        """Listen; the address of the server is set later."""
        self._how = how
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.target: Callable[[], tuple[str, int]] | None = None
        self.is_slow = threading.Event()
        self._chance = random.Random(0)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(ConnectionError):
            while True:
                near, _ = self._listener.accept()
                assert self.target is not None
                far = socket.create_connection(self.target())
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while piece := one.recv(PIECE):
                if self.is_slow.is_set():
                    self._hold_up(len(piece))
                other.sendall(piece)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _hold_up(self, num_bytes: int) -> None:
        if self._how == "thin_link":
            time.sleep(num_bytes / THIN_BYTES_PER_S)
        elif self._chance.random() < LOSS:
            time.sleep(STALL_S)

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


@dataclass(slots=True)
class Job:
    """A run that is watched as `paceline top` does."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    view: RunView

    def clocks(self) -> list[int]:
        """Return the clocks of the workers."""
        return [row.clock for row in self.view.rows()]

    def pid(self, role: str, rank: int) -> int:
        """Return the number of a process."""
        return self.view.pids()[role, rank]

    def looks(self, patience_s: float) -> Generator[RunVerdict]:
        """Yield one verdict after the other, for so long; until the run has ended."""
        until_s = time.monotonic() + patience_s
        while time.monotonic() < until_s and self.process.poll() is None:
            self.view.refresh(time.monotonic())
            yield self.view.verdict()
            time.sleep(LOOK_S)


@contextmanager
def running(fault: str, steps: int, relay: Relay | None, run_dir: Path, num_workers: int) -> Generator[Job]:
    """Run the job of a fault, and end it afterwards."""
    command = [sys.executable, "-m", "paceline", "run", "-n", f"{num_workers}", "--quiet", "--no-progress"]
    command += ["--run-dir", str(run_dir), "--on-crash", "continue"]
    command += ["--transport", "shm" if relay is None else "tcp", str(WORKER), "--fault", fault, "--at", f"{AT}"]
    command += ["--steps", f"{steps}", *(["--relay", f"{relay.port}"] if relay is not None else [])]
    if relay is not None:
        relay.target = lambda: address_of(run_dir)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield Job(process, run_dir, RunView(run_dir / "trace"))
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()


def address_of(run_dir: Path) -> tuple[str, int]:
    """Return the address of the server of a run, once it is known."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        with suppress(UsageError):
            addresses = ClusterSpec.read(run_dir / CLUSTER_NAME).addresses
            if addresses:
                host, _, port = addresses[0].removeprefix("tcp://").rpartition(":")
                return host, int(port)
        time.sleep(LOOK_S)
    raise SystemExit("the server of the run does not listen")


def strike(fault: str, job: Job, relay: Relay | None, stack: ExitStack) -> None:
    """Let a fault begin that comes from outside of the victim."""
    if relay is not None:
        relay.is_slow.set()
    elif fault == "hung":
        os.kill(job.pid("worker", VICTIM), signal.SIGSTOP)
        stack.callback(os.kill, job.pid("worker", VICTIM), signal.SIGCONT)
    elif fault == "killed":
        os.kill(job.pid("worker", VICTIM), signal.SIGKILL)
    elif fault == "full_disk":
        with suppress(OSError), (job.run_dir / "filling").open("wb") as file:
            while True:
                file.write(b"\0" * 4096)
                file.flush()


def try_fault(fault: str, num_workers: int) -> Outcome:
    """Put a fault into a job and read the verdicts."""
    expected, false = FAULTS[fault], list[str]()
    with ExitStack() as stack:
        relay = Relay(fault) if expected.relayed else None
        if relay is not None:
            stack.callback(relay.close)
        run_dir = stack.enter_context(folder(fault))
        job = stack.enter_context(running(fault, 10_000, relay, run_dir, num_workers))
        for verdict in job.looks(START_S):
            if not verdict.is_healthy:
                false.append(verdict.text)
            if min(job.clocks(), default=0) >= AT:
                break
        else:
            told = b"" if job.process.stderr is None or job.process.poll() is None else job.process.stderr.read()
            raise SystemExit(f"the job of '{fault}' did not come to clock {AT}: {told.decode()}")
        began = max(job.clocks())
        strike(fault, job, relay, stack)
        said = ""
        for verdict in job.looks(PATIENCE_S):
            said = verdict.text
            if expected.fits(verdict):
                return Outcome(fault, max(job.clocks()) - began, said, tuple(dict.fromkeys(false)))
    return Outcome(fault, None, said, tuple(dict.fromkeys(false)))


@contextmanager
def folder(fault: str) -> Generator[Path]:
    """Have a new folder for a run; that of the full disk is a small file system."""
    with tempfile.TemporaryDirectory(prefix="culprit-") as made:
        path = Path(made) / "run"
        path.mkdir()
        if fault != "full_disk":
            yield path
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(path)], check=True)
        try:
            yield path
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def healthy(steps: int, num_workers: int) -> tuple[int, list[str]]:
    """Watch a job without a fault; return how many steps it took and the verdicts that there were."""
    with folder("healthy") as run_dir, running("healthy", steps, None, run_dir, num_workers) as job:
        false, most = list[str](), 0
        for verdict in job.looks(START_S + steps * 0.5):
            most = max(most, min(job.clocks(), default=0))
            if not verdict.is_healthy and most < steps - IN_TIME:  # workers that are done leave one by one
                false.append(verdict.text)
        return most, false


def chosen(only: str) -> Sequence[str]:
    """Return the names of the faults to try."""
    names = [name for name in only.split(",") if name] or list(FAULTS)
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise SystemExit(f"no fault is called {unknown[0]}; there are {', '.join(FAULTS)}")
    return [name for name in names if name != "full_disk" or os.geteuid() == 0]


def main() -> None:
    """Try the faults, watch a healthy run, and print what was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of faults, by commas (default all)")
    parser.add_argument("--steps", type=int, default=1000, help="of the healthy run; 0 for none (default 1000)")
    parser.add_argument("--workers", type=int, default=3, help="number of workers (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for name in chosen(options.only):
        outcome = try_fault(name, options.workers)
        outcomes.append(outcome)
        after = "not named" if outcome.steps is None else f"named after {outcome.steps} steps"
        progress(f"{name:12} {after}: {outcome.said}")
        for text in outcome.false:
            progress(f"{'':12} before it: {text}")
    steps, false = healthy(options.steps, options.workers) if options.steps else (0, [])
    for text in dict.fromkeys(false):
        progress(f"healthy      but: {text}")
    in_time = [each for each in outcomes if each.steps is not None and each.steps <= IN_TIME]
    before = sum(len(each.false) for each in outcomes)
    print(f"{len(in_time)} of {len(outcomes)} named within {IN_TIME} steps; {machine()}")
    print(f"{len(set(false))} false verdicts in {steps} healthy steps, {before} before the faults began")
    if options.json:
        print_json(
            {
                "name": "culprit",
                "faults": len(outcomes),
                "named": len(in_time),
                "false_verdicts": len(set(false)),
                "false_before_faults": before,
                "healthy_steps": steps,
                "steps_to_name": {each.name: each.steps for each in outcomes},
            }
        )


if __name__ == "__main__":
    main()
