"""Fault injection around any other transport: a plan with probabilities, seeded draws, and counts of what happened."""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec
from msgspec.structs import replace

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.transport.base import EMPTY, AllocateBody, Connection, Frame, LeavesMachine, Listener, Transport
from paceline.transport.buffers import copied, flat
from paceline.transport.deadline import Deadline, seconds

# A frame held back is given this long to be taken by the carrier; after that it counts as lost on the way.
_HELD_SEND_TIMEOUT_S: Final = 5.0
_FAULTS: Final = ("cut", "drop", "duplicate", "reorder", "delay")
_MIN_BLOCK: Final = 10  # frames; so that a run of frames without a fault stays possible
_MAX_BLOCK: Final = 20  # of a fault that is rarer, one in as many frames as it takes


def every_frame(header: bytes) -> bool:
    """Return True."""
    return True


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The probability of each fault for a sent frame, and the frames (by header) that may have faults.

    `delay_s` is the range of delays; its upper end also bounds how long a frame is held back to be overtaken.
    A delayed frame delays those behind it, as on a stream.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    cut: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.01)
    only: Callable[[bytes], bool] = every_frame

    def __post_init__(self) -> None:
        for probability in (self.drop, self.duplicate, self.delay, self.reorder, self.cut):
            if not 0 <= probability <= 1:
                raise UsageError(f"the probability of a fault is {probability}, expected 0 to 1")
        if not 0 <= self.delay_s[0] <= self.delay_s[1]:
            raise UsageError(f"delay_s is {self.delay_s}, expected (shortest, longest) in seconds")


class FaultCounts(msgspec.Struct, frozen=True):
    """The number of frames with each fault. A frame with several is counted for each that took effect."""

    dropped: int = 0
    duplicated: int = 0
    delayed: int = 0
    reordered: int = 0
    cut: int = 0


class FrameFate(msgspec.Struct, frozen=True):
    """The faults of one frame. A cut overrides a drop, and a drop overrides all others."""

    cut: bool = False
    drop: bool = False
    duplicate: bool = False
    reorder: bool = False
    delay_s: float = 0.0


UNHARMED: Final = FrameFate()


@final
class Draws:
    """Draws one kind of fault: a fixed number in every block of frames, at random places.

    A block has as many faults as the probability demands (one of ten frames at 0.1), at places that depend on the seed.
    So a test that counts faults does not depend on luck.

    >>> draws = Draws(0.2, "seed")
    >>> [sum(draws.draw() for _ in range(10)) for _ in range(3)]
    [2, 2, 2]
    """

    def __init__(self, probability: float, seed: str) -> None:
        self._random = random.Random(seed)
        is_rare = 0 < probability < 1 / _MAX_BLOCK
        sizes = (round(1 / probability),) if is_rare else range(_MIN_BLOCK, _MAX_BLOCK + 1)
        self._size = min(sizes, key=lambda size: (abs(round(size * probability) / size - probability), size))
        self._num_hits = round(self._size * probability)
        self._block: list[bool] = []

    def draw(self) -> bool:
        """Return whether the next frame is hit."""
        if not self._block:
            self._block = [place < self._num_hits for place in range(self._size)]
            self._random.shuffle(self._block)
        return self._block.pop()


@final
class Dice:
    """Decides the fates of one connection's frames in the order in which they are sent; one seed, one sequence."""

    def __init__(self, plan: FaultPlan, seed: str) -> None:
        self._plan = plan
        self._random = random.Random(seed)
        # Each with a seed of its own: one fault does not shift the others.
        self._draws = {name: Draws(getattr(plan, name), f"{seed} {name}") for name in _FAULTS}

    def throw(self, header: bytes) -> FrameFate:
        """Decide the next frame's fate."""
        if not self._plan.only(header):
            return UNHARMED
        hits = {name: draws.draw() for name, draws in self._draws.items()}
        delay_s = self._random.uniform(*self._plan.delay_s)
        return FrameFate(
            cut=hits["cut"],
            drop=hits["drop"],
            duplicate=hits["duplicate"],
            reorder=hits["reorder"],
            delay_s=delay_s if hits["delay"] else 0.0,
        )


