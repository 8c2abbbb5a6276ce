"""The output of a job: reads what its processes write, and passes it on in whole lines, without ever blocking.

What the reader of the launcher's own standard streams does not take yet is kept here. From `FULL_BYTES` on the launcher
reads no more of what the processes of the job write, so that they wait for the reader, and the launcher itself goes on
to answer signals and deaths. Bytes pass as they are, whatever the encoding of the terminal.
"""

import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from errno import EPIPE
from typing import IO, Final, NamedTuple, TextIO, final

from paceline.job.environment import wants_colour
from paceline.notices import for_terminal

FULL_BYTES: Final = 1 << 20
# What comes all the same (from an engine, or the last words of processes) is dropped beyond this, and counted.
MAX_WAITING_BYTES: Final = 64 << 20
# A pipe that is ready takes so much without blocking; a terminal or a file takes it at once.
_CHUNK_BYTES: Final = select.PIPE_BUF
_LOST: Final = "standard output takes nothing any more ({}): what the job prints is lost from here on; the run goes on"
# At the end of a run, a reader that takes nothing for so long is given up.
DRAIN_TIMEOUT_S: Final = 5.0
COLOURS: Final = (36, 32, 33, 35, 34)  # cyan, green, yellow, magenta, blue
RESET: Final = "\x1b[0m"
SCREEN_LINES: Final = 40
CHUNK_BYTES: Final = 64 * 1024
NUM_LAST_CHUNKS: Final = 64
LINE_BYTES_MAX: Final = 64 * 1024


def occupy_closed_streams() -> None:
    """Put the null device where a standard stream was closed: else the next file opened gets its number.

    Call it before any file is opened that is to stay open.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the least number that is free is this one
    if sys.stdin is None:  # where it was closed
        sys.stdin = open(os.devnull)  # noqa: SIM115 - it stays open
    if sys.stdout is None:  # where it was closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open


def end_output() -> OSError | None:
    """Write what standard output still holds; return why that cannot be, after which it takes all and keeps nothing."""
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # else Python tries again as it ends, and tells of it in its own words
        os.close(null)
        return error
    return None


def show_any_text() -> None:
    """Have standard output show what its encoding lacks, as the name of a file may be, by numbers: as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@final
class Outlet(io.TextIOBase):
    """A text stream over a descriptor that keeps what its reader does not take; without a descriptor it drops all.

    Any thread may write to it, and a signal handler within another write. Text that was decoded with `surrogateescape`
    leaves as the bytes that it was made of.
    """

    def __init__(self, stream: TextIO | None, tell_failure: Callable[[str], object] | None = None) -> None:
        """Write where `stream` does, after what it still holds; a failed write is told once, and ends the writing."""
        self._tell_failure = tell_failure
        self._descriptor: int | None = None
        self._isatty = False
        self._waiting = bytearray()
        self._num_dropped = 0  # bytes
        self._writing = threading.Lock()  # one writes at a time, also what others add meanwhile
        if stream is not None:
            stream.flush()
            self._descriptor, self._isatty = stream.fileno(), stream.isatty()

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
        """Write what the reader takes now; never blocks, and leaves it to another thread that writes."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            while self._waiting and self._descriptor is not None and _is_ready(self._descriptor, 0.0):
                del self._waiting[: os.write(self._descriptor, self._waiting[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError as error:  # training is worth more than its output, so the run goes on
            self._descriptor = None
            self._waiting.clear()
            if error.errno != EPIPE and self._tell_failure is not None:  # a reader that has gone wants no more
                self._tell_failure(str(error.strerror))
        finally:
            self._writing.release()

    def drain(self) -> int:
        """Wait until the reader has taken everything, as long as it takes some; return how many bytes it never took."""
        last, give_up_s = len(self._waiting), time.monotonic() + DRAIN_TIMEOUT_S
        while self._waiting and self._descriptor is not None and time.monotonic() < give_up_s:
            _is_ready(self._descriptor, max(0.0, give_up_s - time.monotonic()))
            self.push()
            if len(self._waiting) < last:
                last, give_up_s = len(self._waiting), time.monotonic() + DRAIN_TIMEOUT_S
        return self._num_dropped + len(self._waiting)


def _is_ready(descriptor: int, timeout_s: float) -> bool:
    """Wait until a write would not block, or has no reader; return whether that is so."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(timeout_s * 1000))


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
    errors = Outlet(sys.stderr)
    outlets = Outlets(Outlet(sys.stdout, lambda why: errors.write(f"paceline: {_LOST.format(why)}\n")), errors)
    sys.stdout, sys.stderr = outlets
    try:
        yield outlets
    finally:
        sys.stdout, sys.stderr = before
        num_left = outlets.stdout.drain()
        if num_left:
            outlets.stderr.write(f"paceline: {num_left} bytes of output were dropped: nothing read them\n")
        outlets.stderr.drain()


@final
class Console:
    """Writes whole lines to the standard streams; see `unblocked_output` for readers that are slow or gone.

    The streams are looked up at each line, so that a live display that takes them over sees every line. A copy, if one
    is wanted, gets all lines without colours.
    """

    def __init__(self, copy: TextIO | None = None) -> None:
        """Write to the standard streams, and to `copy`."""
        self._copy = copy
        # Of the last lines: the process that wrote it to stderr, "" for stdout; what the launcher wrote, whole.
        self._latest: deque[str] = deque(maxlen=SCREEN_LINES)

    def relay(self, name: str, colour: int, line: str, *, to_stderr: bool) -> None:
        """Write one line of a child's output, after the child's name."""
        stream = sys.stderr if to_stderr else sys.stdout
        self._latest.append(name if to_stderr else "")
        prefix = f"[{name}]"
        self._keep(f"{prefix} {line}\n")
        if stream is not None and stream.isatty() and wants_colour():
            prefix = f"\x1b[{COLOURS[colour % len(COLOURS)]}m{prefix}{RESET}"
        _write(stream, f"{prefix} {line}\n")

    def announce(self, message: str) -> None:
        """Write a message of the launcher itself, on stderr."""
        self._latest.append(message)
        self._tell(f"paceline: {for_terminal(message)}\n")

    def shows(self, message: str) -> bool:
        """Return whether a message of the launcher is still on the screen."""
        return message in self._latest

    def quote(self, name: str, lines: Sequence[str]) -> None:
        """Write the last lines that a process wrote to stderr once more, unless they are still on the screen."""
        if self._latest.count(name) >= len(lines):
            return
        last = f"the last {len(lines)} lines that {name} wrote to stderr:"
        self.announce(f"the last line that {name} wrote to stderr:" if len(lines) == 1 else last)
        self._latest.extend(name for _ in lines)
        self._tell("".join(f"    {line}\n" for line in lines))

    def _tell(self, text: str) -> None:
        self._keep(text)
        _write(sys.stderr, text)

    def _keep(self, text: str) -> None:
        if self._copy is not None:
            self._copy.write(text)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        stream.write(text)
        stream.flush()


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
