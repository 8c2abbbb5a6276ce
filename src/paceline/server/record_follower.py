"""A server that replays the record of another one, event by event, without workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import msgspec

from paceline.errors import PeerError
from paceline.server.journal import Written, decode_written
from paceline.server.record_file import UnreadableRecord, read_frames
from paceline.server.replay import Replay
from paceline.server.replica_messages import CODEC, Ended, Happened, Proved
from paceline.transport.base import Frame

if TYPE_CHECKING:
    from paceline.server.recovery import ServerParts
    from paceline.server.tables import ServedTables


class Moment(msgspec.Struct, frozen=True):
    """A replay between two events: the number of those so far, the latest one, and the server as it is now.

    Args:
        number: of events so far.
        now: when the event happened, by the recorded clock (monotonic seconds).
        written: the event, or the request.
        parts: of the server, that change with what it is told.
        tables: of the server.
    """

    number: int
    now: float
    written: Written
    parts: ServerParts
    tables: ServedTables


@final
@dataclass(slots=True)
class RecordFollower:
    """Has a server do what is recorded of another one, event by event, instead of serving.

    Args:
        path: of the record.
        watch: called after each event; the replay stops there if it returns True.

    Attributes:
        last: the moment after the last event, while the server is open.
        digests: of the tables at the end, as the record has them; None without its end.
        end: why the record ends early, if it does.
    """

    path: Path
    watch: Callable[[Moment], bool]
    finish: Callable[[Moment | None], None]
    digests: dict[str, str] | None = None
    end: str = ""

    def follow(self, replay: Replay, _next_item: Callable[[float], object | None]) -> None:
        """Do all that the record has; raises UnreadableRecord and OSError for one that cannot be read, Diverged."""
        number, moment = 0, None
        for header, body, _ in read_frames(self.path):
            try:
                message = CODEC.decode(header)
                replay.take(message, Frame(header, body))
            except PeerError as error:
                raise UnreadableRecord(f"{self.path} is damaged after event {number}: {error}") from error
            match message:
                case Happened(now, written):
                    number += 1
                    moment = Moment(number, now, decode_written(written), replay.parts, replay.tables)
                    if self.watch(moment):
                        break
                case Ended(reason):
                    self.end = reason
                case Proved(digests):
                    self.digests = digests
                case _:
                    pass
        self.finish(moment)
