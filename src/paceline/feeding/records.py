"""What a recipe becomes where it is opened: batches by the indices of their samples."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from paceline.feeding.batches import Ask
from paceline.feeding.parcel import Prepared
from paceline.feeding.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Faults:
    """Records that were skipped so far: how often, and why the first ones."""

    num_skipped: int
    reasons: tuple[str, ...]


class Records(Protocol):
    """An open recipe. A batch is a function of the recipe and what was asked, alone. One thread at a time."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the source."""
        ...

    def fingerprint(self) -> str:
        """Return what tells different data apart: names, sizes, shapes, types; the same wherever the same is opened."""
        ...

    def prepare(self, ask: Ask) -> Prepared:
        """Read and decode what a batch is made of; blocks for as long as that takes.

        Raises:
            RecordError: a record could not be decoded, and the recipe skips none.
            DataError: the source cannot be read, or was changed since it was opened.
            UsageError: an index is none of the source.
        """
        ...

    def faults(self) -> Faults:
        """Return what was skipped; a record that was asked for twice counts twice."""
        ...

    def close(self) -> None:
        """Let go of the files. May be repeated."""
        ...


def open_recipe(recipe: Recipe, allowed_paths: AbstractSet[str] | None) -> Records:
    """Open the source of a recipe; blocks until its samples are counted.

    Args:
        recipe: what is read, and what is made of it.
        allowed_paths: the import paths of datasets and transforms that may be loaded; None allows all.

    Raises:
        UsageError: the recipe makes no sense, an import path may not be loaded or cannot be imported, or an extra is
            missing.
        DataError: a file is missing or damaged, or what is in it does not fit.
    """
    raise NotImplementedError
