"""The dense step beside a peer's: push a gradient on every worker, update with momentum SGD, pull the values (bsp).

    python benchmarks/dense.py --peer ddp --workers 2

Both sides are alive all the time and take turns; in each round both take one step on the same gradients.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import work
from cyclopts import App, Parameter
from measuring import NUM_CORES, Copier, Sample, machine, print_json, progress
from turns import BENCHMARKS, PlayFailed, Side, Stage

Peer = Literal["ddp", "rpc", "ray", "ray-arrays", "tf", "torchft"]
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
NUM_WARM_UP: Final = 3
TOLERANCE: Final = 1e-5  # of the values: they are of size 1, and the sides add the gradients in different orders


@dataclass(frozen=True, slots=True)
class PeerProgram:
    """A peer's program, what it is in words, and whether it needs an environment of its own."""

    title: str
    script: str
    environment: str | None  # of its own, by name
    options: tuple[str, ...] = ()


PEERS: Final[dict[str, PeerProgram]] = {
    "ddp": PeerProgram("DDP over Gloo", "ddp_gloo.py", None),
    "rpc": PeerProgram("torch.distributed.rpc parameter server", "rpc_server.py", None),
    "ray": PeerProgram("Ray actor parameter server", "ray_actors.py", "ray"),
    "ray-arrays": PeerProgram("Ray actors, arrays both ways", "ray_actors.py", "ray", ("arrays",)),
    "tf": PeerProgram("TensorFlow ParameterServerStrategy", "tf_strategy.py", "tf"),
    "torchft": PeerProgram("torchft ParameterServer", "torchft_server.py", "torchft"),
}

app = App(name="dense.py", help="Measure the dense step side by side with a peer.", help_format="plaintext")


@dataclass(slots=True)
class Rounds:
    """What was measured, one number a round."""

    ours_s: list[float]
    peer_s: list[float]
    copy_rate: list[float]  # bytes read and written in a second

    @property
    def ratio(self) -> Sample:
        """How many times the peer's step takes as long as ours."""
        return Sample.of([peer / ours for ours, peer in zip(self.ours_s, self.peer_s, strict=True)])