@final
class FaultTally:
    """Counts faults as they happen, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, fate: FrameFate) -> None:
        """Count what happens to a frame of this fate."""
        with self._lock:
            if fate.cut or fate.drop:
                self._counter["cut" if fate.cut else "dropped"] += 1
                return
            self._counter["duplicated"] += fate.duplicate
            self._counter["reordered"] += fate.reorder
            self._counter["delayed"] += fate.delay_s > 0

    def counts(self) -> FaultCounts:
        """Return the counts so far."""
        with self._lock:
            return FaultCounts(**self._counter)


class _Held(msgspec.Struct, frozen=True):
    """A frame that waits until `due_s` on the monotonic clock; its body is a copy of its own."""

    due_s: float
    header: bytes
    body: memoryview


@final
class FaultyConnection:
    """A connection that injects faults into the frames that it sends."""

    def __init__(self, inner: Connection, plan: FaultPlan, dice: Dice, tally: FaultTally) -> None:
        self.peer: Final = inner.peer
        self.identity: Final = inner.identity
        self.peer_identity: Final = inner.peer_identity
        self._inner = inner
        self._longest_hold_s = plan.delay_s[1]
        self._dice = dice
        self._tally = tally
        self._changed = threading.Condition()
        # Invariant: frames in `_late` leave in order, and nothing sent later leaves before them.
        self._late: deque[_Held] = deque()
        # Waits for the next frame to overtake it.
        self._aside: _Held | None = None
        self._postman: threading.Thread | None = None
        self._closed = False

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame, or fail to; see `Connection.send`."""
        deadline = Deadline.after(timeout_s)
        if not self._changed.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded(f"waited {seconds(timeout_s)} for other threads to finish sending to {self.peer}")
        try:
            self._meet(self._dice.throw(header), header, flat(body), deadline)
        finally:
            self._changed.release()

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        """Send frames, or fail to, each with a fate of its own; see `Connection.try_send`."""
        if not all(self._inner.has_room(body) for _, body in frames):
            return False
        for header, body in frames:
            self.send(header, body, timeout_s=timeout_s)
        return True

    def has_room(self, body: memoryview) -> bool:
        """Return whether a frame would leave at once; see `Connection.has_room`."""
        return self._inner.has_room(body)

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        """Wait for the next frame; see `Connection.receive`."""
        return self._inner.receive(timeout_s=timeout_s, place=place)

    def has_frame(self) -> bool:
        """Return whether the next frame is here; see `Connection.has_frame`."""
        return self._inner.has_frame()

    def fileno(self) -> int | None:
        """Return a descriptor to wait for; see `Connection.fileno`."""
        return self._inner.fileno()

    def close(self) -> None:
        """End the connection, and lose the frames held back; see `Connection.close`."""
        self._inner.close()  # first, so that a postman blocked in it comes back
        with self._changed:
            self._end()
            postman = self._postman
        if postman is not None:
            postman.join()

    def _end(self) -> None:
        self._inner.close()
        self._closed = True
        self._late.clear()
        self._aside = None
        self._changed.notify_all()

    def _meet(self, fate: FrameFate, header: bytes, body: memoryview, deadline: Deadline) -> None:
        if self._closed:
            raise ConnectionLost(f"the connection to {self.peer} is over: it was closed or cut here")
        if fate.reorder:  # one frame at a time is held back, by itself; the next one overtakes it
            fate = replace(fate, reorder=False) if self._aside else replace(fate, duplicate=False, delay_s=0.0)
        self._tally.add(fate)
        if fate.cut:
            self._end()
            raise ConnectionLost(f"the connection to {self.peer} is over: cut by the fault plan")
        if fate.drop:
            return
        if fate.reorder:
            self._aside = _Held(time.monotonic() + self._longest_hold_s, bytes(header), copied(body))
            self._wake_postman()
            return
        self._forward(header, body, fate.delay_s, deadline)
        if fate.duplicate:
            self._forward(header, copied(body), 0.0, deadline)
        overtaken, self._aside = self._aside, None
        if overtaken is not None:
            self._forward(overtaken.header, overtaken.body, 0.0, deadline)

    def _forward(self, header: bytes, body: memoryview, delay_s: float, deadline: Deadline) -> None:
        """Send now, or queue behind what is late already."""
        if delay_s == 0 and not self._late:
            self._inner.send(header, body, timeout_s=deadline.remaining_s())
            return
        last_due_s = self._late[-1].due_s if self._late else 0.0
        due_s = max(time.monotonic() + delay_s, last_due_s)
        self._late.append(_Held(due_s, bytes(header), copied(body)))
        self._wake_postman()

    def _wake_postman(self) -> None:
        if self._postman is None:
            self._postman = threading.Thread(target=self._deliver_late, name=f"paceline-late {self.peer}", daemon=True)
            self._postman.start()
        self._changed.notify_all()

    def _deliver_late(self) -> None:
        with self._changed:
            while not self._closed:
                held = self._next_due()
                wait_s = None if held is None else held.due_s - time.monotonic()
                if held is None or (wait_s is not None and wait_s > 0):
                    self._changed.wait(wait_s)
                else:
                    self._deliver(held)

    def _next_due(self) -> _Held | None:
        waiting = [held for held in (*list(self._late)[:1], self._aside) if held is not None]
        return min(waiting, key=lambda held: held.due_s, default=None)

    def _deliver(self, held: _Held) -> None:
        """Send a frame whose time has come; when that fails, the connection is over."""
        if held is self._aside:
            self._aside = None
        else:
            self._late.popleft()
        try:
            self._inner.send(held.header, held.body, timeout_s=_HELD_SEND_TIMEOUT_S)
        except PeerError:
            self._end()


