"""Recovers the tensors of pushes that a killed predecessor had, from the workers, which repeat them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

import msgspec

from paceline.core.events import Died
from paceline.core.messages import Join
from paceline.core.server import ServerCore
from paceline.errors import PeerError
from paceline.server.connections import Connections, Incoming, Stop, said_by
from paceline.server.recovery import Recovery
from paceline.server.tables import ServedTables
from paceline.transport.base import Frame
from paceline.wire.messages import FactoredPush, PushFrame, RowPushFrame

_LOOK_S: Final = 0.5  # between two looks at the time, while workers come back


@final
class RepeatedPushes(msgspec.Struct, frozen=True):
    """Takes in what workers repeat, on the thread of a server that is in the place of another process.

    Args:
        num_servers: of the job.
        core: knows which lives of workers are over.
        tables: get the tensors.
        peers: workers that are asked for more.
        recovery: the pushes that are wanted; what else arrives is postponed in it.
        admit: handles the frame of a worker that comes back.
    """

    num_servers: int
    core: ServerCore
    tables: ServedTables
    peers: Connections
    recovery: Recovery
    admit: Callable[[Incoming], None]

    def wait(self, get: Callable[[float], object | None], is_over: Callable[[], bool]) -> bool:
        """Take items until all that is wanted is here, or time is over; return False if told to stop meanwhile.

        Raises CannotGoOn if an update that is half made needs a worker that has ended.
        """
        recovery = self.recovery
        while recovery.wanted and not is_over():
            item = get(_LOOK_S)
            if isinstance(item, Stop):
                return False
            if isinstance(item, Died):
                recovery.note_death(item)
            elif item is not None and not (isinstance(item, Incoming) and self._take(item)):
                recovery.postponed.append(item)
        recovery.end_waiting()
        return True

    def _take(self, item: Incoming) -> bool:
        """Let a worker come back, or take in the tensor of a push that is known; False for all else."""
        found, frame = said_by(item, self.num_servers), item.frame
        if found is None or frame is None:
            return False
        match said := found[1]:
            case Join(sender) if not self.core.lives.objection(sender):
                self.admit(item)
                return True
            case PushFrame(push) | RowPushFrame(push) if push.id in self.recovery.wanted:
                self._take_tensor(said, frame)
                return True
            case FactoredPush(PushFrame(push)) if push.id in self.recovery.wanted:
                with suppress(PeerError):  # then it does not count, as if it had not come
                    self._take_tensor(said.push, self.tables.expand(said, frame))
                return True
            case _:
                return False

    def _take_tensor(self, message: PushFrame | RowPushFrame, frame: Frame) -> None:
        push, recovery = message.push, self.recovery
        accepted = self.tables[push.table].accept(message, frame.body, frame.buffer)
        if accepted.wanted is not None:
            self.peers.send_worker(push.id.worker, push.id.incarnation, accepted.wanted)
        elif not accepted.problem:  # else it came without its tensor
            recovery.wanted.discard(push.id)
            recovery.repeated.append(push)
