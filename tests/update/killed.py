"""Kills updates at every step that they take, in their own process: what was written stays, and nothing more is.

Each call of `POINTS` is a place where a kill may come; those that change tensors leave some of them half changed. The
shard or store is abandoned then, and another one takes over the memory, as in a successor of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import torch
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.transport.lasting_memory import LastingMemory, MemoryHolder
from paceline.update.kernels import Kernel, Operands
from paceline.update.lasting import ChunkMemory, LastingRecord, SavedTensors, UpdateProgress
from paceline.update.native_steps import NativeSteps, StepMemory, Undo
from paceline.update.rows.index import RowIndex
from paceline.update.rows.memory import RowMemory
from paceline.update.torch_rule import TorchRule

from .own_rules import Decaying

T = TypeVar("T")
_NOTHING = Undo()
_step = NativeSteps.step  # which is replaced while updates are killed


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Countdown:
    """Calls `kill` at the point with a number; counts all points."""

    target: int
    kill: Callable[[], None]
    passed: int = 0

    def due(self) -> bool:
        self.passed += 1
        return self.passed == self.target


def _raise() -> None:
    raise Killed


@contextmanager
def killing(target: int, kill: Callable[[], None] = _raise) -> Iterator[Countdown]:
    """Call `kill` at point `target` (from 1) of what runs inside."""
    countdown = Countdown(target, kill)

    def around(call: Callable[..., Any], spoil: Callable[..., None] | None = None) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            if countdown.due():
                if spoil is not None:
                    spoil(*args, **named)
                countdown.kill()
            result = call(*args, **named)
            if countdown.due():
                countdown.kill()
            return result

        return wrapped

    points: list[tuple[type, str, Callable[..., None] | None]] = [
        (LastingRecord, "commit", None),
        (UpdateProgress, "save", _spoil_saved),
        (UpdateProgress, "undo", None),
        (UpdateProgress, "finish", None),
        (RowMemory, "write_column", _spoil_column),
        (RowIndex, "add", _spoil_index),
        (SavedTensors, "write", _spoil_tensors),
        *((rule, "update", _spoil_values) for rule in (TorchRule, Decaying)),
        (NativeSteps, "step", _spoil_place),
        *((kernel, "step", _spoil_operands) for kernel in Kernel.__subclasses__()),
    ]
    patches = [patch.object(owner, name, around(getattr(owner, name), spoil)) for owner, name, spoil in points]
    for each in patches:
        each.start()
    try:
        yield countdown
    finally:
        for each in patches:
            each.stop()


def _spoil_operands(_: Kernel, at: Operands, *__: object, **___: object) -> None:
    """Leave a kernel's step in its middle: some values and states are changed already."""
    for tensors in (at.values, *at.state.values()):
        tensors[0][: max(1, tensors[0].numel() // 2)].fill_(torch.nan)


def _spoil_values(_: object, values: list[torch.Tensor], *__: object, **___: object) -> None:
    """Leave a step over whole tensors in its middle."""
    values[0].view(-1)[:7] = torch.nan


def _spoil_tensors(saved: SavedTensors, number: int, tensors: dict[str, torch.Tensor]) -> None:
    """Leave a copy of whole tensors in its middle."""
    size_bytes = 2 * sum(tensor.nbytes for tensor in tensors.values())
    memory = saved._room(number, size_bytes)
    memory[: size_bytes // 2] = bytes([255]) * (size_bytes // 2)


def _spoil_place(steps: NativeSteps, at: StepMemory, *operands: Any, undo: Undo = _NOTHING, **named: Any) -> None:
    """Leave a step of the C library in its middle; where it saves what it changes, in the middle of its third block."""
    begin, end = 0, max(1, at.length // 2)
    if undo.memory is not None:
        end = min(at.length, 2 * undo.block + undo.block // 2)
        begin = (end - 1) // undo.block * undo.block
        part = replace(at, length=end, tensors=tuple(tensor[:end] for tensor in at.tensors))
        _step(steps, part, *operands, undo=undo, **named)
    for tensor in at.tensors:
        tensor[begin:end].fill_(torch.nan)


def _spoil_saved(progress: UpdateProgress, _: int, chunk: ChunkMemory, thread: int, **__: object) -> None:
    """Leave a copy in its middle."""
    num_bytes = chunk.spans[0][1] // 2
    progress._memory[thread][:num_bytes] = bytes(num_bytes)


def _spoil_column(memory: RowMemory, name: str, slots: torch.Tensor, _: object) -> None:
    """Leave rows half written."""
    memory.columns[name][slots[: len(slots) // 2 + 1]] = torch.nan


def _spoil_index(index: RowIndex, keys: torch.Tensor, *_: object) -> None:
    """Leave the index with an id too many."""
    index._ids.grow(index.num_slots + 1)
    index._ids_of_slots()[index.num_slots] = 4711


@dataclass
class Story(Generic[T]):
    """A life of a shard or store: how it comes up on its memory, what it does then, and what it is at the end.

    `work` does what is not done yet; it may be called again on a successor.
    """

    start: Callable[[LastingMemory], T]
    work: Callable[[T], None]
    bytes_of: Callable[[T], dict[str, bytes]]

    def undisturbed(self) -> dict[str, bytes]:
        with MemoryHolder() as holder:
            return self.live(holder)

    def live(self, holder: MemoryHolder) -> dict[str, bytes]:
        if holder._thread.ident is None:
            holder.start()
        made = self.start(LastingMemory.connect(holder.theirs))
        self.work(made)
        return self.bytes_of(made)

    def killed_at(self, *targets: int) -> tuple[dict[str, bytes], bool]:
        """Return what it ends as when it is killed at these points, one after the other, and whether the last came."""
        with MemoryHolder() as holder:
            reached = True
            for target in targets:
                reached = False
                with killing(target):
                    try:
                        self.live(holder)
                    except Killed:
                        reached = True
                    except UsageError as error:  # what ends a rule is told as an error of it
                        if not isinstance(error.__cause__, Killed):
                            raise
                        reached = True
            return self.live(holder), reached