@final
class FaultyListener:
    """A listener whose connections inject faults too."""

    def __init__(self, inner: Listener, transport: "FaultyTransport") -> None:
        self.address: Final = inner.address
        self._inner = inner
        self._transport = transport

    def accept(self, *, timeout_s: float) -> FaultyConnection:
        """Wait for the next connection; see `Listener.accept`."""
        return self._transport.wrap(self._inner.accept(timeout_s=timeout_s), "accepted")

    def close(self) -> None:
        """Stop listening; see `Listener.close`."""
        self._inner.close()


@final
class FaultyTransport:
    """Carries frames by `inner`, and drops, delays, doubles, reorders or cuts them off as the plan says.

    Handshakes are spared. The fates of a connection's frames depend only on the seed, the side, the identity and
    how many connections of that identity came before.

    >>> from paceline.transport.memory import MemoryTransport
    >>> transport = FaultyTransport(MemoryTransport(), FaultPlan(drop=1.0), seed=7)
    >>> listener = transport.listen("memory://server-0")
    >>> worker = transport.connect(listener.address, b"worker 3", timeout_s=1)
    >>> worker.send(b"push", timeout_s=1)
    >>> transport.counts.dropped
    1
    >>> worker.close(), listener.close()
    (None, None)
    """

    def __init__(self, inner: Transport, plan: FaultPlan, seed: int) -> None:
        self.name: Final = inner.name
        self.maps_memory: Final = inner.maps_memory
        self._inner = inner
        self._plan = plan
        self._seed = seed
        self._tally = FaultTally()
        self._lock = threading.Lock()
        self._num_before: Counter[tuple[str, bytes]] = Counter()

    @property
    def counts(self) -> FaultCounts:
        """How many faults have happened so far, on all connections together."""
        return self._tally.counts()

    def allocate(self, size_bytes: int) -> memoryview:
        """Give memory of the inner transport."""
        return self._inner.allocate(size_bytes)

    def leaves_machine(self, address: str) -> bool:
        """Return the answer of the inner transport."""
        return isinstance(self._inner, LeavesMachine) and self._inner.leaves_machine(address)

    def listen(self, address: str) -> FaultyListener:
        """Open a listener of the inner transport."""
        return FaultyListener(self._inner.listen(address), self)

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> FaultyConnection:
        """Connect by the inner transport."""
        return self.wrap(self._inner.connect(address, identity, timeout_s=timeout_s), "connected")

    def wrap(self, inner: Connection, side: str) -> FaultyConnection:
        """Put a connection of the inner transport under the plan; `side` is "connected" or "accepted"."""
        with self._lock:
            key = (side, inner.identity)
            number = self._num_before[key]
            self._num_before[key] += 1
        dice = Dice(self._plan, f"{self._seed}:{side}:{inner.identity.hex()}:{number}")
        return FaultyConnection(inner, self._plan, dice, self._tally)
