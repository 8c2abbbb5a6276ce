"""Model tensors that follow their table: copies of its values, or views of the servers' shared memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from paceline.training.device_copies import DeviceCopies
from paceline.training.flat import FlatParameters
from paceline.worker.cache import Readable, TableCache
from paceline.worker.table import Table

_ALIGNMENT_BYTES = 64  # of torch's own tensors; kernels on others are slower, and may round differently


@dataclass(slots=True, weakref_slot=True, eq=False)
class Weights:
    """Tensors that are set to the values of a table, again and again.

    Where the worker's cache of the table is live shared memory, a tensor becomes a view of it, if its values are
    contiguous and aligned there and no other tensor shared the tensor's storage. Then a fetch copies nothing. Writes of
    a script to a tensor are lost with the next fetch, view or not. When this object is dropped, the tensors and all
    that shares memory with them keep their values.
    """

    flat: FlatParameters
    table: Table
    device_copies: DeviceCopies = field(default_factory=DeviceCopies)
    # Tensors that were made views, by index, with the address of each: a script may have replaced its memory since.
    _viewing: dict[int, int] = field(default_factory=dict[int, int])
    _places: tuple[int, ...] = ()
    _values: Readable | None = None  # of the last fetch
    _slices: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # of these, for tensors that are copies
    # Torch's version of each view after the last fetch, which counts changes in place.
    _versions: dict[int, int] = field(default_factory=dict[int, int])
    _viewed: TableCache | None = None  # the cache whose memory tensors view, or have viewed
    # Whether a script has written to views since the last fetch; set by `check_views`.
    _written: bool | None = None
    _set_aside: list[Tensor] | None = None  # what the tensors are outside of `newest`, while that has replaced it
    _are_on_device: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look where the tensors are."""
        self._are_on_device = any(map(self.device_copies.serves, self.flat.tensors))

    def __del__(self) -> None:
        """Stop changing tensors that live longer than this object."""
        self.detach()

    @property
    def are_views(self) -> bool:
        """Return whether some of the tensors are views of the servers' memory."""
        return bool(self._viewing)

    def fetch(self, *, refresh: bool) -> None:
        """Set the tensors to the values of the table; blocks until these are fresh enough."""
        self.table.read(self.set_from, refresh=refresh)

    def check_views(self) -> None:
        """Check for writes of a script to views while there is time; the script does not run until the next fetch."""
        # Without the lock, so that answers of servers are handled meanwhile.
        self._written = self._was_written(self.table.client.cache)

    def _was_written(self, cache: TableCache) -> bool:
        """Return whether a script has written to views: torch counts most changes, the kernel shows the rest."""
        tensors = self.flat.tensors
        for index, version in self._versions.items():
            if tensors[index]._version != version:
                return True
        return cache.was_written(list(self._viewing.values()))

    @contextmanager
    def newest(self) -> Generator[None]:
        """Set the tensors to the newest values for the length of a `with` block, and then back.

        The values contain every update of all clocks below the worker's own, or without a staleness bound all that have
        arrived. Blocks until they are there.
        """
        tensors = self.flat.tensors
        newest: list[Tensor] = []
        written: dict[int, Tensor] = {}

        def take(cache: TableCache) -> None:
            if cache.was_written_anywhere():
                written.update({index: tensors[index].data.clone() for index in self._views()})
                cache.reread()
            values = cache.readable()
            for tensor, (start, stop) in zip(tensors, self.flat.bounds, strict=True):
                newest.append(torch.empty_like(tensor).copy_(values.slice(start, stop).view(tensor.shape)))

        self.table.read(take, exact=self.table.consistency.bound is not None)
        held = [tensor.data for tensor in tensors]
        before, self._set_aside = self._set_aside, self._set_aside or held
        for tensor, data in zip(tensors, newest, strict=True):
            tensor.data = data
        try:
            yield
        finally:
            self._set_aside = before
            for tensor, data in zip(tensors, held, strict=True):
                tensor.data = data
            for index, data in written.items():
                tensors[index].data.copy_(data)

    def pack_own(self, out: Tensor) -> None:
        """Copy the tensors into a flat vector, inside `newest` too as they are outside of it."""
        own = [tensor.data for tensor in self.flat.tensors] if self._set_aside is None else self._set_aside
        for tensor, part in zip(own, self.flat.parts(out), strict=True):
            part.copy_(tensor)

    def hold(self) -> None:
        """Replace views by copies until the next fetch, so that writes of servers do not show before."""
        tensors = self.flat.tensors
        for index in self._views():
            tensors[index].data = tensors[index].data.clone()

    def detach(self) -> None:
        """Replace views by private memory: no other process changes the tensors from now on."""
        viewed, self._viewed = self._viewed, None
        if viewed is not None:  # without the node's lock, because the garbage collector may call this anywhere
            viewed.keep()
        self._viewing.clear()
        self._slices.clear()
        self._places, self._values = (), None

    def _views(self) -> list[int]:
        """Return the indices of the tensors that are views now."""
        tensors = self.flat.tensors
        return [index for index, address in self._viewing.items() if tensors[index].data_ptr() == address]

    def set_from(self, cache: TableCache) -> None:
        """Set the tensors to the values in a cache of their table."""
        if self._written or (self._written is None and self._was_written(cache)):
            cache.reread()
        self._written = None
        if self._are_on_device and cache.memory is not None:
            self.device_copies.lock(cache, cache.memory)
        values, tensors = cache.readable(), self.flat.tensors
        if values is not self._values:
            places = values.places
            if places != self._places:
                self._viewing.clear()
            self._values, self._places = values, places
            self._slices.clear()
        for index, address in list(self._viewing.items()):
            if tensors[index].data_ptr() != address:  # the script has given it other memory
                del self._viewing[index]
        if len(self._viewing) < len(tensors):
            self._fill_others(cache, values)
        if self._viewing:
            self._viewed = cache
            increment_version([tensors[index] for index in self._viewing])  # tells autograd of the change
        self._versions = {index: tensors[index]._version for index in self._viewing}
        for reading in self.device_copies.queued() if self._are_on_device else ():
            cache.note_device_read(reading)

    @torch.no_grad()
    def _fill_others(self, cache: TableCache, values: Readable) -> None:
        """Set the tensors that are not views."""
        for index, (tensor, (start, stop)) in enumerate(zip(self.flat.tensors, self.flat.bounds, strict=True)):
            if index in self._viewing:
                continue
            known = self._slices.get(index)
            if known is not None and known.shape == tensor.shape:
                tensor.copy_(known)
                continue
            live = cache.live and values.lie_together(start, stop)
            own = values.slice(start, stop)
            self._fill(index, tensor, own, live=live)
            if live and own.data_ptr() % _ALIGNMENT_BYTES:  # it never becomes a view, and lies there for long
                self._slices[index] = own.view(tensor.shape)

    def _fill(self, index: int, tensor: Tensor, values: Tensor, *, live: bool) -> None:
        """Copy values into a tensor, or make it a view of them."""
        if live and _can_view(tensor, values):
            tensor.data = _alone(values).view(tensor.shape)
            self._viewing[index] = values.data_ptr()
        elif self._are_on_device and self.device_copies.serves(tensor):
            self.device_copies.deliver(values.view(tensor.shape), tensor)
        else:
            tensor.copy_(values.view(tensor.shape))


def _can_view(tensor: Tensor, values: Tensor) -> bool:
    """Return whether a tensor may become a view of these live values: it must be alone in its current storage."""
    return (
        values.data_ptr() % _ALIGNMENT_BYTES == 0  # first, as it is cheap and often decides
        and tensor.device.type == "cpu"
        and tensor.dtype == values.dtype
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not tensor.is_shared()
    )


def _alone(values: Tensor) -> Tensor:
    """Return the same memory as a storage of its own, so that saving the tensor saves nothing around it."""
    if not values.numel():
        return values.new_empty(0)
    return torch.frombuffer(values.view(torch.uint8).numpy(), dtype=values.dtype)
