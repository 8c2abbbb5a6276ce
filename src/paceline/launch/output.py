"""The launcher's standard streams, written without ever waiting for a reader.

What a reader does not take yet is kept here. From `FULL_BYTES` on the launcher reads no more of what the processes of
the job write, so that they wait for the reader, and the launcher itself goes on to answer signals and deaths. Bytes
pass as they are, whatever the encoding of the terminal.
"""

import io
import os
import select
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, NamedTuple, TextIO, final

FULL_BYTES: Final = 1 << 20
# What comes all the same (from an engine, or the last words of processes) is dropped beyond this, and counted.
MAX_WAITING_BYTES: Final = 64 << 20
# A pipe that is ready takes so much without blocking; a terminal or a file takes it at once.
_CHUNK_BYTES: Final = select.PIPE_BUF
# At the end of a run, a reader that takes nothing for so long is given up.
DRAIN_TIMEOUT_S: Final = 5.0


@final
class Outlet(io.TextIOBase):
    """A text stream over a descriptor that keeps what its reader does not take; without a descriptor it drops all.

    Text that was decoded with `surrogateescape` leaves as the bytes that it was made of.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Write where `stream` does, after what it still holds."""
        self._descriptor: int | None = None
        self._isatty = False
        self._waiting = bytearray()
        self._num_dropped = 0  # bytes
        if stream is not None:
            stream.flush()
            self._descriptor, self._isatty = stream.fileno(), stream.isatty()
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLOUT)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - a property there, too
        """How text becomes bytes."""
        return "utf-8"

    @property
    def waiting_bytes(self) -> int:
        """How much the reader has yet to take."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more should be written before the reader has taken some."""
        return len(self._waiting) >= FULL_BYTES

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return self._isatty

    def writable(self) -> bool:
        """Return True: it can be written to."""
        return True

    def fileno(self) -> int:
        """Return the descriptor; raises OSError when there is none."""
        if self._descriptor is None:
            raise OSError("this stream was closed before the launcher began")
        return self._descriptor

    def write(self, text: str, /) -> int:
        """Keep some text, and write what the reader takes now; never blocks."""
        if self._descriptor is not None:
            data = text.encode("utf-8", "surrogateescape")
            if len(self._waiting) + len(data) > MAX_WAITING_BYTES:
                self._num_dropped += len(data)
            else:
                self._waiting += data
                self.push()
        return len(text)

    def push(self) -> None:
        """Write what the reader takes now; never blocks."""
        while self._waiting and self._descriptor is not None and self._is_ready(0):
            try:
                del self._waiting[: os.write(self._descriptor, self._waiting[:_CHUNK_BYTES])]
            except BlockingIOError:
                return
            except OSError:  # the reader is gone; training is worth more than its output, so the run goes on
                self._descriptor = None
                self._waiting.clear()

    def drain(self) -> int:
        """Wait until the reader has taken everything, as long as it takes some; return how many bytes it never took."""
        last, give_up_s = len(self._waiting), time.monotonic() + DRAIN_TIMEOUT_S
        while self._waiting and time.monotonic() < give_up_s:
            self._is_ready(max(0.0, give_up_s - time.monotonic()))
            self.push()
            if len(self._waiting) < last:
                last, give_up_s = len(self._waiting), time.monotonic() + DRAIN_TIMEOUT_S
        return self._num_dropped + len(self._waiting)

    def _is_ready(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(timeout_s * 1000))


class Outlets(NamedTuple):
    """Both standard streams of the launcher."""

    stdout: Outlet
    stderr: Outlet

    def push(self) -> None:
        """Write what readers take now; never blocks."""
        self.stdout.push()
        self.stderr.push()


@contextmanager
def unblocked_output() -> Generator[Outlets]:
    """Have `sys.stdout` and `sys.stderr` never wait for a reader while entered; yields both.

    On leaving waits for readers that still take something, and says on stderr what was not taken.
    """
    before = sys.stdout, sys.stderr
    outlets = Outlets(Outlet(sys.stdout), Outlet(sys.stderr))
    sys.stdout, sys.stderr = outlets
    try:
        yield outlets
    finally:
        sys.stdout, sys.stderr = before
        num_left = outlets.stdout.drain()
        if num_left:
            outlets.stderr.write(f"paceline: {num_left} bytes of output were dropped: nothing read them\n")
        outlets.stderr.drain()
