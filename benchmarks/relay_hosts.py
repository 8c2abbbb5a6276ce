"""How soon a version is on many machines when each takes it from the one before, on lines of a limited rate.

    python benchmarks/relay_hosts.py [--json] [--readers 8] [--megabytes 16] [--mbps 100] [--rounds 3] [--compress]

Each machine is a network namespace with a line of its own. The first trains and publishes, over `paceline relay`; on
each other one is a relay, which follows that of the machine before, and a reader of it. `one_s`: until the reader of
the second machine has a version, none of whose numbers the one before had, as a step of Adam was made; `last_s`: until
all readers have it. `ratio` is of these two. As a floor, the bytes of a version leave at the rate of the line in
`line_s`. With `--compress` what has changed is compressed on each line. Takes root.
"""

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from measuring import machine, print_json, progress
from shaped_network import Line, ShapedNetwork

from paceline.job.spec import TOKEN_BYTES, write_private

HERE: Final = Path(__file__).resolve().parent
PORT: Final = 7710
PATIENCE_S: Final = 120.0
PACELINE: Final = (sys.executable, "-m", "paceline")


@contextmanager
def process(command: Sequence[str]) -> Generator["subprocess.Popen[str]"]:
    """Run a command whose output is read; afterwards it is gone."""
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.terminate()  # which ends what it has started, too
        try:
            started.wait(PATIENCE_S)
        finally:
            started.kill()


def line_of(started: "subprocess.Popen[str]") -> str:
    """Wait for the next line of a process's output."""
    assert started.stdout is not None
    said = started.stdout.readline()
    if not said:
        raise RuntimeError(f"{started.args} has ended with {started.wait()}")
    return said


class Machines:
    """The machines: one that publishes, and readers behind relays; a context manager."""

    def __init__(self, num_readers: int, megabytes: int, mbps: float, *, compress: bool) -> None:
        self._compress = compress
        self._exit = ExitStack()
        self._folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        self._network = self._exit.enter_context(ShapedNetwork([Line(mbps, mbps)] * (1 + num_readers)))
        self._token = self._folder / "relay.token"
        self._num_versions = 0
        write_private(self._token, secrets.token_bytes(TOKEN_BYTES))
        with self._exit.pop_all() as opened:
            self._publisher = opened.enter_context(process(self._publishing(megabytes)))
            line_of(self._publisher)
            self._relay(opened, 0, str(self._folder / "run"))
            self._readers = [self._reader(opened, host) for host in range(1, 1 + num_readers)]
            self._exit = opened.pop_all()

    def __enter__(self) -> "Machines":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all of them."""
        self._exit.close()

    def publish(self) -> list[float]:
        """Publish a version; return when each reader had it, in seconds after the call."""
        self._num_versions += 1
        (self._folder / f"publish-{self._num_versions}").touch()
        began_s = float(line_of(self._publisher).split()[-1])  # after the name of the worker
        came = [json.loads(line_of(reader)) for reader in self._readers]
        if len({digest for digest, _ in came}) != 1:
            raise RuntimeError("readers have got several versions")
        return [at_s - began_s for _, at_s in came]

    def _address(self, host: int) -> str:
        return f"{self._network.address(host)}:{PORT}"

    def _publishing(self, megabytes: int) -> list[str]:
        options = ("-n", "1", "--transport", "tcp", "--run-dir", str(self._folder / "run"), "--quiet")
        told = (str(HERE / "relay_hosts_worker.py"), str(self._folder), str(megabytes))
        return self._network.command(0, *PACELINE, "run", *options, *told)

    def _relay(self, opened: ExitStack, host: int, source: str) -> None:
        told = (source, "--listen", self._address(host), "--token", str(self._token))
        told += ("--compress",) if self._compress and host else ()
        relay = opened.enter_context(process(self._network.command(host, *PACELINE, "relay", *told)))
        line_of(relay)

    def _reader(self, opened: ExitStack, host: int) -> "subprocess.Popen[str]":
        self._relay(opened, host, f"paceline://{self._address(host - 1)}")
        reads = (sys.executable, str(HERE / "relay_hosts_reader.py"), f"paceline://{self._address(host)}")
        reader = opened.enter_context(process(self._network.command(host, *reads, str(self._token))))
        line_of(reader)
        return reader


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compress", action="store_true")
    asked = parser.parse_args()
    progress(f"{asked.readers} machines at {asked.mbps:g} Mbit/s, each from the one before, on {machine()}")
    with Machines(asked.readers, asked.megabytes, asked.mbps, compress=asked.compress) as machines:
        machines.publish()  # connections are there, and TCP has found its rate
        rounds = [machines.publish() for _ in range(asked.rounds)]
    ones, lasts = [each[0] for each in rounds], [max(each) for each in rounds]
    ratio = statistics.median(last / one for one, last in zip(ones, lasts, strict=True))
    one_s, last_s = statistics.median(ones), statistics.median(lasts)
    line_s = 8 * asked.megabytes * (1 << 20) / (asked.mbps * 1e6)
    if asked.json:
        values: dict[str, object] = {
            "name": f"{asked.megabytes} MiB to {asked.readers} machines at {asked.mbps:g} Mbit/s",
            "readers": asked.readers,
            "compress": asked.compress,
            "one_s": one_s,
            "last_s": last_s,
            "ratio": ratio,
            "line_s": line_s,
        }
        print_json(values)
    else:
        print(f"the first reader has a version after {one_s:.2f} s (the line takes {line_s:.2f} s)")
        print(f"all {asked.readers} have it after {last_s:.2f} s, {ratio:.2f} times as long")


if __name__ == "__main__":
    main()
