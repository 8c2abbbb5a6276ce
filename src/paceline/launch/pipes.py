"""Reads what the children write, as whole lines, without ever blocking on one of them."""

import os
import select
from collections.abc import Callable
from typing import IO, Final, final

from paceline.launch.output import Outlets

CHUNK_BYTES: Final = 64 * 1024
NUM_LAST_CHUNKS: Final = 64
LINE_BYTES_MAX: Final = 64 * 1024


@final
class LineBuffer:
    """Turns chunks of bytes into lines of text.

    Of a line that overwrote itself with carriage returns (a progress bar), only the last state is told. A line
    longer than 64 KiB is told in parts.
    """

    def __init__(self, deliver: Callable[[str], None]) -> None:
        self._deliver = deliver
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes and deliver each line that they complete."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._tell(line)
        if len(self._rest) > LINE_BYTES_MAX:
            self.finish()

    def finish(self) -> None:
        """Deliver what was begun and not completed."""
        if self._rest:
            self._tell(self._rest)
            self._rest = b""

    def _tell(self, line: bytes) -> None:
        text = line.decode(errors="surrogateescape").rstrip("\r")  # as bytes that are no text leave again
        self._deliver(text.rsplit("\r", 1)[-1])


@final
class Pipe:
    """The reading end of one output of one child, which is not read while what it delivers to is full."""

    def __init__(
        self, file: IO[bytes], deliver: Callable[[str], None], is_held: Callable[[], bool] = lambda: False
    ) -> None:
        self.file = file
        self.is_held = is_held
        self._lines = LineBuffer(deliver)
        os.set_blocking(file.fileno(), False)

    def read_chunk(self) -> bool:
        """Read what is there, at most one chunk; False when there is nothing more for now, or ever."""
        try:
            chunk = os.read(self.file.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._lines.feed(chunk)
        return bool(chunk)

    def finish(self) -> None:
        """Read what a child that has ended left in the pipe, and close it."""
        # Bounded, because a process that fled from the child's group may still hold and fill the pipe.
        for _ in range(NUM_LAST_CHUNKS):
            if not self.read_chunk():
                break
        self._lines.finish()
        self.file.close()


@final
class Pump:
    """Waits for anything to happen: output of a child, a reader of ours that takes something, or a signal."""

    def __init__(self, wakeup_fd: int, outlets: Outlets | tuple[()] = ()) -> None:
        """Watch `wakeup_fd` (non-blocking), which becomes readable whenever a signal arrives, and write to outlets."""
        self._wakeup_fd = wakeup_fd
        self._outlets = outlets
        self._pipes: dict[int, Pipe] = {}

    def add(self, pipe: Pipe) -> None:
        """Read this pipe from now on."""
        self._pipes[pipe.file.fileno()] = pipe

    def remove(self, pipe: Pipe) -> None:
        """Read the rest of a pipe whose writer has ended, and forget it."""
        self._pipes.pop(pipe.file.fileno(), None)
        pipe.finish()

    def wait(self, timeout_s: float) -> None:
        """Block until something happens or `timeout_s` have passed; read what is there."""
        poll = select.poll()
        poll.register(self._wakeup_fd, select.POLLIN)
        for descriptor, pipe in self._pipes.items():
            if not pipe.is_held():
                poll.register(descriptor, select.POLLIN)
        for outlet in self._outlets:
            if outlet.waiting_bytes:
                poll.register(outlet.fileno(), select.POLLOUT)
        for descriptor, _ in poll.poll(timeout_s * 1000):
            if descriptor == self._wakeup_fd:
                os.read(self._wakeup_fd, CHUNK_BYTES)
            # Readable and yet nothing to read: all writers have closed their end, though the child may still live.
            elif descriptor in self._pipes and not self._pipes[descriptor].read_chunk():
                del self._pipes[descriptor]
        for outlet in self._outlets:
            outlet.push()
