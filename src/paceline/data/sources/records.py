"""Open sources: the interface to the samples of every kind of source, and the batches made of their records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Final, Protocol, get_args

import torch

from paceline.data.sources.arrays import open_arrays, open_tensors
from paceline.data.sources.batch import (
    Batch,
    BatchRequest,
    Column,
    PreparedBatch,
    SkippedRecords,
    require_served,
    unpack,
)
from paceline.data.sources.collating import FlatRecord, UnfitRecord, collate, describe, flatten
from paceline.data.sources.declared import (
    Arrays,
    BatchRecipe,
    Lines,
    OnError,
    OwnDataset,
    Parquet,
    Source,
    Tensors,
    WebDataset,
    check_source,
)
from paceline.data.sources.parquet import TableRows
from paceline.data.sources.tar import TarSamples
from paceline.data.sources.text import TextLines
from paceline.data.sources.user_dataset import DatasetSamples, transform_at
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.wire.malformed import describe_error


class Records(Protocol):
    """An open recipe. A batch is a function of the recipe and the request. For one thread at a time."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the source."""
        ...

    def fingerprint(self) -> str:
        """Return a fingerprint of names, sizes, shapes and types: equal in every process for equal data."""
        ...

    def prepare(self, request: BatchRequest, max_bytes: int | None = None) -> PreparedBatch:
        """Read and decode the records of a batch; blocks until done.

        Stops decoding once the records exceed `max_bytes`.

        Raises:
            RecordError: a record cannot be decoded, and the recipe skips none.
            DataError: the source cannot be read, or was changed since it was opened.
            UsageError: an index is not in the source, or the batch is too large.
        """
        ...

    def skipped(self) -> SkippedRecords:
        """Return the records skipped so far; a record that was requested twice counts twice."""
        ...

    def close(self) -> None:
        """Close the files. May be repeated."""
        ...


def open_recipe(recipe: BatchRecipe, allowed_paths: AbstractSet[str] | None) -> Records:
    """Open the source of a recipe; blocks until its samples are counted.

    Args:
        recipe: the source, and what to do with its records.
        allowed_paths: the import paths of datasets and transforms that may be loaded; None allows all.

    Raises:
        UsageError: the recipe is not valid, an import path may not be loaded or cannot be imported, or an extra is
            missing.
        DataError: a file is missing or damaged, or its content does not fit.
    """
    if recipe.on_error not in get_args(OnError):
        raise UsageError(f"on_error is {recipe.on_error!r}, expected one of {', '.join(get_args(OnError))}.")
    transform = None if recipe.transform is None else Transform(recipe.transform, allowed_paths, recipe.seed)
    return OpenRecords(recipe, open_source(recipe.source, allowed_paths), transform)


def open_source(source: Source, allowed_paths: AbstractSet[str] | None) -> Samples:
    """Open a source; see `open_recipe`."""
    check_source(source)
    match source:
        case Arrays():
            return open_arrays(source)
        case Tensors():
            return open_tensors(source)
        case Lines():
            return TextLines(source)
        case Parquet():
            return TableRows(source)
        case WebDataset():
            return TarSamples(source)
        case OwnDataset():
            return DatasetSamples(source, allowed_paths)


