"""Readers of a session: local or on data servers; opened for its loaders and closed with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from paceline.data.sources.declared import BatchRecipe
    from paceline.data.sources.reader import Reader

# Opens a recipe, of which so many batches are made before they are read. The modules that read are imported only when a
# reader is opened, so that processes without one start faster.
OpenReader: TypeAlias = "Callable[[BatchRecipe, int], Reader]"


def read_here(recipe: BatchRecipe, _prefetch: int) -> Reader:
    """Return a reader in this process, which makes a batch when it is read."""
    from paceline.data.sources.reader import LocalReader

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
