"""The versions that a server has published: immutable parts, which last as retention and leases say."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import torch
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.notices import tell
from paceline.server.served_table import PartToPublish
from paceline.transport.base import SharesMemory
from paceline.transport.segments import append, create_memory, seal
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.requests import PublishTable
from paceline.wire.versions import (
    MAX_KEPT,
    MAX_LEASED,
    MAX_NAMES,
    MAX_PARTS,
    MAX_WAIT_S,
    FindVersions,
    PublicationId,
    PublishedPart,
    VersionHead,
    check_published_name,
    chunk_digests,
    digest_of,
)

ARRIVAL_S: Final = 30.0  # that a reader waits for bytes that are coming to a relay; then it connects anew
_MAX_COPIED: Final = 2  # versions of one name that are copied at once; more are refused
_MAX_UNFINISHED: Final = 4  # versions of one name of which not all tables are here; an older one is dropped


@dataclass(slots=True)
class PublishedVersion:
    """A server's part of one version. Invariant: bytes that are here do not change.

    `digests`: of all chunks, in the order of the parts; empty, as the digest in the head, until `describe` is called.
    `coming`: of one that a relay still fetches, how many bytes of each part are here; None: all of all.
    `is_let_go`: its memory has gone, whatever leases there are.
    """

    head: VersionHead
    layout: bytes
    memories: tuple[memoryview, ...]  # by part
    digests: bytes = b""
    num_leases: int = 0
    coming: Mapping[int, int] | None = None
    used_s: float = 0.0  # monotonic time at which a reader has last leased it or asked for bytes of it
    is_let_go: bool = False
    _describing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def describe(self) -> tuple[VersionHead, bytes]:
        """Return the head with its digest, and the digests of all chunks; blocks while they are computed, once."""
        with self._describing:
            if not self.head.digest:
                self.digests = b"".join(digest for memory in self.memories for digest in chunk_digests(memory))
                self.head = replace(self.head, digest=digest_of(self.layout, self.digests))
            return self.head, self.digests

    def let_go(self) -> None:
        """Let go of the memory, in spite of leases."""
        self.is_let_go, self.memories = True, ()

    def has(self, part: int, stop: int) -> bool:
        """Return whether the bytes of a part are here up to `stop`."""
        return self.coming is None or self.coming.get(part, 0) >= stop


@dataclass(slots=True)
class _Unfinished:
    """A version that is not complete here: by table, where its range starts, and its values once they are copied.

    `refusal`: why it never will be; its other tables are refused, too, and nothing of it is kept.
    """

    request: PublishTable
    parts: dict[str, tuple[int, memoryview | None]] = field(default_factory=dict[str, "tuple[int, memoryview | None]"])
    refusal: str = ""

    @property
    def has_come(self) -> bool:
        """Whether all tables have been asked for."""
        return set(self.parts) == set(self.request.tables)

    def refuse(self, why: str) -> None:
        """Have no version come of it."""
        self.refusal = why
        self.parts = {table: (start, None) for table, (start, _) in self.parts.items()}


@dataclass(slots=True)
class _Published:
    """What is published under one name, the newest last.

    Leases keep `max_leased` versions at most beside the newest. With more, the one goes whose readers have asked for
    nothing of it for the longest time: so no reader, however many leases it holds, keeps another one from a version.
    """

    max_leased: int
    keep: int = 1
    versions: dict[PublicationId, PublishedVersion] = field(default_factory=dict[PublicationId, PublishedVersion])
    unfinished: dict[PublicationId, _Unfinished] = field(default_factory=dict[PublicationId, _Unfinished])

    def show(self, version: PublishedVersion, keep: int) -> None:
        """Add a version, or the rest of one that was coming, and drop those that are no longer kept."""
        self.keep = keep
        self.drop_coming(but=version.head)
        there = self.versions.setdefault(version.head.id, version)
        if version.coming is None:
            there.coming = None
        self.retain()

    def drop_coming(self, but: VersionHead | None = None) -> None:
        """Drop what is still coming, as no more of it will come."""
        for each in [each for each in self.versions.values() if each.coming is not None and each.head != but]:
            del self.versions[each.head.id]

    def lease(self, wanted: PublicationId) -> PublishedVersion:
        """Return a version that is here, leased once more."""
        version = self.versions[wanted]
        version.num_leases += 1
        version.used_s = time.monotonic()
        return version

    def retain(self) -> None:
        """Drop versions that are neither among the newest that are whole nor kept by a lease."""
        whole = [made for made, each in self.versions.items() if each.coming is None]
        leased = list[PublicationId]()
        for made in whole[: -self.keep]:
            if self.versions[made].num_leases:
                leased.append(made)
            else:
                del self.versions[made]
        leased.sort(key=lambda made: self.versions[made].used_s)
        for made in leased[: max(0, len(leased) - self.max_leased)]:
            self.versions.pop(made).let_go()


class VersionGone(UsageError):
    """There is no such version, or no longer."""


@final
class PublishedVersions:
    """The published versions of one server by name. Thread-safe; a thread of its own copies values.

    A version is there for readers when all its tables are here; until then it is not seen.

    Args:
        max_leased: versions of a name that leases keep at most, beside the newest.
        problem_of: says why versions of a name may be missing here, or nothing; raises UsageError for a name of which
            there never are any.
    """

    def __init__(self, *, max_leased: int = MAX_LEASED, problem_of: Callable[[str], str] = lambda _: "") -> None:
        self.problem_of: Final = problem_of
        self._max_leased = max_leased
        self._changed = threading.Condition()
        self._names: dict[str, _Published] = {}
        self._copying: ThreadPoolExecutor | None = None
        self._closed = False

    def add(self, request: PublishTable, part: PartToPublish) -> None:
        """Add a table to the version that a worker publishes. Does not block: the thread of versions copies it.

        Raises:
            UsageError: the request has invalid values, or too much is published, or more often than can be copied.
        """
        try:
            is_new = self._begin(request, part)
        except BaseException:
            part.cut.close()
            raise
        if not is_new:
            part.cut.close()

    def _begin(self, request: PublishTable, part: PartToPublish) -> bool:
        """Have a table copied, unless it is here; return whether it is copied."""
        _check(request)
        made, table = PublicationId(request.name, request.series, request.number), request.table_call.table
        with self._changed:
            published = self._names.get(request.name) or _Published(self._max_leased)
            if self._closed or made in published.versions:
                return False
            if request.name not in self._names and len(self._names) >= MAX_NAMES:
                raise UsageError(f"'{request.name}' cannot be published, as {MAX_NAMES} other names are")
            self._names[request.name] = published
            unfinished = published.unfinished.setdefault(made, _Unfinished(request))
            if table in unfinished.parts and not unfinished.refusal:
                return False
            if sum(each.has_come for each in published.unfinished.values()) >= _MAX_COPIED:
                unfinished.refuse(
                    f"the {_MAX_COPIED} versions before it are still being copied: publish less often, with --publish "
                    "or a larger interval"
                )
            unfinished.parts[table] = part.start, None
            if len(published.unfinished) > _MAX_UNFINISHED:
                del published.unfinished[next(iter(published.unfinished))]
            if not unfinished.refusal:
                self._have_copied(made, unfinished, table, part)
            if unfinished.refusal:
                if unfinished.has_come:
                    published.unfinished.pop(made, None)
                raise UsageError(unfinished.refusal)
            return True

    def _have_copied(self, made: PublicationId, unfinished: _Unfinished, table: str, part: PartToPublish) -> None:
        """Have the thread of versions copy a table, and show the version behind its last one; in the lock."""
        if self._copying is None:
            self._copying = ThreadPoolExecutor(1, "paceline-publish")
        try:
            self._copying.submit(self._copy, made, unfinished, table, part)
        except RuntimeError as error:  # so it has no thread yet, and would make this call with the next one
            self._copying.shutdown(wait=False, cancel_futures=True)
            self._copying = None
            unfinished.refuse(f"the server cannot start a thread that copies version {made.number}: {error}")
            return
        if unfinished.has_come:
            self._copying.submit(self._seal, made, unfinished)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was published, nor is being copied."""
        with self._changed:
            return not self._names

    def show(self, version: PublishedVersion, keep: int) -> None:
        """Show readers a version that a relay has, or that is coming to it, and keep so many of its name."""
        with self._changed:
            if not self._closed:
                self._names.setdefault(version.head.id.name, _Published(self._max_leased)).show(version, keep)
                self._changed.notify_all()

    def wait_new(
        self, wanted: FindVersions, is_over: Callable[[], bool]
    ) -> tuple[tuple[PublicationId, ...], PublishedVersion | None]:
        """Return the versions of a name, the newest last; blocks as `wanted` says, or until `is_over` and `wake`.

        Return beside them the one that is held as `wanted` says, until `release`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: is_over() or any(each not in wanted.known for each in self._ids(wanted.name)),
                max(0.0, min(wanted.wait_s, MAX_WAIT_S)),
            )
            ids = self._ids(wanted.name)
            if not wanted.hold or not ids or ids[-1] in wanted.known:
                return ids, None
            return ids, self._names[wanted.name].lease(ids[-1])

    def withdraw(self, name: str) -> None:
        """Show no more what is still coming under a name; those that wait for its bytes are told."""
        with self._changed:
            if name in self._names:
                self._names[name].drop_coming()
                self._changed.notify_all()

    def wait_bytes(self, version: PublishedVersion, part: int, stop: int, is_over: Callable[[], bool]) -> bool:
        """Return whether the bytes of a part are here up to `stop`; blocks while they are coming, for `ARRIVAL_S`."""

        def is_settled() -> bool:
            published = self._names.get(version.head.id.name)
            is_coming = published is not None and published.versions.get(version.head.id) is version
            return version.has(part, stop) or not is_coming or is_over()

        version.used_s = time.monotonic()
        if version.coming is not None:
            with self._changed:
                self._changed.wait_for(is_settled, ARRIVAL_S)
        return version.has(part, stop)

    def wake(self) -> None:
        """Have those that wait look again: more bytes are here, or it is over."""
        with self._changed:
            self._changed.notify_all()

    def lease(self, wanted: PublicationId) -> PublishedVersion:
        """Return a version, kept until `release` unless it is let go; raises VersionGone if it is not here."""
        with self._changed:
            published = self._names.get(wanted.name)
            if published is None or wanted not in published.versions:
                raise VersionGone(f"version {wanted.number} of '{wanted.name}' is not here, or no longer")
            return published.lease(wanted)

    def find(self, wanted: PublicationId) -> PublishedVersion | None:
        """Return a version if all of it is here; it may be dropped at any time, but its memory stays for the caller."""
        with self._changed:
            published = self._names.get(wanted.name)
            version = None if published is None else published.versions.get(wanted)
            return None if version is None or version.coming is not None else version

    def release(self, version: PublishedVersion) -> None:
        """End a lease."""
        with self._changed:
            version.num_leases -= 1
            published = self._names.get(version.head.id.name)
            if published is not None:
                published.retain()

    def close(self) -> None:
        """Drop all versions, and end the thread. Memory that readers have mapped stays with them."""
        with self._changed:
            self._closed = True
            self._names.clear()
        if self._copying is not None:
            self._copying.shutdown(cancel_futures=True)

    def _ids(self, name: str) -> tuple[PublicationId, ...]:
        published = self._names.get(name)
        return () if published is None else tuple(published.versions)

    def _copy(self, made: PublicationId, unfinished: _Unfinished, table: str, part: PartToPublish) -> None:
        """Copy the values of a table into memory that nothing writes to any more."""
        try:
            memory = _copied(part)
            with self._changed:
                if not unfinished.refusal:
                    unfinished.parts[table] = part.start, memory
        except (
            REQUEST_ERRORS
        ) as error:  # updates ran ahead, or there is no memory: a thread that ended would tell nothing
            tell(f"version {made.number} of '{made.name}' is not published: {describe_error(error)}")
        finally:
            part.cut.close()

    def _seal(self, made: PublicationId, unfinished: _Unfinished) -> None:
        """Show readers a version whose tables are copied."""
        request = unfinished.request
        parts, memories = list[PublishedPart](), list[memoryview]()
        for table in request.tables:
            start, memory = unfinished.parts[table]
            if memory is None:  # which was told
                break
            parts.append(PublishedPart(table, start, memory.nbytes))
            memories.append(memory)
        head = VersionHead(made, b"", tuple(parts), len(request.layout))
        with self._changed:
            published = self._names.get(made.name)
            is_wanted = published is not None and published.unfinished.pop(made, None) is not None
            if published is not None and is_wanted and len(parts) == len(request.tables):
                published.show(PublishedVersion(head, request.layout, tuple(memories)), request.keep)
                self._changed.notify_all()


def _copied(part: PartToPublish) -> memoryview:
    """Return a copy of the values of a part, where readers can map it; blocks.

    Raises OSError when memory is full, and as `ShardCut.read_all` does.
    """
    if isinstance(part.transport, SharesMemory) and part.size_bytes:
        try:
            descriptor = create_memory(part.size_bytes, sparse=True)
        except OSError:
            pass  # `allocate` meets the same, and tells of it
        else:
            return _written(part, part.transport, descriptor)
    memory, at = part.transport.allocate(part.size_bytes), 0

    def write(piece: memoryview) -> None:
        nonlocal at
        into = torch.frombuffer(memory, dtype=torch.uint8, count=len(piece), offset=at)
        into.copy_(torch.frombuffer(piece, dtype=torch.uint8))  # while other threads run
        at += len(piece)

    part.cut.read_all(write)
    return memory


def _written(part: PartToPublish, transport: SharesMemory, descriptor: int) -> memoryview:
    """Return a copy in a memory file, which is written to: the kernel has no need to clear its pages before."""
    try:
        part.cut.read_all(partial(append, descriptor))
        memory = memoryview(seal(descriptor, part.size_bytes))
        transport.share(memory, descriptor)
    finally:
        os.close(descriptor)
    return memory


def _check(request: PublishTable) -> None:
    """Raise UsageError for values that a version cannot have."""
    check_published_name(request.name)
    if not 1 <= request.keep <= MAX_KEPT:
        raise UsageError(f"'{request.name}' is to keep {request.keep} versions, expected 1 to {MAX_KEPT}")
    if not 1 <= len(request.series) <= 64 or request.number < 0:
        raise UsageError(f"'{request.name}' has no version {request.number} in the series '{request.series[:80]}'")
    if len(request.tables) > MAX_PARTS or len(set(request.tables)) != len(request.tables):
        num = len(request.tables)
        raise UsageError(f"'{request.name}' has {num} tables, expected at most {MAX_PARTS} different ones")
    if request.table_call.table not in request.tables:
        raise UsageError(f"'{request.name}' does not name table '{request.table_call.table}' among its tables")
