"""Both sides of the dense benchmarks: how each is started, how they take turns, and the floor of a step."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
import work
from measuring import Copier, Sample
from turns import BENCHMARKS, Side, Stage

from wire import RawLine

Peer = Literal["torch", "ddp", "rpc", "ray", "ray-arrays", "tf", "torchft"]
NUM_WARM_UP: Final = 3
LEAST_COPIED: Final = 4_000_000  # elements: a copy of fewer is a call, not a rate


@dataclass(frozen=True, slots=True)
class PeerProgram:
    """A peer's program, what it is in words, and whether it needs an environment of its own."""

    title: str
    script: str
    environment: str | None  # of its own, by name
    options: tuple[str, ...] = ()


PEERS: Final[dict[str, PeerProgram]] = {
    "torch": PeerProgram("plain torch, one process", "plain_torch.py", None),
    "ddp": PeerProgram("DDP over Gloo", "ddp_gloo.py", None),
    "rpc": PeerProgram("torch.distributed.rpc parameter server", "rpc_server.py", None),
    "ray": PeerProgram("Ray actor parameter server", "ray_actors.py", "ray"),
    "ray-arrays": PeerProgram("Ray actors, arrays both ways", "ray_actors.py", "ray", ("arrays",)),
    "tf": PeerProgram("TensorFlow ParameterServerStrategy", "tf_strategy.py", "tf"),
    "torchft": PeerProgram("torchft ParameterServer", "torchft_server.py", "torchft"),
}


@dataclass(slots=True)
class Rounds:
    """What was measured, one number a round."""

    ours_s: list[float]
    peer_s: list[float]
    copy_rate: list[float]  # bytes read and written in a second
    line_rate: list[float] = field(default_factory=list[float])  # bytes a second over plain sockets; none over shm

    @property
    def ratio(self) -> Sample:
        """How many times the peer's step takes as long as ours."""
        return Sample.of([peer / ours for ours, peer in zip(self.ours_s, self.peer_s, strict=True)])


@dataclass(frozen=True, slots=True)
class Measured:
    """Both sides at one size.

    Args:
        rounds: seconds of a step of each side in each round.
        difference: largest difference between the values of both sides.
        threads: threads of a worker of each side.
    """

    rounds: Rounds
    difference: float
    threads: tuple[int, int]


def measure(
    peer: Peer,
    num_workers: int,
    num_parameters: int,
    num_rounds: int,
    *,
    python: str = sys.executable,
    transport: str = "shm",
    nonfinite: str = "reject",
    steps_at_once: int | None = None,
) -> Measured:
    """Start Paceline and a peer, and have them take turns. Raises PlayFailed if a process fails."""
    with Stage() as stage:
        ours = stage.start("paceline", our_command(num_workers, num_parameters, transport, nonfinite), num_workers)
        command = peer_command(peer, python, num_workers, num_parameters)
        theirs = stage.start(peer, command, num_players(peer, num_workers))
        line = RawLine(stage, num_workers) if transport == "tcp" else None
        rounds = take_turns(ours, theirs, num_parameters, num_rounds, line, steps_at_once=steps_at_once)
        difference = compare(stage.folder, ours, theirs)
        return Measured(rounds, difference, (ours.ask("threads").answers[0], theirs.ask("threads").answers[0]))


def take_turns(
    ours: Side,
    theirs: Side,
    num_parameters: int,
    num_rounds: int,
    line: RawLine | None = None,
    *,
    steps_at_once: int | None = None,
) -> Rounds:
    """Have both sides take turns, each first in every other round; the warm-up is not counted.

    A turn is one step, timed from its first start to its last end. With `steps_at_once` it is that many steps in a
    row, of which the time within the steps counts, the slowest worker's.
    """
    copier = Copier(max(num_parameters, LEAST_COPIED))
    measured = Rounds([], [], [])
    for number in range(NUM_WARM_UP + num_rounds):
        for side, times in (pairs := [(ours, measured.ours_s), (theirs, measured.peer_s)])[:: 1 - 2 * (number % 2)]:
            if steps_at_once:
                times.append(max(side.ask("steps", steps_at_once).answers) / steps_at_once)
            else:
                side.ask("prepare", number % work.NUM_GRADIENTS)
                times.append(side.ask("step").seconds)
        measured.copy_rate.append(copier.bytes_per_s())
        if line is not None:
            measured.line_rate.append(line.bytes_per_s())
        if number == NUM_WARM_UP - 1:
            for _, times in pairs:
                times.clear()
            measured.copy_rate.clear()
            measured.line_rate.clear()
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


def line_floor_bytes(num_workers: int, num_parameters: int) -> int:
    """Return what a step has to send over a line: a push of each worker, and the values to each."""
    return 2 * num_workers * 4 * num_parameters


def our_command(num_workers: int, num_parameters: int, transport: str, nonfinite: str) -> list[str]:
    """Return how Paceline's side is started: as a user would; one worker alone without a launcher."""
    options = ["-n", str(num_workers), "--transport", transport, "--quiet"]
    script = [str(BENCHMARKS / "dense_worker.py"), "{stage}", str(num_parameters), nonfinite]
    launcher = ["-m", "paceline", "run", *options] if num_workers > 1 else []
    return [sys.executable, *launcher, *script]


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
    return 1 if PEERS[peer].environment in ("ray", "tf") or peer == "torch" else num_workers
