"""The traces of workers on other machines: sent to the run, so that its display and reports show them as its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, final

import msgspec

from paceline.errors import PeerError, UsageError
from paceline.launch.joining.messages import WorkerTrace
from paceline.observe.runs import TraceFollower, decode_lines
from paceline.observe.trace import MOST_SECONDS, NO_SERVER, Sampled, TraceFile, TraceRecord, trace_path

PIECE_BYTES: Final = 1 << 17  # of a trace, that are read at a time

_ENCODER = msgspec.json.Encoder()


@final
class TraceSender:
    """Sends what the workers of a folder write down."""

    def __init__(self, folder: Path, ranks: Sequence[int], send: Callable[[WorkerTrace], None]) -> None:
        self._followers = {
            rank: TraceFollower(folder, (trace_path(folder, "worker", rank).name,), piece_bytes=PIECE_BYTES)
            for rank in ranks
        }
        self._send = send

    def send_news(self) -> None:
        """Send what has been written since the last call, up to a piece of each; raises OSError, UsageError."""
        for rank, follower in self._followers.items():
            records = follower.poll()
            if records:
                self._send(WorkerTrace(rank, time.monotonic(), _ENCODER.encode_lines(records)))

    def send_rest(self) -> None:
        """Send all that has been written; raises as `send_news`."""
        self.send_news()
        while any(follower.is_behind for follower in self._followers.values()):
            self.send_news()


@final
class TraceReceiver:
    """Keeps what workers of another machine write down, in the folder of the run and with times of this machine.

    Args:
        run_dir: the folder of the run.
        max_bytes: bound of each trace; 0 keeps all of it.
    """

    def __init__(self, run_dir: Path, max_bytes: int) -> None:
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._files: dict[int, TraceFile] = {}
        # From clocks there to clocks here. What it seems to be contains the time on the way, so the least is the best.
        self._shift_s = math.inf

    def keep(self, said: WorkerTrace) -> None:
        """Append what a worker has sent to its trace; raises PeerError for what is not a trace of it."""
        path = trace_path(self._run_dir, "worker", said.rank)
        try:
            records = decode_lines(said.lines, path)
        except UsageError as error:
            raise PeerError(f"it sent what is no trace of worker {said.rank}") from error
        self._shift_s = min(self._shift_s, time.monotonic() - said.now_s)
        for record in records:
            if not _is_of(record, said.rank):
                raise PeerError(f"in the trace of worker {said.rank} it sent a record of another process")
            if abs(record.t + self._shift_s) > MOST_SECONDS:
                raise PeerError(f"in the trace of worker {said.rank} it sent a record with a time that cannot be")
        if said.rank not in self._files:
            self._files[said.rank] = TraceFile(path, self._max_bytes)
        here = [msgspec.structs.replace(record, t=record.t + self._shift_s) for record in records]
        self._files[said.rank].append(_ENCODER.encode_lines(here))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _is_of(record: TraceRecord, worker: int) -> bool:
    """Return whether a worker writes such a record, of itself."""
    if isinstance(record, Sampled):
        return (record.role, record.rank) == ("worker", worker)
    is_of_server = getattr(record, "server", NO_SERVER) != NO_SERVER
    return getattr(record, "worker", None) == worker and not is_of_server
