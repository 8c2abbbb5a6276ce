"""Mistakes that a careful person could make in what keeps versions and reads them, and rehearsals that find each."""

from __future__ import annotations

from tests.mutants.catalogue import Mutant
from tests.mutants.node_catalogue import SERVER, NodeMutant

FOLDER = "snapshots/folder.py"
LINK, PLACES, SUBSCRIPTION = "versions/link.py", "versions/links.py", "versions/subscription.py"
RELAY, VERSIONS, READERS, GATE = "versions/relay.py", "server/versions.py", "server/readers.py", "versions/gate.py"
FEEDS, FEED, CHANGES = "server/feeds.py", "versions/feed.py", "update/rows/changes.py"


def _of_snapshots(name: str, file: str, old: str, new: str) -> NodeMutant:
    return NodeMutant(Mutant(name, file, old, new), "tests/snapshots/test_rehearsal.py")


def _of_feeds(name: str, file: str, old: str, new: str) -> NodeMutant:
    return NodeMutant(Mutant(name, file, old, new), "tests/versions/test_rehearsal.py", "feeds")


def _of_readers(name: str, file: str, old: str, new: str) -> NodeMutant:
    return NodeMutant(Mutant(name, file, old, new), "tests/versions/test_rehearsal.py", "readers")


def _of_gates(name: str, file: str, old: str, new: str) -> NodeMutant:
    return NodeMutant(Mutant(name, file, old, new), "tests/versions/test_rehearsal.py", "gate")


VERSION_MUTANTS: tuple[NodeMutant, ...] = (
    # -- readers of versions, relays and gates -----------------------------------------------------------------------
    _of_readers(
        "bytes are shown without a look at their digests",
        LINK,
        "if body is None or _damaged(leased, first_chunk + piece.start // CHUNK_BYTES, body):",
        "if body is None:",
    ),
    _of_readers(
        "bytes that were fetched anew are shown without a look",
        LINK,
        "if not _damaged(leased, first_chunk + start // CHUNK_BYTES, body):",
        "if body:",
    ),
    _of_readers(
        "a description is believed without its digest",
        LINK,
        "if head.id != wanted or digest != head.digest:",
        "if head.id != wanted:",
    ),
    _of_readers(
        "what has come of a version is taken for all of it",
        LINK,
        "into.have[index] = piece.stop",
        "into.have[index] = size_bytes",
    ),
    _of_readers(
        "a reader takes the newest one again for a newer one",
        SUBSCRIPTION,
        "or _place(found) > _place(last)",
        "or _place(found) >= _place(last)",
    ),
    _of_readers(
        "a reader goes back where another place has less",
        SUBSCRIPTION,
        "or _place(each) >= _place(self._newest)",
        "or each.number >= 0",
    ),
    _of_readers(
        "the oldest version is taken for the newest",
        SUBSCRIPTION,
        "return self._fetch(whole[-1])",
        "return self._fetch(whole[0])",
    ),
    _of_readers(
        "a reader never tries the next place",
        PLACES,
        "        self._turn += 1",
        "        self._turn += 0",
    ),
    _of_readers(
        "a version that readers hold is dropped",
        VERSIONS,
        "            if self.versions[made].num_leases:",
        "            if self.versions[made].num_leases > self.max_leased:",
    ),
    _of_readers(
        "versions that no reader holds any more stay",
        VERSIONS,
        "        for made in whole[: -self.keep]:",
        "        for made in whole[: -self.keep - 1]:",
    ),
    _of_readers(
        "leases of a reader that has gone stay",
        READERS,
        "        for version in self._leased.values():\n            self._versions.release(version)",
        "        for _ in self._leased.values():\n            pass",
    ),
    _of_readers(
        "leases are not counted",
        VERSIONS,
        "        version.num_leases += 1",
        "        version.num_leases = 1",
    ),
    _of_readers(
        "what is held for a reader is held when it has gone",
        READERS,
        "        self._rows.close()\n        self._end_hold()",
        "        self._rows.close()",
    ),
    NodeMutant(
        Mutant(
            "more versions than allowed are kept for readers",
            VERSIONS,
            "leased[: max(0, len(leased) - self.max_leased)]",
            "leased[: max(0, len(leased) - self.max_leased - 1)]",
        ),
        "tests/server/test_versions.py",
        "bounded",
    ),
    _of_readers(
        "a relay serves the first server's part for all",
        READERS,
        "        self._begin(self._parts[server])",
        "        self._begin(self._parts[0])",
    ),
    _of_readers(
        "a relay goes on with the parts of other servers",
        RELAY,
        "if readers is None or len(readers.parts) != len(held):",
        "if readers is None:",
    ),
    _of_readers(
        "a relay mixes up the tables of a part",
        RELAY,
        "memory.memories.get(index, EMPTY)",
        "memory.memories.get(0, EMPTY)",
    ),
    _of_readers(
        "bytes that have not come to a relay are handed on",
        VERSIONS,
        "return self.coming is None or self.coming.get(part, 0) >= stop",
        "return True",
    ),
    _of_readers(
        "a version that comes no further stays with a relay",
        VERSIONS,
        "if each.coming is not None and each.head != but]:",
        "if each.head is None]:",
    ),
    _of_readers(
        "a version that has come is taken for one that comes",
        VERSIONS,
        "            there.coming = None",
        "            pass",
    ),
    _of_gates(
        "a gate is open beyond its bound",
        GATE,
        "most = None if self.bound is None else (self.bound + 1) * self.per_version",
        "most = None if self.bound is None else (self.bound + 2) * self.per_version",
    ),
    _of_gates(
        "a gate is closed below its bound",
        GATE,
        "self._used() + num <= most",
        "self._used() + num < most",
    ),
    _of_gates(
        "tickets that were given back are not given again",
        GATE,
        "return self.num_admitted - self.num_cancelled - self.version",
        "return self.num_admitted - self.version",
    ),
    _of_gates(
        "a ticket counts twice",
        GATE,
        "        del self._open[ticket.number]\n        self._changed",
        "        self._changed",
    ),
    _of_gates(
        "the trainer passes an open ticket",
        GATE,
        "self.version + 1 - oldest.version <= self.bound",
        "self.version - oldest.version <= self.bound",
    ),
    _of_gates(
        "the newest open ticket is taken for the oldest",
        GATE,
        "oldest = next(iter(self._open.values()), None)",
        "oldest = next(reversed(self._open.values()), None)",
    ),
    _of_gates(
        "staleness is counted from the next version",
        GATE,
        "staleness = self.version - ticket.version",
        "staleness = self.version + 1 - ticket.version",
    ),
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
        "        if cut is not None:\n            self._feeds.end(self, cut)\n",
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
