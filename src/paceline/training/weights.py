"""The tensors of a model as they follow their table: copies of its values, or views of the servers' own memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from paceline.node.mirror import Mirror, Readable
from paceline.node.table import Table
from paceline.training.flat import Flat
from paceline.transport.peer_memory import any_written

_ALIGNMENT_BYTES = 64  # where torch puts tensors of its own: elsewhere kernels are slower, and may round differently


@dataclass(slots=True)
class Weights:
    """Tensors that are filled from a table, again and again.

    Where the worker's copy of the table is live, a tensor becomes a view of it, if it lies in one piece there and well
    aligned. Then a fetch copies nothing. What a script writes to a tensor is gone with the next fetch, view or not.
    """

    flat: Flat
    table: Table
    # Those that are views, by index, with the version each had after the last fetch: another says it was written to.
    _viewing: dict[int, int] = field(default_factory=dict[int, int])
    _places: tuple[int, ...] = ()

    def fetch(self, *, refresh: bool) -> None:
        """Set the tensors to the values of the table; blocks until these are fresh enough."""
        self.table.read(self._take, refresh=refresh)

    @contextmanager
    def newest(self) -> Generator[None]:
        """Let the tensors hold the newest values for the length of a `with` block, and then what they held.

        The values contain every update of all clocks below the worker's own, or where nothing bounds reads, all that
        have arrived. Blocks until they are there.
        """
        tensors = list(self.flat.named.values())
        newest: list[Tensor] = []

        def take(mirror: Mirror) -> None:
            values = mirror.readable()
            for tensor, (start, stop) in zip(tensors, self.flat.bounds, strict=True):
                newest.append(torch.empty_like(tensor).copy_(values.slice(start, stop).view(tensor.shape)))

        self.table.read(take, exact=self.table.consistency.bound is not None)
        held = [tensor.data for tensor in tensors]
        for tensor, data in zip(tensors, newest, strict=True):
            tensor.data = data
        try:
            yield
        finally:
            for tensor, data in zip(tensors, held, strict=True):
                tensor.data = data

    def detach(self) -> None:
        """Give every view memory of its own: nobody else changes the tensors from now on."""
        tensors = list(self.flat.named.values())
        for index in self._viewing:
            tensors[index].data = tensors[index].data.clone()
        self._viewing.clear()
        self._places = ()

    def _take(self, mirror: Mirror) -> None:
        values = mirror.readable()
        if mirror.live and self._was_written():
            mirror.reread()
        if not mirror.live or values.places != self._places:
            self._viewing.clear()
        with torch.no_grad():
            for index, (tensor, (start, stop)) in enumerate(
                zip(self.flat.named.values(), self.flat.bounds, strict=True)
            ):
                if index not in self._viewing:
                    live = mirror.live and values.lie_together(start, stop)
                    self._fill(index, tensor, values.slice(start, stop), live=live)
        self._note(values)

    def _fill(self, index: int, tensor: Tensor, values: Tensor, *, live: bool) -> None:
        """Copy values into a tensor, or make it a view of them."""
        if live and _can_view(tensor, values):
            tensor.data = values.view(tensor.shape)
            self._viewing[index] = 0
        else:
            tensor.copy_(values.view(tensor.shape))

    def _note(self, values: Readable) -> None:
        """Let autograd know that the views have changed, and remember their state."""
        tensors = list(self.flat.named.values())
        self._places = values.places
        if self._viewing:
            increment_version([tensors[index] for index in self._viewing])
        for index in self._viewing:
            self._viewing[index] = tensors[index]._version

    def _was_written(self) -> bool:
        """Say whether a script has written to one of the views: torch knows of most, the kernel of the rest."""
        tensors = list(self.flat.named.values())
        if any(tensors[index]._version != version for index, version in self._viewing.items()):
            return True
        return any_written(tensors[index].data_ptr() for index in self._viewing)


def _can_view(tensor: Tensor, values: Tensor) -> bool:
    """Say whether a tensor may be a view of these live values, which are alone in their memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and values.data_ptr() % _ALIGNMENT_BYTES == 0
