"""An update rule whose import on a server has that killed, by SIGKILL, in the middle of what it does for its tables.

Each call that changes what outlives the server is a place where it may die, before or after: entries of the journal,
snapshots, numbers of tables, chunks and rows of updates, also as a successor goes on with them. Of a server and its
replica one may die at a time, in the middle of what one tells the other, and of what a new replica is given. `STRUCK`
names a file for each server, with a letter for each death, how many there are to be, and the seed of their places.
To a replica that lags, frames leave when its head waits for them, else by chance or never, and those that have not left
die with the head.
"""

import fcntl
import os
import random
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.job.views import Views
from paceline.server import replica_link
from paceline.server.connections import Connections
from paceline.server.journal import Journal
from paceline.server.node import ServerNode
from paceline.server.replay import Replay
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_messages import CODEC, Pushed
from paceline.transport.base import EMPTY
from paceline.update.lasting import LastingRecord, RowsMemory, SavedTensors, UpdateProgress
from paceline.update.rows.memory import RowMemory

SEND_TIMEOUT_S = 30.0
EARLY, LATE = (1, 40), (200, 500)  # places that a life passes: it dies as it comes up, or has done more than that
PLACES: tuple[tuple[type, str], ...] = (
    (Journal, "append"),
    (Journal, "write_snapshot"),
    (Journal, "note_resumed"),
    (LastingRecord, "commit"),
    (UpdateProgress, "save"),
    (UpdateProgress, "undo"),
    (UpdateProgress, "finish"),
    (SavedTensors, "write"),
    (RowsMemory, "write_ahead"),
    (RowMemory, "write_column"),
)
REPLICATED: tuple[tuple[type, str], ...] = (
    (ReplicaLink, "_send"),
    (ReplicaLink, "_give_all"),
    (Replay, "take"),
    (ServerNode, "_apply"),
    (Connections, "send_worker"),
)


