"""Readers: how a loader gets its batches, locally or from data servers, and the readers of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from paceline.data.sources.batch import Batch, BatchRequest, SkippedRecords
    from paceline.data.sources.declared import BatchRecipe


class Reader(Protocol):
    """Reads the batches of one recipe. For one thread at a time."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the source; blocks, with a deadline, until it is known."""
        ...

    def expect(self, requests: Sequence[BatchRequest]) -> None:
        """Announce the batches that will probably be read next, in this order, in place of those expected before.

        Does not block. A wrong announcement only costs time.
        """
        ...

    def read(self, request: BatchRequest) -> Batch:
        """Return this batch; blocks, with a deadline, until it is there.

        Raises:
            RecordError: a record cannot be decoded, and the recipe skips none.
            DataError: the source cannot be read.
            UsageError: the reader is closed.
        """
        ...

    def skipped(self) -> SkippedRecords:
        """Return the number of records skipped in the batches received, and the reasons for the first ones."""
        ...

    def close(self) -> None:
        """Release files, connections and memory; batches that were read stay valid. May be repeated."""
        ...


# Opens a recipe, with the number of batches to make ahead. The modules that read are imported when the first reader is
# opened, so that processes without one start faster.
OpenReader: TypeAlias = "Callable[[BatchRecipe, int], Reader]"


def read_here(recipe: BatchRecipe, _prefetch: int) -> Reader:
    """Return a reader in this process, which makes a batch when it is read."""
    from paceline.data.sources.records import LocalReader

    return LocalReader(recipe)


@dataclass(slots=True)
class SessionReaders:
    """The readers of a session, closed with it."""

    open_reader: OpenReader = read_here
    _opened: list[Reader] = field(default_factory=list["Reader"])

    def open(self, recipe: BatchRecipe, prefetch: int) -> Reader:
        """Open a reader; raises as opening the recipe does."""
        reader = self.open_reader(recipe, prefetch)
        self._opened.append(reader)
        return reader

    def close(self) -> None:
        """Close all that were opened."""
        opened, self._opened = self._opened, []
        for reader in opened:
            reader.close()