class Samples(Protocol):
    """The samples of an open source of any kind, by index. For one thread at a time."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        ...

    def gather(self, indices: Sequence[int]) -> Column | None:
        """Return the columns of a batch; None for kinds of sources whose records are decoded one by one."""
        ...

    def record(self, index: int) -> object:
        """Return one record, which may be changed; raises what decoding it raises."""
        ...

    def name(self, index: int) -> str:
        """Return the name of a record for messages: "line 7 of poem.txt"."""
        ...

    def check(self) -> None:
        """Raise DataError if files have changed since they were opened, as far as that is cheap to find out."""
        ...

    def describe(self) -> object:
        """Return plain data that identify the samples: names, sizes, shapes, types."""
        ...

    def close(self) -> None:
        """Close files. May be repeated."""
        ...


_MOST_REASONS: Final = 5


class Transform:
    """A user-defined function that turns each record into another one."""

    def __init__(self, path: str, allowed_paths: AbstractSet[str] | None, seed: int) -> None:
        self._function, self._takes_generator = transform_at(path, allowed_paths)
        self._seed = seed

    def apply(self, record: object, epoch: int, index: int) -> object:
        """Return the transformed record; random numbers depend on the seed, the epoch and the index alone."""
        if not self._takes_generator:
            return self._function(record)
        digest = blake2b(f"{self._seed},{epoch},{index}".encode(), digest_size=8).digest()
        return self._function(record, generator=torch.Generator().manual_seed(int.from_bytes(digest) >> 1))


class OpenRecords:
    """Batches of an open source, whose records are decoded and transformed one by one if need be."""

    def __init__(self, recipe: BatchRecipe, samples: Samples, transform: Transform | None) -> None:
        self._recipe = recipe
        self._samples = samples
        self._transform = transform
        self._num_skipped = 0
        self._reasons: list[str] = []

    @property
    def num_samples(self) -> int:
        """Number of samples of the source."""
        return self._samples.num_samples

    def fingerprint(self) -> str:
        """Return a fingerprint of the data; see `Records.fingerprint`."""
        described = json.dumps([self.num_samples, self._samples.describe()], sort_keys=True)
        return blake2b(described.encode(), digest_size=16).hexdigest()

    def prepare(self, request: BatchRequest, max_bytes: int | None = None) -> PreparedBatch:
        """Read and decode the records of a batch; see `Records.prepare`."""
        indices = request.indices
        if not indices:
            return PreparedBatch(None, 0, 0)
        if min(indices) < 0 or max(indices) >= self.num_samples:
            raise UsageError(f"there is no sample {min(indices)} or {max(indices)}: there are {self.num_samples}.")
        self._samples.check()
        columns = None if self._transform is not None else self._samples.gather(indices)
        if columns is not None:
            return PreparedBatch(columns, len(indices), 0)
        decoded = self._alike(request, self._decoded(request, max_bytes))
        num_skipped = len(indices) - len(decoded)
        return PreparedBatch(collate(list(decoded.values())) if decoded else None, len(decoded), num_skipped)

    def skipped(self) -> SkippedRecords:
        """Return the records skipped so far."""
        return SkippedRecords(self._num_skipped, tuple(self._reasons))

    def close(self) -> None:
        """Close the files."""
        self._samples.close()

    def _decoded(self, request: BatchRequest, max_bytes: int | None) -> dict[int, FlatRecord]:
        """Return the records that can be decoded, by their place in the batch."""
        found: dict[int, FlatRecord] = {}
        size_bytes = 0
        # By index, as neighbouring records lie side by side in files.
        for place in sorted(range(len(request.indices)), key=request.indices.__getitem__):
            try:
                flat = found[place] = self._decode(request.epoch, request.indices[place])
            except RecordError as fault:
                self._note(fault)
                continue
            size_bytes += flat.size_bytes
            if max_bytes is not None:
                require_served(len(found), size_bytes, max_bytes)
        return {place: found[place] for place in sorted(found)}

    def _decode(self, epoch: int, index: int) -> FlatRecord:
        try:
            record = self._samples.record(index)
            return flatten(record if self._transform is None else self._transform.apply(record, epoch, index))
        except (PacelineError, MemoryError):
            raise  # not the record's fault
        except UnfitRecord as error:
            raise self._fault(index, str(error)) from error
        except Exception as error:  # user code may raise anything
            raise self._fault(index, f"{type(error).__name__}: {error}") from error

    def _alike(self, request: BatchRequest, decoded: dict[int, FlatRecord]) -> dict[int, FlatRecord]:
        """Return the records of the most common kind: only records of one kind fit into one batch."""
        kinds = Counter(flat.kind for flat in decoded.values())
        if len(kinds) < 2:
            return decoded
        usual = kinds.most_common(1)[0][0]
        for place, flat in decoded.items():
            if flat.kind != usual:
                why = f"it is {describe(flat.kind)}, and most records of its batch are {describe(usual)}"
                self._note(self._fault(request.indices[place], why))
        return {place: flat for place, flat in decoded.items() if flat.kind == usual}

    def _fault(self, index: int, why: str) -> RecordError:
        return RecordError(
            f"{self._samples.name(index)} could not be made part of a batch: {why}. Repair or remove it, or have such "
            "records left out and counted: on_error='skip'."
        )

    def _note(self, fault: RecordError) -> None:
        """Count a record that is left out; raises its error if the recipe skips none."""
        if self._recipe.on_error == "raise":
            raise fault
        self._num_skipped += 1
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.append(describe_error(fault))


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