class Fate:
    """Counts the places that this process has passed, and kills it at one."""

    def __init__(self, file: Path, num_deaths: int, seed: int) -> None:
        self.file, self.num_deaths = file, num_deaths
        before = self.deaths()
        chance = random.Random(f"{seed} {len(before)} {file.name} {sys.argv[-1]}")
        # Not early three times in a row: the launcher gives a server up that dies five times without having done more.
        is_early = bool(before) and not before.endswith(b"ee") and chance.random() < 0.3
        self.letter = b"e" if is_early else b"l"
        self.left = chance.randint(*(EARLY if is_early else LATE)) if len(before) < num_deaths else 0

    def deaths(self) -> bytes:
        return self.file.read_bytes() if self.file.exists() else b""

    def pass_place(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.die()

    def die(self) -> None:
        with self.file.open("ab") as deaths:
            deaths.write(self.letter)
        os.kill(os.getpid(), signal.SIGKILL)


class SharedFate(Fate):
    """Of a server and its replica: the second copy has to be whole before either may die, and a new one may always."""

    def __init__(self, file: Path, num_deaths: int, seed: int, views: Views, process: int) -> None:
        super().__init__(file, num_deaths, seed)
        self.process, self.views = process, views
        self.alone = file.with_name(f"{file.name}.alone")  # is there while one copy is
        self.outside = file.with_name(f"{file.name}.outside")  # a byte for each death of a process that was no copy

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Keep the other process of the pair from dying."""
        with self.file.with_name(f"{self.file.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def pass_place(self) -> None:
        self.left -= 1
        if self.left <= 0 and len(self.deaths()) < self.num_deaths:
            with self.deciding():
                view = self.views.newest()
                if view is not None and self.process not in (view.head, view.replica):
                    with self.outside.open("ab") as file:
                        file.write(b".")
                    self.die()
                if not self.alone.exists():
                    self.alone.touch()
                    self.die()

    def num_lost(self) -> int:
        """How many of the processes that have died were a copy."""
        return len(self.deaths()) - (self.outside.stat().st_size if self.outside.exists() else 0)

    def note_repaired(self, num_lost: int) -> None:
        """Let either of the two die from now on, unless one has since so many were lost."""
        with self.deciding():
            if self.num_lost() == num_lost:
                self.alone.unlink(missing_ok=True)


def be_struck(fate: Fate, places: tuple[tuple[type, str], ...]) -> None:
    """Let each of the places kill this process from now on."""

    def around(call: Any) -> Any:
        def wrapped(*args: Any, **named: Any) -> Any:
            fate.pass_place()
            result = call(*args, **named)
            fate.pass_place()
            return result

        return wrapped

    for owner, name in places:
        setattr(owner, name, around(getattr(owner, name)))


class SlowLine:
    """In the place of the send queue to a replica that lags: one frame of 20 lets most of those before it leave."""

    chance = random.Random(os.getpid())

    def __init__(self, connection: Any, *_: Any, **__: Any) -> None:
        self.connection = connection
        self.frames: deque[tuple[bytes, bytes]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self.frames)

    def send(self, header: bytes, body: memoryview = EMPTY, *, last_of: bytes) -> None:
        self.frames.append((header, bytes(body)))
        while self.frames and self.chance.random() < 0.05 * len(self.frames) / 20:
            self.send_next()

    def send_next(self) -> None:
        """Send frames up to the first that is answered."""
        while self.frames:
            header, body = self.frames.popleft()
            self.connection.send(header, memoryview(body), timeout_s=SEND_TIMEOUT_S)
            if not isinstance(CODEC.decode(header), Pushed):
                return

    def close(self) -> None:
        self.frames.clear()
        self.connection.close()


def make_slow() -> None:
    """Have replicas that may lag do so."""
    hear = ReplicaLink._hear

    def wrapped(link: ReplicaLink, timeout_s: float) -> None:
        if timeout_s and isinstance(link._queue, SlowLine):
            link._queue.send_next()
        hear(link, timeout_s)

    setattr(replica_link, "SendQueue", SlowLine)  # noqa: B010 - it is another class
    setattr(ReplicaLink, "_hear", wrapped)  # noqa: B010 - it is final


def watch_repair(fate: SharedFate) -> None:
    """Have the fate of a pair know when there are two copies again."""
    repair = ReplicaLink.repair

    def wrapped(link: ReplicaLink, *args: Any) -> None:
        with fate.deciding():
            was_there, num_lost = link.is_there, fate.num_lost()
        repair(link, *args)
        if link.is_there and not was_there:
            fate.note_repaired(num_lost)

    setattr(ReplicaLink, "repair", wrapped)  # noqa: B010 - it is final


class Fading:
    """Takes steps along a mean of gradients that fades."""

    granularity = "element"

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    def update(self, values: list[Tensor], gradients: list[Tensor | None], hyper: list[Any], groups: list[int]) -> None:
        for index, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            if gradient is not None:
                mean = self.means.setdefault(f"{index}.mean", torch.zeros_like(value)).mul_(0.9).add_(gradient)
                value.sub_(mean, alpha=hyper[groups[index]]["lr"])

    def state(self) -> dict[str, Tensor]:
        return self.means

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.means = {name: tensor.clone() for name, tensor in state.items()}


def begin() -> None:
    """Have this process be struck as the environment says, if it is one of a server."""
    if "STRUCK" not in os.environ:
        return
    file, num_deaths, seed = os.environ["STRUCK"].rsplit(":", 2)
    match [Path(sys.argv[0]).name, *sys.argv[1:]]:
        case ["server.py", _, rank, *_]:
            be_struck(Fate(Path(f"{file}-{rank}"), int(num_deaths), int(seed)), PLACES)
        case ["sidecar.py", run_dir, rank, _, process]:
            views = Views(Path(run_dir), int(rank))
            fate = SharedFate(Path(f"{file}-{rank}"), int(num_deaths), int(seed), views, int(process))
            watch_repair(fate)
            make_slow()
            be_struck(fate, REPLICATED)
        case _:
            pass


begin()
