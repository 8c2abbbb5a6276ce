"""Publishes versions of tables: a worker asks the servers for them, and goes on."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import index
from typing import Final, SupportsIndex

import msgspec

from paceline.errors import PacelineError, UsageError
from paceline.notices import is_told
from paceline.wire.requests import PublishTable, TableCall
from paceline.wire.versions import MAX_KEPT, MAX_PARTS, check_published_name
from paceline.worker.node import WorkerNode
from paceline.worker.table import Table
from paceline.worker.validation import brief

_MAX_UNDER_WAY: Final = 4  # versions of one worker; the next one waits for the oldest of them
_SERIES_BYTES: Final = 4


class Publication(msgspec.Struct, frozen=True):
    """A version that this worker has asked the servers for; they make it without the worker.

    Attributes:
        name: under which it is published.
        number: of the version: the clock that this worker had reached.
    """

    name: str
    number: int
    _futures: tuple[Future[memoryview], ...]
    _wait: Callable[[Future[memoryview]], object]

    def __repr__(self) -> str:
        """Return its name and number."""
        return f"Publication('{self.name}', version {self.number})"

    @property
    def is_done(self) -> bool:
        """Whether every server has cut its part, or refused to. Does not block."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Wait until every server has cut its part, which it copies from then on: readers see the version soon after.

        A server whose copy fails, as memory is short, says so itself, and there is no such version.

        Raises:
            Refused: a server cannot publish it; the message says why.
            DeadlineExceeded: not every table has reached the clock in time.
            PeerError: a server is gone, or this worker was given up.
        """
        for future in self._futures:
            self._wait(future)

    def problem(self) -> str:
        """Return why the version is not published, "" if no server has refused so far. Does not block."""
        errors = [future.exception() for future in self._futures if future.done() and not future.cancelled()]
        return next((str(error) for error in errors if error is not None), "")


def new_series() -> str:
    """Return a name for the versions of one publisher, which comes after those of publishers that began earlier.

    By the clock of the machine, as a publisher that takes the place of another may share nothing with it but readers.
    """
    return f"{time.time_ns():016x}-{secrets.token_hex(_SERIES_BYTES)}"


@dataclass(slots=True)
class Publisher:
    """Publishes for one worker.

    Args:
        node: reaches the servers.
        tell: called with a version that could not be published, and why.
    """

    node: WorkerNode
    tell: Callable[[str], None]
    _series: str = field(default_factory=new_series)
    _under_way: list[Publication] = field(default_factory=list[Publication])
    _told: set[str] = field(default_factory=set[str])
    _num_refused: Counter[str] = field(default_factory=Counter[str])  # by name

    def tell_once(self, text: str) -> None:
        """Tell something that holds for all versions, with the first."""
        if text not in self._told:
            self._told.add(text)
            self.tell(text)

    def publish(self, name: str, keep: int, tables: Sequence[Table], layout: bytes) -> Publication:
        """Ask all servers for a version of these tables; a second one of the same name and clock is the first.

        Does not block, unless many are under way. Raises UsageError for a name or a number that cannot be.
        """
        check_published_name(name)
        is_number = isinstance(keep, SupportsIndex) and not isinstance(keep, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_number or not 1 <= (keep := index(keep)) <= MAX_KEPT:
            raise UsageError(f"publish: keep is {brief(keep)}, expected how many versions to keep, 1 to {MAX_KEPT}.")
        if len(tables) > MAX_PARTS:
            raise UsageError(f"publish: the model has {len(tables)} tables, expected at most {MAX_PARTS}.")
        self._forget_done()
        number = self.node.clock
        known = next((each for each in self._under_way if (each.name, each.number) == (name, number)), None)
        if known is not None:
            return known
        if len(self._under_way) >= _MAX_UNDER_WAY:
            self._settle(self._under_way[0])
            self._forget_done()
        names = tuple(table.name for table in tables)
        futures = [
            self.node.rpc.start_call(server, self._making(table, (name, number, keep, names, layout)))
            for table in tables
            for server in range(self.node.num_servers)
        ]
        made = Publication(name, number, tuple(futures), lambda future: self._wait(future, name, number))
        self._under_way.append(made)
        return made

    def settle(self) -> None:
        """Wait for the versions under way, before this worker leaves, and tell how many could not be published."""
        for publication in self._under_way:
            self._settle(publication)
        self._forget_done()
        for name, num in self._num_refused.items():
            if num > 1:
                self.tell(f"{num} versions of '{name}' were not published")

    def _settle(self, publication: Publication) -> None:
        try:
            publication.wait()
        except PacelineError as error:
            if not publication.is_done:  # else `_forget_done` tells
                raise error from None

    def _forget_done(self) -> None:
        """Forget versions that are there; tell the 1st, 10th, 100th and so on of a name that could not be published."""
        for publication in [each for each in self._under_way if each.is_done]:
            self._under_way.remove(publication)
            problem, name = publication.problem(), publication.name
            if not problem:
                continue
            self._num_refused[name] += 1
            num = self._num_refused[name]
            if is_told(num):
                before = f", as {num - 1} others" if num > 1 else ""
                self.tell(f"version {publication.number} of '{name}' was not published{before}: {problem}")

    def _wait(self, future: Future[memoryview], name: str, number: int) -> memoryview:
        return self.node.rpc.wait_answer(future, f"servers to publish version {number} of '{name}'")

    def _making(
        self, table: Table, version: tuple[str, int, int, tuple[str, ...], bytes]
    ) -> Callable[[int], PublishTable]:
        """Return what makes the request for a table from its number."""
        name, number, keep, names, layout = version
        policy = table.consistency
        needs = 0 if policy.bound is None and policy.visible == "on_arrival" else number
        rpc = self.node.rpc

        def make(request: int) -> PublishTable:
            call = TableCall(request, table.name, needs, rpc.settled(request))
            return PublishTable(call, name, self._series, number, keep, names, layout)

        return make
