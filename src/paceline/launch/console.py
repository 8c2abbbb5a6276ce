"""What the person at the terminal reads: the children's lines with their names, and the launcher's own."""

import sys
from collections import deque
from collections.abc import Sequence
from typing import Final, TextIO, final

from paceline.job.environment import wants_colour

COLOURS: Final = (36, 32, 33, 35, 34)  # cyan, green, yellow, magenta, blue
RESET: Final = "\x1b[0m"
SCREEN_LINES: Final = 40


@final
class Console:
    """Writes whole lines to the standard streams; see `unblocked_output` for readers that are slow or gone.

    The streams are looked up at each line, so that a live display that takes them over sees every line. A copy, if one
    is wanted, gets all lines without colours.
    """

    def __init__(self, copy: TextIO | None = None) -> None:
        """Write to the standard streams, and to `copy`."""
        self._copy = copy
        self._latest: deque[str] = deque(maxlen=SCREEN_LINES)  # who wrote the last lines to stderr, "" for stdout

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
        self._tell(f"paceline: {message}\n")

    def quote(self, name: str, lines: Sequence[str]) -> None:
        """Write the last lines that a process wrote to stderr once more, unless they are still on the screen."""
        if self._latest.count(name) >= len(lines):
            return
        self.announce(f"the last {len(lines)} lines that {name} wrote to stderr:")
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
