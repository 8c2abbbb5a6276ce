"""Programs that are measured side by side: all stay alive, and one at a time computes.

The stage (the benchmark) starts a side as one command; that command's processes, the players, come to the stage's
socket, wait for their turn and do what they are asked. Needs nothing but the standard library, so that a peer can
play from an environment of its own. Every wait has a deadline, and a player whose stage is gone ends by itself.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

BENCHMARKS: Final = Path(__file__).resolve().parent
START_TIMEOUT_S: Final = 300.0
TURN_TIMEOUT_S: Final = 180.0
IDLE_TIMEOUT_S: Final = 1800.0  # of a player between two turns
END_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.2
NUM_LAST_LINES: Final = 25

Act = Callable[[Any], Any]


class PlayFailed(Exception):
    """A side could not be started, failed or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the players of a side did when asked: how long it took from the first start to the last end, and answers."""

    seconds: float
    answers: list[Any]


class Line:
    """A stream socket that carries JSON values, one a line."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._rest = b""

    def say(self, value: object) -> None:
        """Send one value."""
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def hear(self, timeout_s: float) -> Any:  # noqa: ANN401
        """Wait for one value; raises EOFError when the other end is gone, TimeoutError when it stays silent."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            received = self._socket.recv(1 << 16)
            if not received:
                raise EOFError
            self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def leave_session() -> None:
    """Be a session of one's own, as each of Paceline's processes is.

    Linux shares out busy cores by session (autogroup): processes that stay in one would get the share of one.
    """
    if os.getpgrp() != os.getpid():
        os.setsid()


def play(stage: str, rank: int, acts: Mapping[str, Act]) -> None:
    """Be a player: come to the stage and do what is asked until the stage says stop or is gone.

    Args:
        stage: path of the stage's socket.
        rank: number of this player on its side.
        acts: what it can do, by name; each takes one value and returns one, both as JSON has them.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(START_TIMEOUT_S)
    sock.connect(stage)
    line = Line(sock)
    line.say({"rank": rank, "pid": os.getpid()})
    while True:
        try:
            asked = line.hear(IDLE_TIMEOUT_S)
        except EOFError:
            raise SystemExit(1) from None
        if asked is None:
            line.close()
            return
        start = time.monotonic()
        answer = acts[asked["act"]](asked["value"])
        line.say({"start": start, "end": time.monotonic(), "answer": answer})


class Side:
    """One program on the stage: its process, what it started, and the lines to its players, in order of rank."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.lines: list[Line] = []
        self.pids: list[int] = []
        self.process = process
        self._log = log

    def ask(self, act: str, value: object = None, *, timeout_s: float = TURN_TIMEOUT_S) -> Turn:
        """Have all players do something at once; blocks until the last has.

        Raises:
            PlayFailed: a player has ended or has not answered in time.
        """
        try:
            for line in self.lines:
                line.say({"act": act, "value": value})
            replies = [line.hear(timeout_s) for line in self.lines]
        except (OSError, EOFError) as error:
            raise self.failure(f"'{act}' was not answered ({type(error).__name__})") from error
        seconds = max(reply["end"] for reply in replies) - min(reply["start"] for reply in replies)
        return Turn(seconds, [reply["answer"] for reply in replies])

    def failure(self, what: str) -> PlayFailed:
        """Return an error that tells what happened and what the side wrote last."""
        last = self._log.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
        return PlayFailed("\n    ".join([f"{self.name}: {what}; it wrote last:", *last]))

    def end(self) -> None:
        """Tell all players to stop and wait; what has not ended by the deadline is killed."""
        for line in self.lines:
            try:
                line.say(None)
            except OSError:
                continue  # it is gone already
        wait = END_TIMEOUT_S if self.lines else 0.0
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                self.process.wait(wait)
                break
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, number)
                wait = END_TIMEOUT_S
        self.process.wait(END_TIMEOUT_S)
        for line in self.lines:
            line.close()


class Stage:
    """Where sides come to play; a context manager that ends them all."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        self.folder = Path(self._folder.name)
        self._sides: list[Side] = []

    def __enter__(self) -> Self:
        """Return this stage; from now on, SIGTERM ends it in order."""
        self._before = signal.signal(signal.SIGTERM, _end_in_order)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End all sides, also after an error."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is ending already
        for side in self._sides:
            side.end()
        self._folder.cleanup()
        signal.signal(signal.SIGTERM, self._before)

    def start(
        self, name: str, command: Sequence[str], num_players: int, environment: Mapping[str, str] | None = None
    ) -> Side:
        """Start a side and wait for its players. In the command, "{stage}" becomes the path of the socket.

        Raises:
            PlayFailed: it ended, or not all its players came in time.
        """
        path, log = self.folder / f"{name}.sock", self.folder / f"{name}.log"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, log.open("wb") as output:
            listening.bind(str(path))
            listening.listen(num_players)
            process = subprocess.Popen(
                [str(path) if word == "{stage}" else word for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(environment or {}),
                start_new_session=True,
            )
            side = Side(name, process, log)
            self._sides.append(side)
            self._admit(side, listening, num_players)
        return side

    def _admit(self, side: Side, listening: socket.socket, num_players: int) -> None:
        listening.settimeout(POLL_S)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        came: dict[int, tuple[int, Line]] = {}
        while len(came) < num_players:
            if side.process.poll() is not None:
                raise side.failure(f"ended with code {side.process.returncode} before all its players had come")
            if time.monotonic() > deadline_s:
                raise side.failure(f"only players {sorted(came)} of {num_players} came in {START_TIMEOUT_S:g} s")
            try:
                sock, _ = listening.accept()
            except TimeoutError:
                continue
            line = Line(sock)
            hello = line.hear(START_TIMEOUT_S)
            came[hello["rank"]] = (hello["pid"], line)
        side.pids = [came[rank][0] for rank in sorted(came)]
        side.lines = [came[rank][1] for rank in sorted(came)]


def _end_in_order(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return what a side inherits: this process's variables, and where the benchmarks' own modules lie."""
    known = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [known])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}
