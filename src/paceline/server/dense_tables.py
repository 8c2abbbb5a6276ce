"""The dense tables of one server: their shards, and received pushes that wait to be applied."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite

from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.messages import PushId
from paceline.core.partition import holders
from paceline.core.settings import ServerSettings
from paceline.errors import ProtocolBug, UsageError
from paceline.server.hyperparameters import objection
from paceline.server.memory_check import require_room
from paceline.server.same_gradients import SameGradients
from paceline.transport.buffer_pool import Buffer
from paceline.update.named_rules import resolve
from paceline.update.placement import as_tensor, spans, torch_dtype
from paceline.update.shard import Contribution, Shard
from paceline.update.table import TableSpec, differences
from paceline.wire.malformed import MISHAPS, broken_story
from paceline.wire.messages import PushFrame


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A received push that is neither applied nor discarded, and the memory that it came in."""

    contribution: Contribution
    body: memoryview
    buffer: Buffer | None
    checksum: int  # 0 where memory is not checked

    def release(self) -> None:
        """Return the buffer to its pool."""
        if self.buffer is not None:
            self.buffer.release()


@dataclass(slots=True)
class DenseTables:
    """All dense tables of one server. Used by the server's thread; `BodyLimits` only looks tables up.

    Args:
        settings: rank of this server, and how tables are partitioned.
        allocate: returns zeroed memory for values, given its size in bytes.
        num_threads: returns how many threads an update may use, by the consistency of its table.
        allowed_paths: the rules that may be imported by path; None allows all.
        trusts_screening: skip the check for NaN and infinity where the worker has done it. So it is where pushes lie
            in the worker's own memory, which it could change after any check here.
        checks_memory: check that the memory of a push does not change until it is applied.
        same: warns when workers push the same gradients.
    """

    settings: ServerSettings
    allocate: Callable[[int], memoryview]
    num_threads: Callable[[Consistency], int]
    allowed_paths: frozenset[str] | None = None
    trusts_screening: bool = False
    checks_memory: bool = False
    same: SameGradients = field(default_factory=SameGradients)
    specs: dict[str, TableSpec] = field(default_factory=dict[str, TableSpec])
    shards: dict[str, Shard] = field(default_factory=dict[str, Shard])
    # The memory of each shard's values, as bytes.
    memories: dict[str, memoryview] = field(default_factory=dict[str, memoryview])
    # Why a table refuses pushes and reads: an update of it failed, perhaps halfway.
    broken: dict[str, str] = field(default_factory=dict[str, str])
    _waiting: dict[PushId, _Arrived] = field(default_factory=dict[PushId, _Arrived])

    @property
    def server(self) -> int:
        """Rank of this server."""
        return self.settings.server

    def declare(self, spec: TableSpec) -> Consistency:
        """Create a table, or check that the existing one has the same settings; return its consistency.

        Raises:
            UsageError: the table exists with other settings, its rule is not available, or memory is short.
        """
        known = self.specs.get(spec.name)
        if known is not None and known != spec:
            lines = " ".join(differences(spec, known))
            raise UsageError(
                f"table '{spec.name}' exists on server {self.server} with other settings than this worker declares: "
                f"{lines} Every worker must build the same model and the same optimizer."
            )
        if known is None:
            spec.validate()
        consistency = Consistency.parse(spec.consistency)
        if known is None:
            rule = resolve(spec.rule, self.allowed_paths)  # first: imports nothing that is not allowed
            parts = spans(spec, self.settings)
            span = parts[self.server]
            size_bytes = span.length * torch_dtype(spec).itemsize
            held_bytes = sum(memory.nbytes for memory in self.memories.values())
            require_room(spec.name, size_bytes, len(self.specs), f"server {self.server}", held_bytes)
            try:
                memory = self.allocate(size_bytes)
                values = as_tensor(memory, torch_dtype(spec))
                shard = Shard(spec, span, rule=rule, values=values, num_threads=self.num_threads(consistency))
            except (RuntimeError, OSError) as error:  # torch and mmap raise these when memory is short
                raise UsageError(f"server {self.server} cannot hold table '{spec.name}': {error}") from error
            self.shards[spec.name], self.memories[spec.name], self.specs[spec.name] = shard, memory, spec
            if self.server == holders(parts)[0]:  # one server warns
                self.same.watch(spec.name, consistency)
        return consistency

    def accept(self, frame: PushFrame, body: memoryview, buffer: Buffer | None) -> str:
        """Store the gradient of a push; return why the push is refused, "" if it is accepted.

        Takes over the buffer that it came in, and returns it to its pool at once if the push is refused.
        """
        spec, shard = self.specs.get(frame.push.table), self.shards.get(frame.push.table)
        problem = "" if spec is None or shard is None else self._keep(frame, spec, shard, body, buffer)
        if buffer is not None and not self.has(frame.push.id):
            buffer.release()
        return problem

    def _keep(self, frame: PushFrame, spec: TableSpec, shard: Shard, body: memoryview, buffer: Buffer | None) -> str:
        if spec.name in self.broken:
            return self.broken[spec.name]
        expected = self.size_bytes(spec.name)
        if len(body) != expected:
            return f"its tensor has {len(body)} bytes, server {self.server} expects {expected} for '{spec.name}'"
        checksum = zlib.crc32(body) if self.checks_memory or frame.checksums else 0
        if frame.checksums[self.server : self.server + 1] not in ((), (checksum,)):
            return f"its {expected} bytes on server {self.server} are not those that worker {frame.push.id.worker} sent"
        problem = _objection(spec, frame)
        if problem:
            return problem
        gradient = as_tensor(body, torch_dtype(spec))
        if spec.nonfinite in ("reject", "halt") and not (frame.screened and self.trusts_screening):
            num_bad = shard.screen(gradient, frozenset(frame.absent))
            if num_bad:
                return f"{num_bad} of its {gradient.numel()} elements on server {self.server} are NaN or infinite"
        self.same.note(frame.push, gradient)
        worker = frame.push.id.worker
        contribution = Contribution(
            gradient, frame.count, frozenset(frame.absent), frame.hyper, worker, expected=frame.expected
        )
        self._waiting[frame.push.id] = _Arrived(contribution, body, buffer, checksum)
        return ""

    def has(self, push_id: PushId) -> bool:
        """Return whether the gradient of this push waits here."""
        return push_id in self._waiting

    def apply(self, table: str, ids: Sequence[PushId]) -> str:
        """Apply these pushes in this order as one update; return why that failed, "" if it did not.

        `accept` refuses what can be refused beforehand. If an update fails all the same (a rule that raises), the table
        refuses all later pushes and reads with the reason; other tables go on.
        """
        pushes = [self._waiting.pop(push_id) for push_id in ids]

        def update() -> None:
            self._require_as_it_came(pushes)
            self.shards[table].apply([push.contribution for push in pushes])

        problem = self._attempt(table, update)
        for push in pushes:
            push.release()
        return problem

    def settle(self, table: str) -> str:
        """Make the deferred updates of a table; return why it cannot be read, "" if it can."""
        return self._attempt(table, self.shards[table].settle)

    def _attempt(self, table: str, update: Callable[[], None]) -> str:
        """Run an update unless an earlier one has failed; return why the table is broken, "" if it is not."""
        if table not in self.broken:
            try:
                update()
            except MISHAPS as error:
                self.broken[table] = broken_story(table, self.server, error)
        return self.broken.get(table, "")

    def _require_as_it_came(self, pushes: Sequence[_Arrived]) -> None:
        """Raise ProtocolBug if the memory of a push has changed while it waited; only where memory is checked."""
        for push in pushes if self.checks_memory else ():
            if zlib.crc32(push.body) != push.checksum:
                raise ProtocolBug(f"the memory of a push of worker {push.contribution.worker} changed while it waited")

    def discard(self, push_id: PushId) -> None:
        """Drop the gradient of a push."""
        push = self._waiting.pop(push_id, None)
        if push is not None:
            push.release()

    def clear(self) -> None:
        """Release all tables and pushes, when the server closes."""
        for shard in self.shards.values():
            shard.close()
        for content in (self.specs, self.shards, self.memories, self.broken, self._waiting):
            content.clear()

    def values_into(self, table: str, body: memoryview) -> None:
        """Copy the values of a table's shard into `body`, which has exactly their size."""
        if len(body):
            self.shards[table].copy_values(as_tensor(body, torch_dtype(self.specs[table])))

    def size_bytes(self, table: str) -> int:
        """Return the size in bytes of this server's shard of a table."""
        return self.shards[table].span.length * torch_dtype(self.specs[table]).itemsize

    def initialise(self, table: str, body: memoryview) -> None:
        """Set the initial values of a table; ignored if it has some already.

        Raises:
            UsageError: `body` does not have the size of this server's shard.
        """
        shard = self.shards[table]
        if shard.initialised:
            return
        if len(body) != self.size_bytes(table):
            raise UsageError(f"first values of '{table}' have {len(body)} bytes, expected {self.size_bytes(table)}")
        shard.store(as_tensor(body, torch_dtype(self.specs[table])))

    def state(self, table: str) -> dict[str, Tensor]:
        """Return values and rule state of this server's shard, after merging pushes that wait for a quorum.

        Raises:
            UsageError: an update of the table has failed.
        """
        problem = self._attempt(table, lambda: self.shards[table].settle(all_kept=True))
        if problem:
            raise UsageError(problem)
        return self.shards[table].state()


def _objection(spec: TableSpec, frame: PushFrame) -> str:
    """Return why the fields beside a gradient are invalid, "" if they are valid."""
    for count in (frame.count, frame.expected):
        if not (isfinite(count) and count >= 0):
            return f"it stands for {count} samples, expected a number >= 0"
    if len(frame.absent) > len(spec.segments):
        return f"it leaves out parameters {len(frame.absent)} times, but '{spec.name}' has {len(spec.segments)}"
    unknown = tuple(index for index in frame.absent if not 0 <= index < len(spec.segments))
    if unknown:
        return f"it leaves out parameters {unknown[:3]}, but '{spec.name}' has {len(spec.segments)}"
    groups = spec.rule.groups
    if frame.hyper and len(frame.hyper) != len(groups):
        return f"it carries hyperparameters of {len(frame.hyper)} groups, '{spec.name}' has {len(groups)}"
    for number, (given, known) in enumerate(zip(frame.hyper, groups, strict=False)):
        problem = objection(spec.rule.name, given, known)
        if problem:
            return f"hyperparameters of group {number}: {problem}"
    return ""
