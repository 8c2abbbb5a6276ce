"""Follows the files by which a process tells others something: where it listens, and its trace."""

import os
from io import BufferedReader
from pathlib import Path
from typing import Final, final

from paceline.job.addresses import address_path
from paceline.observe.trace import trace_path
from paceline.ray.messages import Role
from paceline.ray.outbox import NewsBuffer

CHUNK_BYTES: Final = 256 * 1024


@final
class FileFollower:
    """The files of one process, in a folder that its launcher does not see."""

    def __init__(self, folder: Path, role: Role, rank: int) -> None:
        self._address = None if role == "worker" else address_path(folder, role, rank)
        self._trace = trace_path(folder, role, rank)
        self._file: BufferedReader | None = None  # open from its first line on: the folder may go before we do

    def report(self, outbox: NewsBuffer) -> bool:
        """Put what is new into the outbox, a part at most; tell whether there was anything."""
        address, trace = self._take_address(), self._take_trace()
        if address or trace:
            outbox.add(address=address, trace=trace)
        return bool(address or trace)

    def finish(self, outbox: NewsBuffer) -> None:
        """Put all that is left into the outbox."""
        while self.report(outbox):
            pass
        if self._file is not None:
            self._file.close()

    def _take_address(self) -> str:
        if self._address is None or not self._address.exists():
            return ""
        address, self._address = self._address.read_text().strip(), None
        return address

    def _take_trace(self) -> bytes:
        if self._file is None:
            if not self._trace.exists():
                return b""
            self._file = self._trace.open("rb")
        chunk = self._file.read(CHUNK_BYTES) or self._begin_next()
        # Whole lines, so that what a killed process has begun is left out; but a line may be longer than a chunk.
        whole = chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == CHUNK_BYTES else b"")
        self._file.seek(len(whole) - len(chunk), os.SEEK_CUR)
        return whole

    def _begin_next(self) -> bytes:
        """Go on with the next file of a bounded trace, if there is one; see `TraceFile`."""
        assert self._file is not None
        try:
            next_file = self._trace.open("rb")
        except FileNotFoundError:
            return b""
        if os.path.sameopenfile(next_file.fileno(), self._file.fileno()):
            next_file.close()
            return b""
        last = self._file.read(CHUNK_BYTES)  # written after we had come to its end
        if last:
            next_file.close()
            return last
        self._file.close()
        self._file = next_file
        return self._file.read(CHUNK_BYTES)
