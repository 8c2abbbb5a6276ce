"""Transport within one process: for a worker alone and its server, for threads that play several, and for tests."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Final, NamedTuple, final

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.transport.accept_queue import AcceptQueue
from paceline.transport.base import EMPTY, NO_IDENTITY, AllocateBody, Frame, Limits, check_identity, strip_scheme
from paceline.transport.buffers import check_size, copied, destination, flat, fresh_buffer, map_private
from paceline.transport.deadline import seconds
from paceline.transport.segments import MemoryRegion, MemoryRegions, PeerMemory, Segments, create_memory

# A sender waits while this much is unread, as with a full socket. Only copied bodies count, not the senders' memory.
_MAX_UNREAD_FRAMES: Final = 4096
_MAX_UNREAD_BYTES: Final = 32 << 20


class _Packed(NamedTuple):
    """A frame under way, how many of its bytes were copied, and where in the sender's memory its body lies, if so."""

    frame: Frame
    num_copied: int = 0
    shared: tuple[MemoryRegion, int] | None = None


@final
class _Event:
    """An event of the kernel that lives as long as this object, so that no thread sets one that is closed already."""

    def __init__(self) -> None:
        self.descriptor: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        """Free the descriptor."""
        os.close(self.descriptor)

    def set(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor not readable."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


@final
class _FrameQueue:
    """The frames under way in one direction."""

    def __init__(self) -> None:
        self.frames: deque[_Packed] = deque()  # each is appended and taken at once, under the lock
        self._num_unread = 0  # the sum of the bytes that were copied for these frames
        self._changed = threading.Condition()
        self._num_waiting = 0  # threads
        self._over = False
        # Made on demand. Set while there are frames or the end, and at times when there are none any more.
        self._event: _Event | None = None

    def put(self, frames: Sequence[_Packed], timeout_s: float) -> None:
        """Wait for room, then add frames.

        Raises TimeoutError, or EOFError once the queue has ended.
        """
        with self._changed:
            if not self.has_room() and not self._wait_for(self.has_room, timeout_s):
                raise TimeoutError
            if self._over:
                raise EOFError
            event = None if self.frames else self._event
            for packed in frames:
                self.frames.append(packed)
                self._num_unread += packed.num_copied
            if self._num_waiting:
                self._changed.notify_all()
        if event is not None:
            event.set()  # without the lock, which the thread that this wakes takes at once

    def get(self, timeout_s: float) -> _Packed:
        """Wait for a frame; raises TimeoutError, or EOFError once the queue has ended and is empty."""
        with self._changed:
            if not self.frames and not self._wait_for(self._has_news, timeout_s):
                self._clear_event()  # which was set late, for a frame that was read before
                raise TimeoutError
            if not self.frames:
                raise EOFError
            packed = self.frames.popleft()
            self._num_unread -= packed.num_copied
            if self._event is not None and not self.frames and not self._over:
                self._event.clear()
            if self._num_waiting:
                self._changed.notify_all()
            return packed

    def has_room(self) -> bool:
        """Return whether `put` would not wait."""
        return self._over or (len(self.frames) < _MAX_UNREAD_FRAMES and self._num_unread < _MAX_UNREAD_BYTES)

    def end(self) -> None:
        """Accept no more frames; those in the queue may still be read."""
        with self._changed:
            self._end()

    def drop(self) -> None:
        """End, and drop unread frames; called by the reader."""
        with self._changed:
            self.frames.clear()
            self._num_unread = 0
            self._end()
            self._event = None

    def fileno(self) -> int | None:
        """Return the descriptor of an event that is set while `get` would not wait; None once it was dropped."""
        event = self._event
        if event is not None:
            return event.descriptor
        with self._changed:
            if self._event is None and not self._over:
                self._event = _Event()
                if self.frames:
                    self._event.set()
            return None if self._event is None else self._event.descriptor

    def _end(self) -> None:
        self._over = True
        if self._event is not None:
            self._event.set()
        self._changed.notify_all()

    def _wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        self._num_waiting += 1
        try:
            return self._changed.wait_for(is_so, timeout_s)
        finally:
            self._num_waiting -= 1

    def _clear_event(self) -> None:
        if self._event is not None:
            self._event.clear()

    def _has_news(self) -> bool:
        return self._over or bool(self.frames)


@final
class _Mappings:
    """Private mappings of the other end's memory, each for as long as that lives. Used by the thread that receives."""

    def __init__(self) -> None:
        # By the number of a region; with the last view of it, by offset and size.
        self._mapped: dict[int, tuple[PeerMemory, weakref.ref[object], dict[tuple[int, int], memoryview]]] = {}
        self._freed: deque[int] = deque()

    def view(self, body: memoryview, region: MemoryRegion, offset: int) -> memoryview:
        """Return a view of a body that lies in a region; a copy if the region cannot be mapped."""
        while self._freed:
            self._mapped.pop(self._freed.popleft(), None)
        number, freed = region.number, self._freed
        found = self._mapped.get(number)  # once: another thread may close the connection
        place = offset, body.nbytes
        if found is not None and (known := found[2].get(place)) is not None:
            return known
        if found is None:
            owner = region.mapping()
            assert owner is not None, "the body keeps it alive"
            assert region.descriptor is not None, "it is shared memory"
            try:
                mapping = PeerMemory.of(region.descriptor, region.size_bytes)
            except OSError:
                return copied(body)
            found = self._mapped[number] = mapping, weakref.ref(owner, lambda _: freed.append(number)), {}
        found[2].clear()
        view = found[2][place] = memoryview(found[0])[offset : offset + body.nbytes]
        return view

    def clear(self) -> None:
        """Drop the mappings; memory with existing views lives until these are dropped."""
        self._mapped.clear()


@final
class MemoryConnection:
    """One end of a connection: two queues, one for each direction."""

    def __init__(
        self,
        peer: str,
        identity: bytes,
        outgoing: _FrameQueue,
        incoming: _FrameQueue,
        limits: Limits,
        regions: MemoryRegions | Segments,
    ) -> None:
        self.peer: Final = peer
        self.identity: Final = identity
        self.peer_identity: Final = NO_IDENTITY
        self._outgoing = outgoing
        self._incoming = incoming
        self._limits = limits
        self._find = regions.regions.find if isinstance(regions, Segments) else regions.find
        self._mappings = _Mappings() if isinstance(regions, Segments) else None

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame; see `Connection.send`."""
        try:
            self._outgoing.put([self._pack(header, body)], timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"waited {seconds(timeout_s)} for {self.peer} to take a frame") from None
        except EOFError:
            raise self._lost() from None

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        """Send frames together; see `Connection.try_send`."""
        if not self._outgoing.has_room():
            return False
        try:
            self._outgoing.put([self._pack(header, body) for header, body in frames], 0.0)
        except TimeoutError:
            return False
        except EOFError:
            raise self._lost() from None
        return True

    def has_room(self, body: memoryview) -> bool:
        """Return whether fewer frames and bytes than the limits are unread; see `Connection.has_room`."""
        return self._outgoing.has_room()

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        """Wait for the next frame; see `Connection.receive`."""
        try:
            packed = self._incoming.get(timeout_s)
            return self._placed(packed, place) if packed.frame.body.nbytes else packed.frame
        except TimeoutError:
            raise DeadlineExceeded(f"waited {seconds(timeout_s)} for a frame from {self.peer}; none came") from None
        except EOFError:
            raise self._lost() from None
        except PeerError:
            self.close()
            raise

    def has_frame(self) -> bool:
        """Return whether a frame waits; see `Connection.has_frame`."""
        return bool(self._incoming.frames)

    def fileno(self) -> int | None:
        """Return a descriptor to wait for; see `Connection.fileno`."""
        return self._incoming.fileno()

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        self._outgoing.end()
        self._incoming.drop()
        if self._mappings is not None:
            self._mappings.clear()

    def _pack(self, header: bytes, body: memoryview) -> _Packed:
        """Return a frame that is independent of `body` unless that is shared."""
        if len(header) > self._limits.max_header_bytes or body.nbytes > self._limits.max_body_bytes:
            raise UsageError(
                f"a frame with a header of {len(header)} and a body of {body.nbytes} bytes is over the limits"
            )
        if not body.nbytes:
            return _Packed(Frame(bytes(header), EMPTY))
        if body.format != "B" or body.ndim != 1 or not body.contiguous:
            body = flat(body)
        shared = self._find(body)
        if shared is not None:
            return _Packed(Frame(bytes(header), body[:]), shared=shared)
        return _Packed(Frame(bytes(header), copied(body)), body.nbytes)

    def _placed(self, packed: _Packed, place: AllocateBody | None) -> Frame:
        """Copy a body that is not the sender's memory to the memory that `place` gives."""
        frame, _, shared = packed
        if shared is not None:
            return frame if self._mappings is None else Frame(frame.header, self._mappings.view(frame.body, *shared))
        found = destination(place, frame.header, frame.body.nbytes)
        if found is None:
            return frame
        memory, buffer = found
        memory[:] = frame.body
        return Frame(frame.header, memory, buffer)

    def _lost(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self.peer} is over: one side closed it")


@final
class MemoryListener:
    """A listener for the threads of this process."""

    def __init__(self, address: str, transport: "MemoryTransport") -> None:
        self.address: Final = address
        self._transport = transport
        self._arrived = AcceptQueue[MemoryConnection](address)

    def accept(self, *, timeout_s: float) -> MemoryConnection:
        """Wait for the next connection; see `Listener.accept`."""
        return self._arrived.accept(timeout_s=timeout_s)

    def close(self) -> None:
        """Stop listening; see `Listener.close`."""
        self._arrived.close()
        self._transport.forget(self)

    def offer(self, connection: MemoryConnection) -> bool:
        """Hand over the listening side's end; False when closed."""
        return self._arrived.put(connection)


@final
class MemoryTransport:
    """Carries frames between threads; only connections made through the same instance meet.

    With `maps`, an allocated body arrives as a private mapping, as between processes; else as the memory itself. When
    shared memory is not available, such bodies are copied.

    >>> transport = MemoryTransport()
    >>> listener = transport.listen("memory://server-0")
    >>> worker = transport.connect(listener.address, b"worker 3", timeout_s=1)
    >>> server = listener.accept(timeout_s=1)
    >>> worker.send(b"push", memoryview(b"gradient"), timeout_s=1)
    >>> server.identity, server.receive(timeout_s=1).header
    (b'worker 3', b'push')
    """

    def __init__(self, limits: Limits | None = None, *, maps: bool = False) -> None:
        self.name: Final = "memory"
        self.maps_memory: Final = maps  # else receivers get the memory itself, and could write to it
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._listeners: dict[str, MemoryListener] = {}
        self._numbers = count()
        self._regions = Segments(create_memory, lambda _: None) if maps else MemoryRegions()

    def allocate(self, size_bytes: int) -> memoryview:
        """Give memory whose views are sent as they are; see `Transport.allocate`."""
        if isinstance(self._regions, Segments):
            return self._regions.allocate(size_bytes)
        check_size(size_bytes)
        if size_bytes == 0:
            return fresh_buffer(0)
        mapping = map_private(size_bytes)
        self._regions.add(mapping)
        return memoryview(mapping)

    def listen(self, address: str) -> MemoryListener:
        """Open a listener under a name; raises UsageError when the name is taken."""
        full = f"memory://{strip_scheme(address, self.name)}"
        listener = MemoryListener(full, self)
        with self._lock:
            if full in self._listeners:
                raise UsageError(f"{full} is taken: close its listener first or choose another name")
            self._listeners[full] = listener
        return listener

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> MemoryConnection:
        """Connect to a name; never waits. Raises PeerError when it has no listener."""
        check_identity(identity)
        full = f"memory://{strip_scheme(address, self.name)}"
        with self._lock:
            listener = self._listeners.get(full)
            number = next(self._numbers)
        there, back = _FrameQueue(), _FrameQueue()
        accepted = MemoryConnection(f"memory client {number}", identity, back, there, self._limits, self._regions)
        if listener is None or not listener.offer(accepted):
            raise PeerError(f"no listener at {full}")
        return MemoryConnection(full, identity, there, back, self._limits, self._regions)

    def forget(self, listener: MemoryListener) -> None:
        """Free the name of a closed listener."""
        with self._lock:
            if self._listeners.get(listener.address) is listener:
                del self._listeners[listener.address]
