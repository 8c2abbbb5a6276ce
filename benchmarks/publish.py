"""What publishing costs the trainer, and how soon readers have what it publishes.

    python benchmarks/publish.py [--json] [--readers 2] [--relay] [--elements 4194304] [--rounds 10]

Rounds with and without publishing alternate in one job, so that other work on the machine meets both. Readers are
processes. `processor_ms`: what a version costs all processes of the job, the trainer and its server; other work on the
machine hardly changes it. `visible_ms`: from the call of `publish` until a reader has the whole version, over shared
memory.
`fanout_ratio`: the bytes that leave the server of the trainer over tcp until all readers have one version, in times of
those of the version, as the kernel counts them (`ss`); with `--relay` readers take it from one. `delta_ratio`: the
bytes that a version takes over tcp of which 1 % of bfloat16 elements differ from the one before, in times of the whole.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from measuring import Sample, machine, print_json, progress

import paceline
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.spec import ClusterSpec

HERE: Final = Path(__file__).resolve().parent
PATIENCE_S: Final = 600.0


class Reader:
    """One reader process."""

    def __init__(self, *source: str) -> None:
        self.process: Final = subprocess.Popen(
            [sys.executable, str(HERE / "publish_reader.py"), *source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, word: str) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def answer(self) -> Any:  # noqa: ANN401 - what JSON holds
        """Wait for what came of it."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


@contextmanager
def job(transport: str, rounds: int, elements: int) -> Generator[Path]:
    """Run the trainer, and yield its folder."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "paceline", "run", "-n", "1", "--run-dir", str(run_dir), "--quiet"]
        command += ["--transport", transport, str(HERE / "publish_worker.py"), folder, str(rounds), str(elements)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield Path(folder)
            (Path(folder) / "end").touch()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()


def steps_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Wait until the trainer has done its rounds, and return what they took."""
    until = time.monotonic() + PATIENCE_S
    while not (folder / "steps.json").exists():
        if time.monotonic() > until:
            raise TimeoutError("the trainer did not come to the end of its rounds")
        time.sleep(0.1)
    return json.loads((folder / "steps.json").read_text())


@dataclass(frozen=True, slots=True)
class Cost:
    """What publishing costs: part of a step, and processor time; when readers had versions; how long modules paused."""

    overhead: float
    processor_ms: float
    visible_ms: Sample
    swap_ms: Sample


def measure_steps(num_readers: int, rounds: int, elements: int) -> Cost:
    """Measure a job whose versions are read over shared memory."""
    with job("shm", rounds, elements) as folder:
        readers = [Reader(str(folder / "run")) for _ in range(num_readers)]
        try:
            for reader in readers:
                reader.ask("pull")
            for reader in readers:
                reader.answer()
            for reader in readers:
                reader.ask("follow")
            (folder / "begin").touch()  # else there may be no version left to follow
            found = steps_of(folder)
            came: list[dict[str, float]] = [reader.answer() for reader in readers]
            readers[0].ask("swap")
            pauses: list[float] = readers[0].answer()
        finally:
            for reader in readers:
                reader.close()
    taken, published = found["taken"], found["published"]
    pairs = zip(taken["publishing"], taken["quiet"], strict=True)
    overhead = statistics.median(busy / quiet for busy, quiet in pairs) - 1
    lags = [1e3 * (times[number] - published[number]) for times in came for number in times if number in published]
    spent = found["spent"]
    processor_ms = 1e3 * (spent["publishing"] - spent["quiet"]) / len(published)
    return Cost(overhead, processor_ms, Sample.of(lags), Sample.of([1e3 * pause for pause in pauses]))


def delta_ratio(run_dir: Path) -> float:
    """Return how many bytes the second of two versions takes, in times of those of the first."""
    with paceline.subscribe(run_dir, name="sparse") as reader:
        number = reader.latest().number
        first, second = reader.pull(number - 1), reader.pull(number)
        return second.received_bytes / sum(tensor.nbytes for tensor in first.values())


@contextmanager
def relayed(run_dir: Path) -> Generator[tuple[str, ...]]:
    """Start a relay, and yield what a reader of it is given."""
    command = [sys.executable, "-m", "paceline", "relay", str(run_dir), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], str(run_dir / "token")
    finally:
        process.kill()
        process.wait()


def sent_bytes(run_dir: Path) -> int:
    """Return how many bytes have left the server over connections that are open, as the kernel counts them."""
    (address,) = ClusterSpec.read(run_dir / CLUSTER_NAME).addresses
    command = ["ss", "-tinH", "state", "established", "sport", "=", f":{address.rpartition(':')[2]}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"bytes_sent:(\d+)", said)))


def measure_tcp(num_readers: int, elements: int, *, by_relay: bool) -> tuple[float, float]:
    """Return what leaves the server for one version of all readers, in times of its bytes, and the ratio of a delta."""
    with job("tcp", 1, elements) as folder, ExitStack() as opened:
        (folder / "begin").touch()
        steps_of(folder)
        run_dir = folder / "run"
        ratio = delta_ratio(run_dir)
        before = sent_bytes(run_dir)
        source = opened.enter_context(relayed(run_dir)) if by_relay else (str(run_dir),)
        readers = [Reader(*source) for _ in range(num_readers)]
        for reader in readers:
            opened.callback(reader.close)
            reader.ask("pull")
        answers: list[tuple[str, int, int]] = [tuple(reader.answer()) for reader in readers]
        ((_, received, size),) = set(answers)  # the same digest and bytes, all of them over the network
        if received != size:
            raise AssertionError(f"a reader has received {received} of {size} bytes")
        return (sent_bytes(run_dir) - before) / size, ratio


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--relay", action="store_true")
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    progress(f"publishing {asked.elements} float32 to {asked.readers} readers on {machine()}")
    cost = measure_steps(asked.readers, asked.rounds, asked.elements)
    fanout, delta = measure_tcp(asked.readers, asked.elements, by_relay=asked.relay)
    if asked.json:
        values: dict[str, object] = {
            "name": f"publish {4 * asked.elements >> 20} MiB",
            "readers": asked.readers,
            "relay": asked.relay,
            "trainer_overhead": cost.overhead,
            "processor_ms": cost.processor_ms,
            "visible_ms": cost.visible_ms.median,
            "fanout_ratio": fanout,
            "delta_ratio": delta,
            "swap_ms": cost.swap_ms.median,
        }
        print_json(values)
    else:
        print(f"trainer: {100 * cost.overhead:+.1f} % a step; {cost.processor_ms:.1f} ms of the job's processor time")
        print(f"visible after {cost.visible_ms.text(' ms')}; a forward pass pauses {cost.swap_ms.text(' ms', 3)}")
        how = "by a relay" if asked.relay else "each from the server"
        print(f"{asked.readers} readers over tcp, {how}: {fanout:.2f} x the bytes of a version leave the server")
        print(f"a version of which 1 % of bfloat16 elements changed takes {100 * delta:.1f} % of its bytes")


if __name__ == "__main__":
    main()
