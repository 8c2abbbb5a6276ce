"""An opened recipe, which makes batches from the indices of their samples."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Protocol, get_args

from paceline.data.sources.batch_layout import Prepared
from paceline.data.sources.batches import BatchRequest, Faults
from paceline.data.sources.columns import open_arrays, open_tensors
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
from paceline.data.sources.decoding import OpenRecords, Transform
from paceline.data.sources.parquet import TableRows
from paceline.data.sources.recipe import BatchRecipe, OnError
from paceline.data.sources.samples import Samples
from paceline.data.sources.tar import TarSamples
from paceline.data.sources.text import TextLines
from paceline.data.sources.user_dataset import DatasetSamples
from paceline.errors import UsageError

__all__ = ["Faults", "Records", "open_recipe", "open_source"]


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
