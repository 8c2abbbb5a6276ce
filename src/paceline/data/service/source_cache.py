"""Open sources of a data server: each opened once and shared by all workers that read it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Final, TypeAlias

from paceline.data.sources.declared import BatchRecipe, decode_recipe
from paceline.data.sources.records import Records
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.transport.deadline import Deadline
from paceline.wire.malformed import REQUEST_ERRORS

MAX_OPEN: Final = 64
MAX_OPEN_BY_WORKER: Final = 16
# Errors that user-defined datasets and transforms may raise.
USER_CODE_ERRORS: Final = (*REQUEST_ERRORS, SystemExit, KeyboardInterrupt, GeneratorExit)
_DIGEST_BYTES: Final = 32
_CLOSING_TIMEOUT_S: Final = 5.0

RecipeOpener: TypeAlias = Callable[[BatchRecipe, AbstractSet[str] | None], Records]


@dataclass(slots=True, eq=False)
class CachedSource:
    """A recipe that is open, being opened, or could not be opened.

    Hold `lock` to use the records: they support one thread at a time.
    """

    key: bytes  # digest of the recipe, which may be long
    begun_by: int  # rank of the worker that was the first to open it
    records: Records | None = None
    num_samples: int = 0
    fingerprint: str = ""
    problem: BaseException | None = None  # why it could not be opened
    settled: bool = False  # whether opening has ended, successfully or not
    lock: threading.Lock = field(default_factory=threading.Lock)
    # One rank for each connection that has it open.
    readers: list[int] = field(default_factory=list[int])
    # Invariant: empty once settled.
    waiting: list[Callable[[CachedSource], None]] = field(default_factory=list["Callable[[CachedSource], None]"])

    def close(self, deadline: Deadline) -> None:
        """Close the files once no thread reads them; a read that hangs is abandoned."""
        if self.lock.acquire(timeout=deadline.remaining_s()):
            try:
                records, self.records = self.records, None
                if records is not None:
                    records.close()
            finally:
                self.lock.release()


@dataclass(slots=True)
class SourceCache:
    """Opens recipes in threads of their own, as counting samples may take long.

    Its methods are called by one thread.

    Args:
        open_records: opens a recipe.
        allowed_paths: the import paths that may be loaded; None allows all.
        tell: called when opening a source has ended, on the thread that opened it; it must have `settle` called.
    """

    open_records: RecipeOpener
    allowed_paths: AbstractSet[str] | None
    tell: Callable[[CachedSource], None]
    _sources: dict[bytes, CachedSource] = field(
        default_factory=dict[bytes, CachedSource]
    )  # the most recently requested last
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def open(self, recipe: bytes, rank: int, answer: Callable[[CachedSource], None]) -> CachedSource:
        """Open a recipe for a worker; `answer` is called when it is open or has failed.

        Raises:
            PeerError: the recipe is not valid, or the system refuses another thread.
            UsageError: this worker, or all of them together, have too many sources open.
        """
        key = blake2b(recipe, digest_size=_DIGEST_BYTES).digest()
        source = self._sources.pop(key, None) or self._begin(key, decode_recipe(recipe), rank)
        self._sources[key] = source
        source.readers.append(rank)
        if source.settled:
            answer(source)
        else:
            source.waiting.append(answer)
        return source

    def settle(self, source: CachedSource) -> None:
        """Answer the workers that wait for this source; a failed one is dropped, so that it can be retried."""
        source.settled = True
        waiting, source.waiting = source.waiting, []
        if source.problem is not None:
            self._sources.pop(source.key, None)
        for answer in waiting:
            answer(source)

    def leave(self, source: CachedSource, rank: int) -> None:
        """Remove a worker's connection from a source; the source stays open while there is room."""
        source.readers.remove(rank)

    def close(self, deadline: Deadline) -> None:
        """Close all sources; those still being opened or read are abandoned."""
        for thread in self._threads:
            thread.join(deadline.remaining_s())
        for source in self._sources.values():
            source.close(deadline)
        self._sources.clear()

    def _begin(self, key: bytes, recipe: BatchRecipe, rank: int) -> CachedSource:
        if sum(map(partial(_is_of, rank), self._sources.values())) >= MAX_OPEN_BY_WORKER:
            raise UsageError(
                f"worker {rank} reads more than {MAX_OPEN_BY_WORKER} sources at once: close the loaders that are done"
            )
        retired = self._make_room()
        source = CachedSource(key, rank)
        thread = threading.Thread(
            target=self._open, args=(source, recipe, retired), name="paceline-open-source", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            self._sources = {other.key: other for other in retired} | self._sources  # the least recently requested
            raise PeerError("the system refuses a thread to open a source") from None
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]
        return source

    def _make_room(self) -> list[CachedSource]:
        """Return an unused source to close for a new one, if there is one."""
        if len(self._sources) < MAX_OPEN:
            return []
        unused = next((source for source in self._sources.values() if source.settled and not source.readers), None)
        if unused is None:
            raise UsageError(
                f"the workers read {MAX_OPEN} sources, and a data server serves no more at once: close the loaders "
                "that have been read"
            )
        return [self._sources.pop(unused.key)]

    def _open(self, source: CachedSource, recipe: BatchRecipe, retired: list[CachedSource]) -> None:
        source.problem = PacelineError("the thread that was to open it failed; the traceback is on its stderr")
        try:
            for other in retired:
                other.close(Deadline.after(_CLOSING_TIMEOUT_S))
            records = self.open_records(recipe, self.allowed_paths)
            source.num_samples, source.fingerprint = records.num_samples, records.fingerprint()
            source.records, source.problem = records, None
        except USER_CODE_ERRORS as error:
            source.problem = error
        finally:
            self.tell(source)


def _is_of(rank: int, source: CachedSource) -> bool:
    """Return whether a worker reads this source, or is the one that has it opened."""
    return rank in source.readers or (not source.settled and source.begun_by == rank)
