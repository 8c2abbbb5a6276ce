"""How a worker opens tables: all workers declare the same, and one of them gives the first values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import Refused, UsageError
from paceline.node.given import as_values
from paceline.node.layout import torch_dtype
from paceline.node.meter import Meter
from paceline.node.requests import AwaitValues, Initialise
from paceline.node.rows.opened import CacheOptions
from paceline.node.rows.table import RowTable
from paceline.node.table import Table
from paceline.node.worker import WorkerNode
from paceline.tensors.rows.spec import First, RowTableSpec
from paceline.tensors.table import TableSpec


@dataclass(slots=True)
class Opening:
    """Opens the tables of one worker, each once."""

    rank: int
    node: WorkerNode
    meter: Meter
    _names: set[str] = field(default_factory=set[str])

    def dense(
        self,
        spec: TableSpec,
        shape: tuple[int, ...],
        write_first: Callable[[Tensor], object],
        *,
        read_my_writes: bool,
        live: bool,
        first: int = 0,
    ) -> Table:
        """Declare a table and wait for its first values, which one worker sends, or the first that still takes part.

        That worker has `write_first` write them to a flat tensor.
        """
        self._take(spec.name)
        spec.validate()
        self.node.open_table(spec, reads_own_writes=read_my_writes, live=live)
        if self.rank == first:
            self._give_values(spec.name, write_first)
        try:
            self._await_values(spec.name, first)
        except Refused:  # that one is gone, and this worker is the first of those that are left
            self._give_values(spec.name, write_first)
            self._await_values(spec.name, first)
        self.meter.begin()
        return Table(spec, shape, self.node, self.meter)

    def shared(self, spec: TableSpec, shape: tuple[int, ...]) -> Table:
        """Declare a table that begins with zeros, whoever comes first: no other worker is waited for.

        May be repeated after it was refused.
        """
        spec.validate()
        self.node.open_table(spec)
        self._give_values(spec.name, Tensor.zero_)  # those of others are the same, and count only once
        return Table(spec, shape, self.node, self.meter)

    def rows(self, spec: RowTableSpec, options: CacheOptions) -> RowTable:
        """Declare a table of rows. Nobody gives first values: they follow from the declaration."""
        self._take(spec.name)
        spec.validate()
        opened = self.node.open_rows(spec, options)
        self.meter.begin()
        return RowTable(spec, opened, self.node, self.meter)

    def _take(self, name: str) -> None:
        if name in self._names:
            raise UsageError(
                f"worker {self.rank} has already opened table '{name}': use what that call returned, or give "
                "this one a name of its own (name=...)."
            )
        self._names.add(name)

    def _give_values(self, table: str, write: Callable[[Tensor], object]) -> None:
        buffer = self.node.reserve(table)  # the memory of pushes, so that first values cost none of their own
        write(buffer.gradient)
        self.node.calls.ask_all(
            lambda number: Initialise(number, table),
            f"servers to take the first values of table '{table}'",
            self.node.parts(table, buffer),
        )
        self.node.give_back(table, buffer)

    def _await_values(self, table: str, first: int) -> None:
        self.node.calls.ask_all(
            lambda number: AwaitValues(number, table), f"worker {first} to give the first values of table '{table}'"
        )


def first_values(init: float | Tensor | First, spec: TableSpec, shape: tuple[int, ...]) -> Tensor:
    """Return the first values of a dense table as a flat tensor.

    Raises:
        UsageError: `init` has another shape, or is for rows.
    """
    if isinstance(init, First):
        raise UsageError(f"table '{spec.name}': init is {init}, which is for rows; give a number or a tensor.")
    given = as_values(init, torch_dtype(spec), f"table '{spec.name}'", "init")
    try:
        return torch.empty(shape, dtype=torch_dtype(spec)).copy_(given).view(-1)
    except RuntimeError as error:
        raise UsageError(f"table '{spec.name}': init has shape {tuple(given.shape)}, expected {shape}.") from error
