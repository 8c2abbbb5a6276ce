"""The newest values of a table, held in a worker's tensors for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from paceline.node.table import Table
from paceline.training.flat import Flat


@contextmanager
def newest_values(flat: Flat, table: Table) -> Generator[None]:
    """Fill tensors with the values of their table for the length of a `with` block, then put back what they held.

    The values contain every update of all clocks below the worker's own, or where nothing bounds reads, all that have
    arrived. Blocks until they are there.
    """
    held, newest = flat.empty(), flat.empty()
    flat.pack_values(held)
    table.pull(out=newest, exact=table.consistency.bound is not None)
    flat.unpack(newest)
    try:
        yield
    finally:
        flat.unpack(held)
