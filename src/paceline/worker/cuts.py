"""Cuts as a worker reads them: every part of a table as it was at one clock, while training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Final

import msgspec

from paceline.errors import DeadlineExceeded, Refused
from paceline.wire.malformed import read_answer_of
from paceline.wire.requests import (
    BeginCut,
    CutHead,
    EndCut,
    ListedTable,
    ListTables,
    ReadCut,
    TableCall,
    clock_passed,
)
from paceline.worker.node import WorkerNode

MAX_ASKED: Final = 3  # pieces that are asked for before the first of them is here; a server keeps one more
_HEAD: Final = msgspec.msgpack.Decoder(CutHead)
_LISTED: Final = msgspec.msgpack.Decoder(list[ListedTable])


def list_tables(node: WorkerNode) -> list[ListedTable]:
    """Return the tables of the job, as its first server has them; blocks."""
    body = node.rpc.call(0, ListTables, "the list of tables")
    return read_answer_of(0, "the list of tables", _LISTED.decode, body)


class CutReader(msgspec.Struct, frozen=True):
    """A cut of one table on all servers that this worker has asked for. Its calls raise as those of `WorkerNode`.

    Args:
        node: the worker.
        table: name of the table.
        asked: the heads of the parts, by server, as they come.
    """

    node: WorkerNode
    table: str
    asked: Sequence[Future[memoryview]]

    @staticmethod
    def begin(
        node: WorkerNode, table: str, clock: int, *, values_only: bool = False, since: Sequence[str] | None = None
    ) -> CutReader:
        """Ask all servers for a cut at a clock; does not block.

        A worker that asks at its own clock, before it finishes that, gets every update of the clocks below and, where
        updates show on clocks, nothing else. Where a quorum completes clocks, `heads` may refuse.

        `since` names marks by server, or is empty there; see `BeginCut`.
        """

        def ask(server: int) -> Future[memoryview]:
            marks = None if since is None else since[server]
            return node.rpc.start_call(
                server,
                lambda number: BeginCut(TableCall(number, table, clock, node.rpc.settled(number)), values_only, marks),
            )

        return CutReader(node, table, [ask(server) for server in range(node.num_servers)])

    def heads(self) -> list[CutHead]:
        """Return what the servers say of their parts; blocks until all of them are cut.

        Raises:
            Refused: a server has passed that clock, or the table is broken.
        """
        bodies = [self._wait(future, self._what) for future in self.asked]
        return [read_answer_of(server, self._what, _HEAD.decode, body) for server, body in enumerate(bodies)]

    def passed(self) -> int | None:
        """Return the latest clock of a server that has passed the one asked for, None if none has; blocks as `heads`.

        What else keeps a server from cutting `heads` raises.
        """
        clocks = list[int]()
        for future in self.asked:
            try:
                self._wait(future, self._what)
            except Refused as error:
                clock = clock_passed(str(error))
                clocks += [] if clock is None else [clock]
        return max(clocks, default=None)

    def pieces(self, server: int, num_pieces: int) -> Iterator[memoryview]:
        """Return the pieces of one server's part, in order; blocks for each.

        Raises:
            Refused: the cut was given up, as memory was short, or its server has ended.
        """
        what, waiting = f"a piece of table '{self.table}' from server {server}", deque[Future[memoryview]]()
        for index in range(num_pieces):
            waiting.append(self._ask(server, index))
            if len(waiting) == MAX_ASKED:
                yield self._wait(waiting.popleft(), what)
        while waiting:
            yield self._wait(waiting.popleft(), what)

    def end(self) -> None:
        """Let the servers forget the cut; does not block."""
        for server in range(self.node.num_servers):
            self.node.rpc.start_call(server, lambda number: EndCut(number, self.table))

    @property
    def _what(self) -> str:
        return f"servers to cut table '{self.table}'"

    def _wait(self, future: Future[memoryview], what: str) -> memoryview:
        """Return an answer. Not as a wait of the training loop, which would be reported to the other workers."""
        timeout_s = self.node.options.wait_timeout_s
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}") from error

    def _ask(self, server: int, index: int) -> Future[memoryview]:
        return self.node.rpc.start_call(server, lambda number: ReadCut(number, self.table, index))