@app.default
def dense(
    *,
    peer: Peer = "ddp",
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    parameters: int = 25_000_000,
    rounds: int = 15,
    transport: Literal["shm", "tcp"] = "shm",
    nonfinite: Literal["ignore", "reject"] = "ignore",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Take steps of both sides in turn; print the ratio, its spread and the floor.

    Parameters
    ----------
    peer
        Who to compare with; ray, tf and torchft need their own environment, made by benchmarks/peers/setup.py.
    workers
        Number of workers on each side.
    parameters
        Number of float32 parameters.
    rounds
        Number of measured rounds, after a few to warm up.
    transport
        What Paceline's own processes talk over.
    nonfinite
        Whether Paceline looks for NaN and infinity in every gradient first (reject, its default), or as the peers do
        applies what comes (ignore): the same work.
    json
        Print only one line of JSON on stdout.
    """
    python = peer_python(peer)
    if python is None:
        print(
            f"{peer} is not installed here: run python benchmarks/peers/setup.py {PEERS[peer].environment}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        with Stage() as stage:
            progress(f"Starting {workers} workers of Paceline and of {PEERS[peer].title}, {parameters:,} parameters")
            ours = stage.start("paceline", our_command(workers, parameters, transport, nonfinite), workers)
            theirs = stage.start(peer, peer_command(peer, python, workers, parameters), num_players(peer, workers))
            measured = take_turns(ours, theirs, parameters, rounds)
            difference = compare(stage.folder, ours, theirs)
            threads = (ours.ask("threads").answers[0], theirs.ask("threads").answers[0])
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return EXIT_FAILURE
    tell(peer, workers, parameters, measured, difference, threads, only_json=json)
    return 0 if difference <= TOLERANCE else EXIT_FAILURE


def take_turns(ours: Side, theirs: Side, num_parameters: int, num_rounds: int) -> Rounds:
    """Have both sides take a step a round, each first in every other one; the warm-up is not counted."""
    copier = Copier(num_parameters)
    measured = Rounds([], [], [])
    for number in range(NUM_WARM_UP + num_rounds):
        for side, times in (pairs := [(ours, measured.ours_s), (theirs, measured.peer_s)])[:: 1 - 2 * (number % 2)]:
            side.ask("prepare", number % work.NUM_GRADIENTS)
            times.append(side.ask("step").seconds)
        measured.copy_rate.append(copier.bytes_per_s())
        if number == NUM_WARM_UP - 1:
            for _, times in pairs:
                times.clear()
            measured.copy_rate.clear()
    return measured


def compare(folder: Path, ours: Side, theirs: Side) -> float:
    """Return the largest difference between any of our workers' values and the peer's; all have taken equal steps."""
    values: list[work.Vector] = []
    for side in (ours, theirs):
        written = folder / f"{side.name}-values"
        written.mkdir()
        side.ask("write", str(written))
        values.extend(work.read(path) for path in sorted(written.iterdir()))
    return max(float(np.abs(each - values[-1]).max()) for each in values)


def floor_bytes(num_workers: int, num_parameters: int) -> int:
    """Return what a step has to move: the gradients read, values and momentum read and written."""
    return (num_workers + 4) * 4 * num_parameters


def tell(
    peer: str,
    num_workers: int,
    num_parameters: int,
    measured: Rounds,
    difference: float,
    threads: tuple[int, int],
    *,
    only_json: bool,
) -> None:
    """Print what was measured."""
    ratio, ours_ms, peer_ms = measured.ratio, _ms(measured.ours_s), _ms(measured.peer_s)
    copy_rate = Sample.of(measured.copy_rate).median
    floor_ms = 1e3 * floor_bytes(num_workers, num_parameters) / copy_rate
    if not only_json:
        print(f"push + update + pull of {num_parameters:,} float32, momentum SGD, {num_workers} workers; {machine()}")
        print(f"  Paceline              {ours_ms.text(' ms')}, {threads[0]} threads a worker")
        print(f"  {PEERS[peer].title:<21} {peer_ms.text(' ms')}, {threads[1]} threads a worker")
        print(f"  ratio                 {ratio.text('x', 2)}")
        print(
            f"  memory floor          {floor_ms:.1f} ms at {copy_rate / 1e9:.1f} GB/s (copied with {NUM_CORES} "
            f"threads); ours is at {floor_ms / ours_ms.median:.2f} of that rate"
        )
        verdict = "equal" if difference <= TOLERANCE else "NOT EQUAL"
        print(f"  results               {verdict}: differ by at most {difference:.1e} (tolerance {TOLERANCE:.0e})")
    print_json(
        {
            "name": f"dense-{peer}",
            "workers": num_workers,
            "parameters": num_parameters,
            "ratio": ratio.median,
            "ratio_spread": [ratio.low, ratio.high],
            "ours_ms": ours_ms.median,
            "ours_spread_ms": [ours_ms.low, ours_ms.high],
            "peer_ms": peer_ms.median,
            "peer_spread_ms": [peer_ms.low, peer_ms.high],
            "floor_ms": floor_ms,
            "floor_fraction": floor_ms / ours_ms.median,
            "difference": difference,
            "tolerance": TOLERANCE,
        }
    )


def our_command(num_workers: int, num_parameters: int, transport: str, nonfinite: str) -> list[str]:
    """Return how Paceline's side is started: as a user would."""
    options = ["-n", str(num_workers), "--transport", transport, "--quiet"]
    script = [str(BENCHMARKS / "dense_worker.py"), "{stage}", str(num_parameters), nonfinite]
    return [sys.executable, "-m", "paceline", "run", *options, *script]


def peer_command(peer: str, python: str, num_workers: int, num_parameters: int) -> list[str]:
    """Return how the peer's side is started."""
    program = PEERS[peer]
    script = str(BENCHMARKS / "peers" / program.script)
    return [python, script, "{stage}", str(num_workers), str(num_parameters), *program.options]


def peer_python(peer: str) -> str | None:
    """Return the interpreter that can run a peer, or None when its environment was not made."""
    name = PEERS[peer].environment
    if name is None:
        return sys.executable
    environment = BENCHMARKS.parent / ".venv-peers" / name
    return str(environment / "bin" / "python") if (environment / "complete").exists() else None


def num_players(peer: str, num_workers: int) -> int:
    """Return how many processes of a peer take turns: one where a coordinator speaks for its workers."""
    return 1 if PEERS[peer].environment in ("ray", "tf") else num_workers


def _ms(seconds: list[float]) -> Sample:
    return Sample.of([1e3 * each for each in seconds])


if __name__ == "__main__":
    sys.exit(app())
