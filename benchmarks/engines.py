"""The digits example, unchanged, under every engine that is here: what it learns, to the last digit, and in what time.

    python benchmarks/engines.py [--workers 4] [--epochs 6] [--json]

`identical` is true where all engines come to the same loss and the same accuracy under bsp. An engine that is not here
is named with the reason. A Slurm of one node is started for this, and torchrun counts two nodes on this machine.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from measuring import machine, print_json, progress

import paceline.tools.demo.digits
from paceline.observe.runs import read_run
from paceline.tools.demo.command import check_extras, write_digits

ROOT: Final = Path(__file__).resolve().parents[1]
SCRIPT: Final = Path(paceline.tools.demo.digits.__file__)
TIMEOUT_S: Final = 300.0
RUN: Final = (sys.executable, "-m", "paceline", "run", "--quiet")
TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run")


class NotHereError(Exception):
    """This machine does not have what an engine needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job runs: how many workers it has, a folder of its own, and the script with its arguments."""

    num_workers: int
    folder: Path
    script: tuple[str, ...]

    def run(self, *commands: tuple[str, ...], variables: Mapping[str, str] | None = None) -> None:
        """Run commands side by side, the script behind each, to their end; raises when one of them fails."""
        kept = {"PACELINE_RUN_DIR": str(self.folder), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **kept, **(variables or {})}
        with ExitStack() as running:
            processes = [
                running.enter_context(subprocess.Popen([*command, *self.script], env=environment, stdout=sys.stderr))
                for command in commands
            ]
            try:
                codes = [process.wait(TIMEOUT_S) for process in processes]
            finally:
                for process in processes:
                    process.kill()
        if any(codes):
            raise RuntimeError(f"{commands[0]} ended with exit codes {codes}")


def local(place: Place) -> None:
    """Run it by `paceline run`."""
    place.run((*RUN, "-n", str(place.num_workers), "--run-dir", str(place.folder / "run")))


def torchrun(place: Place) -> None:
    """Run it as two nodes, both on this machine."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    each = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(place.num_workers // 2), *meeting, "--node-rank")
    place.run(*((*each, str(node)) for node in range(2)))


def mpirun(place: Place) -> None:
    """Run it by Open MPI."""
    if shutil.which("mpirun") is None:
        raise NotHereError("there is no mpirun: install Open MPI")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ("mpirun", "-n", str(place.num_workers), "--oversubscribe", "--bind-to", "none", sys.executable)
    place.run(command, variables=root)


def slurm(place: Place) -> None:
    """Run it by a Slurm of one node, started as the tests do."""
    import pytest
    from tests.launch.slurm import slurm as started

    with ExitStack() as running:
        folder = Path(running.enter_context(TemporaryDirectory()))
        try:
            environment = running.enter_context(started(folder))
        except pytest.skip.Exception as error:
            raise NotHereError(str(error)) from error
        place.run(("srun", "-n", str(place.num_workers), sys.executable), variables=environment)


def ray(place: Place) -> None:
    """Run it on a Ray cluster of this machine alone."""
    if find_spec("ray") is None:
        raise NotHereError("Ray is not installed: pip install 'paceline[ray]'")
    place.run((*RUN, "--engine", "ray", "-n", str(place.num_workers), "--run-dir", str(place.folder / "run")))


ENGINES: Final[tuple[Callable[[Place], None], ...]] = (local, torchrun, mpirun, slurm, ray)


def measure(engine: Callable[[Place], None], script: tuple[str, ...], num_workers: int) -> dict[str, object]:
    """Run one engine; return what is printed of it."""
    progress(f"{engine.__name__} ...")
    with TemporaryDirectory() as folder:
        place = Place(num_workers, Path(folder), script)
        begin_s = time.perf_counter()
        try:
            engine(place)
        except NotHereError as error:
            return {"not here": str(error)}
        seconds = time.perf_counter() - begin_s
        [run_dir] = (path.parent for path in Path(folder).glob("*/trace"))
        [last] = read_run(run_dir).evaluations
        return {"accuracy": repr(last.accuracy), "loss": repr(last.loss), "seconds": seconds}


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run all engines; return what is printed as JSON."""
    check_extras()
    with TemporaryDirectory() as folder:
        data = Path(folder) / "digits.npz"
        write_digits(data, seed=0)
        script = (str(SCRIPT), str(data), "--compute-ms", "0", "--epochs", str(options.epochs))
        found = {engine.__name__: measure(engine, script, options.workers) for engine in ENGINES}
    learnt = {(result["loss"], result["accuracy"]) for result in found.values() if "loss" in result}
    return {"name": "engines", "workers": options.workers, "identical": len(learnt) == 1, **found}


def main() -> None:
    """Answer the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="an even number")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    progress(machine())
    result = run(options)
    if options.json:
        print_json(result)
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
