"""Interface through which a loader gets its batches, locally or from data servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.data.sources.batch import Batch, BatchRequest, unpack
from paceline.data.sources.recipe import BatchRecipe
from paceline.data.sources.records import Faults, open_recipe
from paceline.errors import UsageError


class Reader(Protocol):
    """Gives batches of one recipe. One thread at a time."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the source; blocks, with a deadline, until it is known."""
        ...

    def expect(self, asks: Sequence[BatchRequest]) -> None:
        """Say what will most likely be read next, in this order, instead of what was expected before.

        Does not block, and costs nothing but time where it is wrong.
        """
        ...

    def read(self, ask: BatchRequest) -> Batch:
        """Return this batch; blocks, with a deadline, until it is there.

        Raises:
            RecordError: a record could not be decoded, and the recipe skips none.
            DataError: the source cannot be read.
            UsageError: the reader is closed.
        """
        ...

    def faults(self) -> Faults:
        """Return what was skipped in batches that have arrived here, and why the first records of the source were."""
        ...

    def close(self) -> None:
        """Let go of files, connections and memory; batches that were read stay valid. May be repeated."""
        ...


class LocalReader:
    r"""Makes the batches of a recipe in this process, when they are read: bit for bit those of a data server.

    Raises:
        UsageError: the recipe makes no sense, or code it names cannot be imported.
        DataError: what it names cannot be read.

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

    def expect(self, asks: Sequence[BatchRequest]) -> None:
        """Do nothing: a batch is made when it is read."""

    def read(self, ask: BatchRequest) -> Batch:
        """Make this batch; see `Reader.read`."""
        if self._closed:
            raise UsageError("a reader of training examples is closed: nothing can be read from it any more")
        prepared = self._records.prepare(ask)
        memory = torch.empty(prepared.size_bytes, dtype=torch.uint8).numpy().data
        prepared.fill(memory)
        return unpack(prepared.layout, memory)

    def faults(self) -> Faults:
        """Return what was skipped so far, and why the first records were."""
        return self._records.faults()

    def close(self) -> None:
        """Let go of the files."""
        self._closed = True
        self._records.close()
