"""An update rule whose import on a server has that killed, by SIGKILL, in the middle of what it does for its tables.

Each call that changes what outlives the server is a place where it may die, before or after: entries of the journal,
snapshots, numbers of tables, chunks and rows of updates, also as a successor goes on with them. `STRUCK` names a file
for each server, with a letter for each death, and how many there are to be.
"""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.server.journal import Journal
from paceline.update.lasting import Record, RowsMemory, SavedTensors, UpdateProgress
from paceline.update.rows.memory import RowMemory

EARLY, LATE = (1, 40), (200, 500)  # places that a life passes: it dies as it comes up, or has done more than that
PLACES: tuple[tuple[type, str], ...] = (
    (Journal, "append"),
    (Journal, "write_snapshot"),
    (Journal, "note_resumed"),
    (Record, "commit"),
    (UpdateProgress, "save"),
    (UpdateProgress, "undo"),
    (UpdateProgress, "finish"),
    (SavedTensors, "write"),
    (RowsMemory, "write_ahead"),
    (RowMemory, "write_column"),
)


class Fate:
    """Counts the places that this process has passed, and kills it at one."""

    def __init__(self, file: Path, num_deaths: int) -> None:
        self.file = file
        before = file.read_bytes() if file.exists() else b""
        chance = random.Random(len(before) * 1009 + ord(file.name[-1]))
        # Not early three times in a row: the launcher gives a server up that dies five times without having done more.
        is_early = bool(before) and not before.endswith(b"ee") and chance.random() < 0.3
        self.letter = b"e" if is_early else b"l"
        self.left = chance.randint(*(EARLY if is_early else LATE)) if len(before) < num_deaths else 0

    def pass_place(self) -> None:
        self.left -= 1
        if self.left == 0:
            with self.file.open("ab") as deaths:
                deaths.write(self.letter)
            os.kill(os.getpid(), signal.SIGKILL)


def be_struck(fate: Fate) -> None:
    """Let each of the places kill this process from now on."""

    def around(call: Any) -> Any:
        def wrapped(*args: Any, **named: Any) -> Any:
            fate.pass_place()
            result = call(*args, **named)
            fate.pass_place()
            return result

        return wrapped

    for owner, name in PLACES:
        setattr(owner, name, around(getattr(owner, name)))


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


if "STRUCK" in os.environ and sys.argv[0].endswith("server.py"):
    _file, _num_deaths = os.environ["STRUCK"].rsplit(":", 1)
    be_struck(Fate(Path(f"{_file}-{sys.argv[2]}"), int(_num_deaths)))
