"""Mistakes that a careful person could make in snapshots and feeds, and the rehearsals that have to find each."""

from __future__ import annotations

from tests.mutants.catalogue import Mutant
from tests.mutants.node_catalogue import SERVER, NodeMutant

FOLDER = "snapshots/folder.py"
FEEDS, FEED, CHANGES = "server/feeds.py", "versions/feed.py", "update/rows/changes.py"


def _of_snapshots(name: str, file: str, old: str, new: str) -> NodeMutant:
    return NodeMutant(Mutant(name, file, old, new), "tests/snapshots/test_rehearsal.py")


def _of_feeds(name: str, file: str, old: str, new: str) -> NodeMutant:
    return NodeMutant(Mutant(name, file, old, new), "tests/versions/test_rehearsal.py", "feeds")


VERSION_MUTANTS: tuple[NodeMutant, ...] = (
    # -- snapshots ---------------------------------------------------------------------------------------------------
    _of_snapshots(
        "a cut does not wait for its clock",
        "server/table_rpc.py",
        "self.clock_of(table_call.table) < table_call.needs:",
        "self.clock_of(table_call.table) < 0:",
    ),
    _of_snapshots(
        "a cut is made of a table that has passed its clock",
        "server/cuts.py",
        'if table.consistency.visible == "on_clock" and clock != needs:',
        "if False:",
    ),
    _of_snapshots(
        "the end of a range is not kept for a cut",
        "update/cuts.py",
        "for index in range(start // CHUNK, -(-stop // CHUNK)):",
        "for index in range(start // CHUNK, stop // CHUNK):",
    ),
    _of_snapshots(
        "rows that were kept for a cut are not read",
        "update/rows/cuts.py",
        "parts = [self._copies(slots[~self._settled[slots]]), *self._kept_between(start, stop)]",
        "parts = [self._copies(slots[~self._settled[slots]])]",
    ),
    _of_snapshots(
        "rows that are new are not in the next snapshot",
        "update/rows/store.py",
        "    def _skip_for_cuts(self, slots: Tensor) -> None:\n"
        "        if self._marks is not None:\n            self._marks.note(slots)\n",
        "    def _skip_for_cuts(self, slots: Tensor) -> None:\n",
    ),
    _of_snapshots(
        "a file of a snapshot is not on the disk when that is visible",
        "snapshots/files.py",
        "        os.fsync(self._file.fileno())\n        return FileEntry",
        "        return FileEntry",
    ),
    _of_snapshots(
        "a snapshot is reported that a power cut may undo",
        FOLDER,
        "            raise\n        sync(folder)\n",
        "            raise\n",
    ),
    _of_snapshots(
        "what a snapshot is based on goes before it",
        FOLDER,
        "for old in reversed(unneeded):",
        "for old in unneeded:",
    ),
    _of_snapshots(
        "what a job goes on from does not stay",
        FOLDER,
        "if resumed is not None:",
        "if False:",
    ),
    _of_snapshots(
        "a job goes on without the state of its rule",
        "snapshots/reading.py",
        "for name, state in self.states(piece.segment).items():",
        "for name, state in dict[str, Tensor]().items():",
    ),
    _of_snapshots(
        "a worker of an earlier generation disturbs one of this",
        SERVER,
        'if hello.role == "worker" and hello.generation != self.settings.generation:',
        "if False:",
    ),
    # -- feeds of rows -----------------------------------------------------------------------------------------------
    _of_feeds(
        "a log grows without a bound",
        CHANGES,
        "while self._size_bytes > self._limit_bytes and len(self._entries) > 1:",
        "while False:",
    ),
    _of_feeds(
        "a consumer that was away for too long is not told",
        CHANGES,
        "not first <= since <= self._last:",
        "since > self._last:",
    ),
    _of_feeds(
        "the log of another process is read on",
        FEEDS,
        "if log is None or log.name != request.log:",
        "if log is None:",
    ),
    _of_feeds(
        "rows that are gone are left out",
        FEEDS,
        "removed = entry.removed if gone is None else entry.removed[gone]",
        "removed = entry.removed[:0]",
    ),
    _of_feeds(
        "a part has rows of another one",
        FEEDS,
        ".remainder(self._only.num_parts) == self._only.part",
        ".remainder(self._only.num_parts) <= self._only.part",
    ),
    _of_feeds(
        "rows are shown for ever to a consumer that has gone",
        FEEDS,
        "        if cut is not None:\n            self._feeds.end(cut)\n",
        "",
    ),
    _of_feeds(
        "a cursor is behind a change that was not given yet",
        FEED,
        "fetched.sequence - len(entries) + 1):",
        "fetched.sequence - len(entries) + 2):",
    ),
    _of_feeds(
        "a feed that begins anew does not say so",
        FEED,
        "shown, self._resets = _Shown(self._links.life), True",
        "shown, self._resets = _Shown(self._links.life), False",
    ),
)
