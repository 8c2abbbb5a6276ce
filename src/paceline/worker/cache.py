"""A worker's cache of a dense table: the last values received, and own updates that they do not contain yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec
import torch
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.partition import Range, holders
from paceline.errors import PeerError
from paceline.transport.base import EMPTY
from paceline.transport.buffers import fresh_buffer
from paceline.transport.segments import PeerMemory
from paceline.update.dtypes import torch_dtype
from paceline.update.named_rules import scales_pushes
from paceline.update.placement import as_tensor
from paceline.update.table import Hyper, TableSpec


@dataclass(slots=True)
class _Own:
    """One own update; `missing` are the servers whose values lack it."""

    change: Tensor
    missing: set[int]


class Readable(msgspec.Struct, frozen=True):
    """Values of a table in place: (first element, tensor) of each contiguous part, in order."""

    parts: tuple[tuple[int, Tensor], ...]

    def slice(self, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop`: a view if they are contiguous, else a copy."""
        found = self._pieces(start, stop)
        if start == stop:  # a parameter without elements may lie at either end of a part
            return self.parts[0][1][:0]
        return found[0] if len(found) == 1 else torch.cat(found)

    def lie_together(self, start: int, stop: int) -> bool:
        """Return whether the elements from `start` to `stop` are contiguous in memory."""
        return start == stop or len(self._pieces(start, stop)) == 1

    def _pieces(self, start: int, stop: int) -> list[Tensor]:
        return [
            values[max(start - first, 0) : stop - first]
            for first, values in self.parts
            if first < stop and start < first + values.numel()
        ]

    @property
    def places(self) -> tuple[int, ...]:
        """The addresses of the parts: while these stay the same, so do views of live values."""
        return tuple(values.data_ptr() for _, values in self.parts)


class DeviceRead(Protocol):
    """An asynchronous read of values by a device."""

    def query(self) -> bool:
        """Return whether it is done."""
        ...

    def synchronize(self) -> None:
        """Block until it is done."""
        ...


