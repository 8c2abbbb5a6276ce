"""The successors of servers: what a server knew lies in memory that the launcher keeps, for a process in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self, final

from msgspec.structs import replace

from paceline.launch.child import Launch
from paceline.server.journal import COLD, COLD_BYTES, JOURNAL, START_BYTES, counts
from paceline.transport.lasting_memory import MemoryHolder

# A server whose process dies before it has done so much crashes on what it was told, most likely, and would again.
NUM_ENTRIES: Final = 32
MAX_FRUITLESS: Final = 4  # such lives in a row
# How many files the launcher opens for a server; with fewer, there is no memory for its tables.
MOST_FILES: Final = 256
LEAST_FILES: Final = 16
_FILES_OF_HOLDER: Final = 4


@final
class Successors:
    """Keeps the memory of every server, and decides whether another process goes on in the place of one that died.

    A context manager: leaving it frees the memory.
    """

    def __init__(self, num_servers: int, num_files: int = MOST_FILES) -> None:
        """Make room; no memory is taken yet. `num_files`: how many files may be open for each server."""
        most_regions = min(num_files, MOST_FILES) - _FILES_OF_HOLDER
        self._holders = [MemoryHolder(most_regions) for _ in range(num_servers)]
        self._last: dict[int, int] = {}  # by rank, where the last life had begun to serve when it died
        self._num_fruitless: dict[int, int] = {}

    def __enter__(self) -> Self:
        """Keep memory from now on."""
        for holder in self._holders:
            holder.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Free it."""
        for holder in self._holders:
            holder.close()

    def equip(self, launches: Sequence[Launch]) -> list[Launch]:
        """Return how to start processes so that each server reaches its memory."""
        return [
            replace(launch, memory=self._holders[launch.rank].theirs.fileno()) if launch.role == "server" else launch
            for launch in launches
        ]

    def objection(self, rank: int) -> str:
        """Return why no process goes on in the place of this server, whose process has died; "" if one does.

        Once there is an objection, nothing is kept: clients that wait to connect to the server are told at once.
        """
        objection = self._objection(rank)
        if objection:
            self._holders[rank].close()
        return objection

    def following(self, launch: Launch, _exit_code: int, /) -> Launch:
        """Return how to start the process that goes on in the place of this one."""
        return launch.again()

    def is_spare(self, _launch: Launch, /) -> bool:
        """Return False: each server has one process at a time."""
        return False

    def _objection(self, rank: int) -> str:
        holder = self._holders[rank]
        cold = holder.read(COLD, COLD_BYTES).rstrip(b"\0").decode(errors="replace")
        num_entries, began = counts(holder.read(JOURNAL, START_BYTES))
        if cold or not num_entries:
            return cold or "it had not begun to serve"
        is_fruitless = began == self._last.get(rank) or (rank in self._last and num_entries - began < NUM_ENTRIES)
        self._last[rank] = began
        self._num_fruitless[rank] = self._num_fruitless.get(rank, 0) + 1 if is_fruitless else 0
        if self._num_fruitless[rank] < MAX_FRUITLESS:
            return ""
        return f"it was killed {MAX_FRUITLESS + 1} times in a row before it had done anything more"
