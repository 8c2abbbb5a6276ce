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
from paceline.data.sources.batch import BatchRequest, Column, Faults, Prepared, require_served
from paceline.data.sources.collating import FlatRecord, Unfit, collate, describe, flatten
from paceline.data.sources.declared import (
    Arrays,
    Lines,
    OwnDataset,
    Parquet,
    Source,
    Tensors,
    WebDataset,
    check_source,
)
from paceline.data.sources.parquet import TableRows
from paceline.data.sources.recipe import BatchRecipe, OnError
from paceline.data.sources.tar import TarSamples
from paceline.data.sources.text import TextLines
from paceline.data.sources.user_dataset import DatasetSamples, transform_at
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.wire.malformed import story


class Records(Protocol):
    """An open recipe. A batch is a function of the recipe and what was asked, alone. One thread at a time."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the source."""
        ...

    def fingerprint(self) -> str:
        """Return what tells different data apart: names, sizes, shapes, types; the same wherever the same is opened."""
        ...

    def prepare(self, ask: BatchRequest, max_bytes: int | None = None) -> Prepared:
        """Read and decode what a batch is made of; blocks for as long as that takes.

        Where the records that are decoded come to more than `max_bytes`, no more of them are.

        Raises:
            RecordError: a record could not be decoded, and the recipe skips none.
            DataError: the source cannot be read, or was changed since it was opened.
            UsageError: an index is none of the source, or the batch is too large.
        """
        ...

    def faults(self) -> Faults:
        """Return what was skipped; a record that was asked for twice counts twice."""
        ...

    def close(self) -> None:
        """Let go of the files. May be repeated."""
        ...


def open_recipe(recipe: BatchRecipe, allowed_paths: AbstractSet[str] | None) -> Records:
    """Open the source of a recipe; blocks until its samples are counted.

    Args:
        recipe: what is read, and what is made of it.
        allowed_paths: the import paths of datasets and transforms that may be loaded; None allows all.

    Raises:
        UsageError: the recipe makes no sense, an import path may not be loaded or cannot be imported, or an extra is
            missing.
        DataError: a file is missing or damaged, or what is in it does not fit.
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
    """What is behind a source, whatever that is. One thread at a time."""

    @property
    def num_samples(self) -> int:
        """How many there are."""
        ...

    def gather(self, indices: Sequence[int]) -> Column | None:
        """Return the columns of a batch where no record has to be decoded; None where each one has to be."""
        ...

    def record(self, index: int) -> object:
        """Return one record, which may be changed; raises whatever decoding it raises."""
        ...

    def name(self, index: int) -> str:
        """Say which record this is, for messages: "line 7 of poem.txt"."""
        ...

    def check(self) -> None:
        """Raise DataError when files have changed since they were opened, as far as that is cheap to see."""
        ...

    def describe(self) -> object:
        """Return plain data that tell these samples from others: names, sizes, shapes, types."""
        ...

    def close(self) -> None:
        """Let go of files. May be repeated."""
        ...


_MOST_REASONS: Final = 5


class Transform:
    """A function of the user's that makes another record of each one."""

    def __init__(self, path: str, allowed_paths: AbstractSet[str] | None, seed: int) -> None:
        self._function, self._takes_generator = transform_at(path, allowed_paths)
        self._seed = seed

    def apply(self, record: object, epoch: int, index: int) -> object:
        """Return what becomes of a record; its chance depends on the seed, the epoch and the index alone."""
        if not self._takes_generator:
            return self._function(record)
        digest = blake2b(f"{self._seed},{epoch},{index}".encode(), digest_size=8).digest()
        return self._function(record, generator=torch.Generator().manual_seed(int.from_bytes(digest) >> 1))


class OpenRecords:
    """Batches of an open source, each record decoded and transformed by itself where it has to be."""

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
        """Return what tells different data apart; see `Records.fingerprint`."""
        described = json.dumps([self.num_samples, self._samples.describe()], sort_keys=True)
        return blake2b(described.encode(), digest_size=16).hexdigest()

    def prepare(self, ask: BatchRequest, max_bytes: int | None = None) -> Prepared:
        """Read and decode what a batch is made of; see `Records.prepare`."""
        indices = ask.indices
        if not indices:
            return Prepared(None, 0, 0)
        if min(indices) < 0 or max(indices) >= self.num_samples:
            raise UsageError(f"there is no sample {min(indices)} or {max(indices)}: there are {self.num_samples}.")
        self._samples.check()
        columns = None if self._transform is not None else self._samples.gather(indices)
        if columns is not None:
            return Prepared(columns, len(indices), 0)
        decoded = self._alike(ask, self._decoded(ask, max_bytes))
        num_skipped = len(indices) - len(decoded)
        return Prepared(collate(list(decoded.values())) if decoded else None, len(decoded), num_skipped)

    def faults(self) -> Faults:
        """Return what was skipped."""
        return Faults(self._num_skipped, tuple(self._reasons))

    def close(self) -> None:
        """Let go of the files."""
        self._samples.close()

    def _decoded(self, ask: BatchRequest, max_bytes: int | None) -> dict[int, FlatRecord]:
        """Return the records that can be decoded, by their place in the batch."""
        found: dict[int, FlatRecord] = {}
        size_bytes = 0
        # By index, as what is read one after the other lies one after the other.
        for place in sorted(range(len(ask.indices)), key=ask.indices.__getitem__):
            try:
                flat = found[place] = self._decode(ask.epoch, ask.indices[place])
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
        except Unfit as error:
            raise self._fault(index, str(error)) from error
        except Exception as error:  # whatever code of the user's may raise
            raise self._fault(index, f"{type(error).__name__}: {error}") from error

    def _alike(self, ask: BatchRequest, decoded: dict[int, FlatRecord]) -> dict[int, FlatRecord]:
        """Return the records that are made up as most of them are: only those fit into one batch."""
        kinds = Counter(flat.kind for flat in decoded.values())
        if len(kinds) < 2:
            return decoded
        usual = kinds.most_common(1)[0][0]
        for place, flat in decoded.items():
            if flat.kind != usual:
                why = f"it is {describe(flat.kind)}, and most records of its batch are {describe(usual)}"
                self._note(self._fault(ask.indices[place], why))
        return {place: flat for place, flat in decoded.items() if flat.kind == usual}

    def _fault(self, index: int, why: str) -> RecordError:
        return RecordError(
            f"{self._samples.name(index)} could not be made part of a batch: {why}. Repair or remove it, or have such "
            "records left out and counted: on_error='skip'."
        )

    def _note(self, fault: RecordError) -> None:
        """Count a record that is left out; raise where none may be."""
        if self._recipe.on_error == "raise":
            raise fault
        self._num_skipped += 1
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.append(story(fault))