@dataclass(slots=True, weakref_slot=True, eq=False)
class TableCache:
    """The cache of one dense table. Used under the lock of the worker node.

    With `reads_own_writes`, a read adds the worker's own updates that the cache lacks. That needs a rule whose effect
    the worker can compute itself: addition, and plain SGD. With `live` nothing is copied: servers send references to
    their own memory, in which values change as updates are applied.
    """

    spec: TableSpec
    spans: tuple[Range, ...]
    reads_own_writes: bool
    live: bool = False
    # The last values of each server. Invariant: unless live, these are the parts of one flat tensor.
    _parts: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _bodies: dict[int, memoryview] = field(default_factory=dict[int, memoryview])  # of a live copy, by server
    _flat: Tensor | None = None
    _memory: memoryview = EMPTY  # of the flat tensor
    _readable: Readable | None = None  # without own updates, until parts lie elsewhere
    consistency: Consistency = field(init=False)
    servers: tuple[int, ...] = field(init=False)  # that hold a part of the table; server 0 if it has no elements at all
    _own: dict[int, _Own] = field(default_factory=dict[int, _Own])
    lent: bool = False  # whether a script was given a view of live values, which it may keep
    # Reads of the flat tensor by devices, which may have ended.
    _device_reads: list[DeviceRead] = field(default_factory=list[DeviceRead])

    def __post_init__(self) -> None:
        """Start with zeros; no read ends before the first values have arrived."""
        self.consistency = Consistency.parse(self.spec.consistency)
        self.servers = holders(self.spans)
        if not self.live:
            dtype = torch_dtype(self.spec.dtype)
            self._memory = fresh_buffer(self.spec.numel * dtype.itemsize)
            self._flat = as_tensor(self._memory, dtype)
            self._parts = {server: self.part(self._flat, server) for server in self.servers}

    def part(self, flat: Tensor, server: int) -> Tensor:
        """Return a server's part of a flat tensor, as a view."""
        return flat[self.spans[server].start : self.spans[server].stop]

    def part_bytes(self, server: int) -> int:
        """Return how many bytes the values of a server's part have."""
        return self.spans[server].length * torch_dtype(self.spec.dtype).itemsize

    def receive_buffer(self, server: int, size_bytes: int) -> memoryview | None:
        """Return the memory of a server's part, to receive values into; None if that is not allowed.

        It is allowed where values change only while all workers wait for them: then no thread reads them meanwhile.
        """
        if self.live or not self.consistency.lockstep or size_bytes != self._parts[server].nbytes:
            return None
        self._wait_for_devices()
        span, item = self.spans[server], self._parts[server].itemsize
        return self._memory[span.start * item : span.stop * item]

    def install(self, server: int, body: memoryview, settled: int, includes: tuple[int, ...]) -> None:
        """Store values from a server, which contain own pushes below `settled` and those in `includes`."""
        if self.live and not self._own and body is self._bodies.get(server):
            return  # the same memory, with other values
        values = as_tensor(body, torch_dtype(self.spec.dtype))
        if values.numel() != self.spans[server].length:
            raise PeerError(
                f"server {server} sent {values.nbytes} bytes as its part of table '{self.spec.name}', expected "
                f"{self.spans[server].length * values.itemsize}"
            )
        if self.live:
            self._parts[server], self._bodies[server] = values, body
            self._readable = None
        elif values.data_ptr() != self._parts[server].data_ptr():
            self._wait_for_devices()
            self._parts[server].copy_(values)
        for seq, own in list(self._own.items()):
            if seq < settled or seq in includes:
                own.missing.discard(server)
            if not own.missing:
                del self._own[seq]

    @property
    def memory(self) -> Tensor | None:
        """The memory of this process that holds the values; None where they are live."""
        return self._flat

    def note_device_read(self, read: DeviceRead) -> None:
        """Keep the values in `memory` unchanged until this read is done; the thread with new values waits for it."""
        self._device_reads = [*(other for other in self._device_reads if not other.query()), read]

    def _wait_for_devices(self) -> None:
        """Wait for all reads by devices; the threads of several servers may do so at once, and each has to."""
        for read in self._device_reads:
            read.synchronize()

    def note_own(self, seq: int, gradient: Tensor, absent: tuple[int, ...], hyper: tuple[Hyper, ...]) -> None:
        """Remember an own update until the values contain it."""
        groups = hyper or self.spec.rule.groups
        if self.reads_own_writes and all(scales_pushes(self.spec.rule.name, group) for group in groups):
            self._own[seq] = _Own(_change(self.spec, gradient, absent, groups), set(self.servers))

    def forget_own(self, seq: int) -> None:
        """Forget an own update that was refused: no values will contain it."""
        self._own.pop(seq, None)

    def read_into(self, out: Tensor) -> None:
        """Copy the values, plus own updates that they lack, into a flat tensor."""
        for server, values in self._parts.items():
            self.part(out, server).copy_(values)
        for own in self._own.values():
            for server in own.missing:
                self.part(out, server).add_(self.part(own.change, server))

    def was_written(self, at: Sequence[int] = ()) -> bool:
        """Return whether this process may have written to live values; see `PeerMemory.was_written`."""
        for body in list(self._bodies.values()):
            if isinstance(body.obj, PeerMemory) and body.obj.was_written(at):
                return True
        return False

    def shows_writes(self, address: int, size_bytes: int) -> bool:
        """Return whether the kernel shows writes of this process to live values at an address, or on pages of these."""
        return any(memory.shows_writes(address, size_bytes) for memory in self._peer_memory())

    def was_written_anywhere(self) -> bool:
        """Return whether this process has written to live values, after checking every page."""
        return any(memory.was_written_anywhere() for memory in self._peer_memory())

    def forget_writes(self) -> None:
        """Discard what this process has written to live values, if anything; takes 1 ms for 100 MB."""
        if self.was_written_anywhere():
            self.reread()

    def reread(self) -> None:
        """Discard what this process has written to live values."""
        for memory in self._peer_memory():
            memory.reread()

    def keep(self) -> None:
        """Replace live values by private memory at the same addresses: other processes no longer change them."""
        for memory in self._peer_memory():
            memory.keep()

    def _peer_memory(self) -> list[PeerMemory]:
        return [body.obj for body in list(self._bodies.values()) if isinstance(body.obj, PeerMemory)]

    def readable(self) -> Readable:
        """Return the values, with own updates, without a copy where possible.

        It is the same object as long as the values lie in the same memory. Use them under the lock; live memory stays
        mapped as long as a view of it exists.
        """
        if self._own:
            whole = torch.empty(self.spec.numel, dtype=torch_dtype(self.spec.dtype))
            self.read_into(whole)
            return Readable(((0, whole),))
        if self._readable is None:
            live = tuple((self.spans[server].start, self._parts[server]) for server in self.servers)
            self._readable = Readable(live if self._flat is None else ((0, self._flat),))
        return self._readable


def can_replay(spec: TableSpec, consistency: Consistency) -> bool:
    """Return whether a worker can compute the effect of its own pushes on this table."""
    at_once = consistency.visible == "on_arrival" and spec.rule.quorum is None
    return at_once and all(scales_pushes(spec.rule.name, group) for group in spec.rule.groups)


def _change(spec: TableSpec, gradient: Tensor, absent: tuple[int, ...], groups: tuple[Hyper, ...]) -> Tensor:
    """Return what a push of this gradient adds to the values."""
    change = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if spec.nonfinite == "zero" else gradient.clone()
    for index, (segment, start) in enumerate(zip(spec.segments, spec.offsets, strict=True)):
        part = change[start : start + segment.numel]
        if index in absent:
            part.zero_()
        elif spec.rule.name != "add":
            part.mul_(-cast("float", groups[segment.group]["lr"]))
    return change
