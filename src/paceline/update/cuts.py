"""Cuts: what a table was between two updates, read piece by piece while later updates change it.

A cut copies nothing at first. What an update is about to change, and the reader of the cut has not had yet, is kept as
it was; what the reader has had is let go. So a cut takes as much memory as updates are ahead of its reader, and where
that is more than there is, the cut is given up, and not the training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol, final

import torch

from paceline.errors import UsageError
from paceline.update.dtypes import dtype_name
from paceline.update.summing import CHUNK
from paceline.update.table import ShardLayout

if TYPE_CHECKING:
    from torch import Tensor

NO_ROOM: Final = "updates were so far ahead of its reader that there was no memory for what they change"


class TableCut(Protocol):
    """The part of a table on one server as it was at one moment. For the thread that uses the table."""

    @property
    def num_pieces(self) -> int:
        """The number of pieces; their order does not matter."""
        ...

    @property
    def layout(self) -> ShardLayout | None:
        """How to read the pieces of a dense table; those of rows are safetensors."""
        ...

    @property
    def fixed(self) -> Mapping[str, Tensor]:
        """What belongs to the cut besides its pieces."""
        ...

    @property
    def base(self) -> str:
        """The marks since which its rows have changed; empty if it has all."""
        ...

    @property
    def marks(self) -> str:
        """The marks that begin with it; empty if rows are not marked."""
        ...

    def read(self, index: int) -> memoryview:
        """Return the bytes of one piece, once.

        Raises:
            UsageError: there is no such piece, it was read before, or the cut was given up.
        """
        ...

    def close(self) -> None:
        """Release all that is kept. Idempotent."""
        ...


@final
class ShardCut:
    """A dense shard as it was between two updates; see `TableCut`.

    Args:
        parts: of all elements, (elements of the range,) each: the live memory.
        fixed: what belongs to the cut besides, by name: its own copies.
        held: see `ShardLayout`.
        has_room: returns whether so many bytes may be kept in all.

    Example:
        >>> values = torch.tensor([1.0, 2.0])
        >>> cut = ShardCut({"values": values})
        >>> cut.keep(0, 2)  # before a change
        >>> _ = values.zero_()
        >>> torch.frombuffer(cut.read(0), dtype=torch.float32)
        tensor([1., 2.])
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None = None,
        held: Sequence[tuple[str, ...]] = (),
        has_room: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.fixed: Final = dict(fixed or {})
        self.base: Final = ""
        self.marks: Final = ""
        self._parts = {name: part.view(torch.uint8) for name, part in parts.items()}
        self._has_room = has_room
        num = next(iter(parts.values())).numel()
        dtypes = tuple((name, dtype_name(part.dtype)) for name, part in parts.items())
        self.layout: Final = ShardLayout(num, CHUNK, dtypes, tuple(held))
        self._items = {name: part.element_size() for name, part in parts.items()}
        self.num_pieces: Final = -(-num // CHUNK)
        self._lock = threading.Lock()  # held while a piece is copied, which is all that an update may wait for
        self._left = set(range(self.num_pieces))  # neither read nor kept
        self._kept: dict[int, Tensor] = {}
        self.kept_bytes = 0
        self.most_kept_bytes = 0
        self.problem = ""  # why the cut was given up

    @property
    def is_over(self) -> bool:
        """Whether updates need to keep nothing more for it."""
        return not self._left

    def keep(self, start: int, stop: int) -> None:
        """Keep what elements `start` to `stop` are now; called before they change, by any thread of an update."""
        for index in range(start // CHUNK, -(-stop // CHUNK)):
            if index in self._left:
                with self._lock:
                    if index in self._left:
                        self._keep(index)

    def keep_all(self) -> None:
        """Keep all that is left; called before any of it may change."""
        self.keep(0, self.layout.num_elements)

    def read(self, index: int) -> memoryview:
        """See `TableCut.read`."""
        with self._lock:
            found = self._take_kept(index)
            if found is None:
                found = self._copy(index)
                self._left.discard(index)  # not before: updates look at that without the lock
        return found.numpy().data

    def read_all(self, write: Callable[[memoryview], None]) -> None:
        """Read all pieces in order: `write` copies the bytes that it is given. Raises as `read`, and as that does."""
        for index in range(self.num_pieces):
            with self._lock:
                kept = self._take_kept(index)
                if kept is None:
                    for part, start, stop in self._spans(index):
                        write(part[start:stop].numpy().data)
                    self._left.discard(index)  # not before: updates look at that without the lock
            if kept is not None:
                write(kept.numpy().data)

    def close(self) -> None:
        """See `TableCut.close`."""
        with self._lock:
            self._give_up("it was closed")

    def _take_kept(self, index: int) -> Tensor | None:
        """Return a piece that was kept, which counts as read now, or None for one that is as it was."""
        if self.problem:
            raise UsageError(f"a cut was given up: {self.problem}")
        if index in self._kept:
            found = self._kept.pop(index)
            self.kept_bytes -= found.numel()
            return found
        if index not in self._left:
            raise UsageError(f"a cut has no piece {index} that was not read before, of {self.num_pieces}")
        return None

    def _keep(self, index: int) -> None:
        size_bytes = self._size_bytes(index)
        if not self._has_room(self.kept_bytes + size_bytes):
            self._give_up(NO_ROOM)
            return
        try:
            self._kept[index] = self._copy(index)
        except RuntimeError:  # of torch, where an allocation fails
            self._give_up(NO_ROOM)
            return
        self.kept_bytes += size_bytes
        self.most_kept_bytes = max(self.most_kept_bytes, self.kept_bytes)
        self._left.discard(index)

    def _give_up(self, why: str) -> None:
        self.problem = self.problem or why
        self._left.clear()
        self._kept.clear()
        self.kept_bytes = 0

    def _size_bytes(self, index: int) -> int:
        return sum(stop - start for _, start, stop in self._spans(index))

    def _copy(self, index: int) -> Tensor:
        out = torch.empty(self._size_bytes(index), dtype=torch.uint8)
        at = 0
        for part, start, stop in self._spans(index):
            out[at : at + stop - start] = part[start:stop]
            at += stop - start
        return out

    def _spans(self, index: int) -> list[tuple[Tensor, int, int]]:
        first, last = index * CHUNK, min((index + 1) * CHUNK, self.layout.num_elements)
        return [(part, first * self._items[name], last * self._items[name]) for name, part in self._parts.items()]
