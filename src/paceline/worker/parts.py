"""The user's handle of a dense table of named parts: one push, one update and one read for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.calls import checked_late, shortened
from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.torch_private import flatten_tensors
from paceline.update.dtypes import torch_dtype
from paceline.update.table import Hyper, TableSpec
from paceline.worker.dense import PendingRead
from paceline.worker.pushes import PushOutcome
from paceline.worker.table import Array, Table
from paceline.worker.validation import as_values, brief

_Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]  # in flat memory: shape, strides, start


@dataclass(slots=True)
class PartedTable:
    """One table whose values are several named tensors, which move together at the cost of one.

    A push is applied whole or not at all, and a read has all parts as of one moment. A part that all pushes of an
    update leave out stays as it is, with its state; one that some leave out is zero in these.

    Example:
        >>> import paceline
        >>> with paceline.connect() as ps:
        ...     layer = ps.table("layer", shape={"weight": (2, 2), "bias": (2,)}, update=paceline.update.SGD(lr=0.5))
        ...     _ = layer.push({"weight": torch.ones(2, 2), "bias": [1.0, 2.0]})
        ...     _ = ps.clock()
        ...     layer.pull()["bias"]
        tensor([-0.5000, -1.0000])
    """

    whole: Table  # its values one after the other
    _places: dict[str, _Place] = field(init=False)

    def __post_init__(self) -> None:
        """Find the place of each part."""
        spec = self.whole.spec
        self._places = {
            part.name: (part.shape, torch.empty(part.shape, device="meta").stride(), start)
            for part, start in zip(spec.segments, spec.offsets, strict=True)
        }

    def __repr__(self) -> str:
        spec = self.whole.spec
        return (
            f"PartedTable({shortened(repr(spec.name))}, {len(spec.segments)} parts of {spec.dtype}, {spec.consistency})"
        )

    @property
    def name(self) -> str:
        """Name of the table, unique in the job."""
        return self.whole.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each part."""
        return {part.name: part.shape for part in self.whole.spec.segments}

    @property
    def consistency(self) -> Consistency:
        """When reads of this table wait, and what they see."""
        return self.whole.consistency

    @checked_late
    def push(
        self,
        gradients: Mapping[str, Array | Sequence[float]],
        *,
        samples: float = 1.0,
        hyper: tuple[Hyper, ...] = (),
    ) -> Future[PushOutcome]:
        """Send an update of some parts or all, made during the current clock; blocks as `Table.push` does.

        Args:
            gradients: of each part by name, of its shape; converted to the table's dtype, and copied.
            samples: as in `Table.push`.
            hyper: as in `Table.push`.

        Returns:
            A future of whether the update was applied to all of these parts, or why it was refused.

        Raises:
            UsageError: no such part, a wrong shape, or values that are not finite in a table with nonfinite="halt".
            PeerError: a server is gone.
        """
        with self.whole.metrics.communicating():
            flat, absent = join_parts(self.whole.spec, gradients, self._here, "a push")
            return self.whole.push(flat, samples=samples, absent=absent, hyper=hyper)

    @checked_late
    def pull(self, *, refresh: bool = True, exact: bool = False) -> dict[str, Tensor]:
        """Return the values of all parts by name, in new memory that they share; blocks as `Table.pull` does.

        Raises:
            DeadlineExceeded: the values did not become fresh enough in time.
            PeerError: a server is gone, or this worker was given up.
        """
        return self.cut(self.whole.pull(refresh=refresh, exact=exact))

    def start_read(self, *, more: bool = False) -> PendingRead:
        """Start a read for `finish_pull`; see `Table.start_read`."""
        return self.whole.start_read(more=more)

    def finish_pull(self, started: PendingRead) -> dict[str, Tensor]:
        """Finish a read that `start_read` started, and return the values; blocks as `pull` does."""
        return self.cut(self.whole.finish_pull(started))

    def cut(self, values: Tensor) -> dict[str, Tensor]:
        """Return the parts of a flat tensor, as views."""
        return {name: values.as_strided(*place) for name, place in self._places.items()}

    def _here(self) -> str:
        return f"table '{self.name}', worker {self.whole.metrics.worker}, clock {self.whole.node.clock}"


@torch.no_grad()
def join_parts(
    spec: TableSpec, given: Mapping[str, Array | Sequence[float]], here: Callable[[], str], what: str
) -> tuple[Tensor, tuple[int, ...]]:
    """Return numbers by part as one flat tensor of a table, and the indices of parts that are left out, zero there.

    Args:
        spec: of the table.
        given: by the name of a part, numbers of its shape.
        here: returns which table, worker and clock, for messages.
        what: the name that messages give the numbers.

    Raises:
        UsageError: no part has such a name, or what is given for one does not fit it.
    """
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"{here()}: {what} is {brief(given)}, expected a dict of numbers by part.")
    dtype, pieces, absent = torch_dtype(spec.dtype), list[Tensor](), list[int]()
    for index, part in enumerate(spec.segments):
        if part.name not in given:
            absent.append(index)
            pieces.append(torch.zeros(part.shape, dtype=dtype))
            continue
        numbers = given[part.name]
        if not (type(numbers) is Tensor and numbers.dtype == dtype and numbers.is_cpu and not numbers.is_sparse):
            numbers = as_values(numbers, dtype, here(), f"part '{part.name}' of {what}")
        if numbers.shape != part.shape:
            raise UsageError(
                f"{here()}: part '{part.name}' of {what} has shape {tuple(numbers.shape)}, expected {part.shape}."
            )
        pieces.append(numbers)
    if len(given) + len(absent) > len(spec.segments):
        names = [part.name for part in spec.segments]
        unknown = next(name for name in given if name not in names)
        raise UsageError(f"{here()}: {what} has {brief(unknown)}, expected names of parts: {brief(names)}.")
    return flatten_tensors(pieces), tuple(absent)
