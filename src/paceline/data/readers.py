"""Readers of a session: local or on data servers; opened for its loaders and closed with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from paceline.data.sources.reader import Reader
    from paceline.data.sources.recipe import BatchRecipe

# Opens a recipe, of which so many batches are to be made before they are read. What reads is imported by whoever is
# fed: others need not wait for it when they start.
OpenReader: TypeAlias = "Callable[[BatchRecipe, int], Reader]"


def read_here(recipe: BatchRecipe, _prefetch: int) -> Reader:
    """Read in this process, and only what is asked for."""
    from paceline.data.sources.reader import LocalReader

    return LocalReader(recipe)


@dataclass(slots=True)
class SessionReaders:
    """Opens readers, and closes them with the session."""

    open_reader: OpenReader = read_here
    _opened: list[Reader] = field(default_factory=list["Reader"])

    def open(self, recipe: BatchRecipe, prefetch: int) -> Reader:
        """Open a reader; what it raises is said by `Reader`."""
        reader = self.open_reader(recipe, prefetch)
        self._opened.append(reader)
        return reader

    def close(self) -> None:
        """Close all that were opened."""
        opened, self._opened = self._opened, []
        for reader in opened:
            reader.close()
