"""Interface through which a loader gets its batches, locally or from data servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.data.sources.batch import Batch, BatchRequest, unpack
from paceline.data.sources.declared import BatchRecipe
from paceline.data.sources.records import SkippedRecords, open_recipe
from paceline.errors import UsageError


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


class LocalReader:
    r"""Makes the batches of a recipe in this process, when they are read: bit for bit those of a data server.

    Raises:
        UsageError: the recipe is not valid, or code that it names cannot be imported.
        DataError: a file that it names cannot be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import paceline
        >>> path = Path(tempfile.mkdtemp()) / "poem.txt"
        >>> _ = path.write_text("so much depends\nupon\n")
        >>> reader = LocalReader(BatchRecipe(paceline.sources.lines(path)))
        >>> reader.read(BatchRequest(epoch=0, indices=(1, 0))).content
        ['upon', 'so much depends']
        >>> reader.close()
    """

    def __init__(self, recipe: BatchRecipe) -> None:
        self._records = open_recipe(recipe, None)
        self._closed = False

    @property
    def num_samples(self) -> int:
        """Number of samples of the source."""
        return self._records.num_samples

    def expect(self, requests: Sequence[BatchRequest]) -> None:
        """Do nothing: a batch is made when it is read."""

    def read(self, request: BatchRequest) -> Batch:
        """Make this batch; see `Reader.read`."""
        if self._closed:
            raise UsageError("a reader of training examples is closed and cannot be read")
        prepared = self._records.prepare(request)
        memory = torch.empty(prepared.size_bytes, dtype=torch.uint8).numpy().data
        prepared.fill(memory)
        return unpack(prepared.layout, memory)

    def skipped(self) -> SkippedRecords:
        """Return the number of records skipped so far, and the reasons for the first ones."""
        return self._records.skipped()

    def close(self) -> None:
        """Close the files."""
        self._closed = True
        self._records.close()
