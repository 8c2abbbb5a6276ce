"""A dense table on a server: its shard, pushes that wait to be applied, and the memory in which values travel."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import ClassVar, NoReturn

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import load, save, save_file
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.effects import Measure
from paceline.core.events import Measured
from paceline.core.messages import Delivered, Fetched, PushId
from paceline.core.partition import Range, holders
from paceline.core.work_queue import Life
from paceline.errors import PeerError, ProtocolBug, UsageError
from paceline.server.buffers import SendBuffers
from paceline.server.early_values import Assemblies, EarlyBody, EarlySeries
from paceline.server.functions import call_over_range
from paceline.server.memory_check import has_plenty, require_memory, require_room
from paceline.server.push_checks import push_problem
from paceline.server.served_table import (
    ACCEPTED,
    TO_CLIP,
    Acceptance,
    Kind,
    PartToPublish,
    SavedTable,
    ServedValues,
    TableHost,
)
from paceline.transport.base import Connection, Frame, SharesMemory
from paceline.transport.buffer_pool import Buffer, BufferPool, ExactAllocator
from paceline.transport.buffers import LentMemory, fresh_buffer
from paceline.update.clipping import CLIP_NORM
from paceline.update.cuts import TableCut
from paceline.update.dtypes import torch_dtype
from paceline.update.factors import MatrixPart, matrix_parts, packed_elements, unpack
from paceline.update.kernels import Kernel
from paceline.update.lasting import ShardMemory
from paceline.update.named_rules import resolve
from paceline.update.placement import as_tensor, spans
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper, UpdateRule
from paceline.update.shard import Contribution, Shard
from paceline.update.table import TableSpec, differences, encode_table
from paceline.wire.malformed import REQUEST_ERRORS, describe_broken_table
from paceline.wire.messages import (
    FactoredPush,
    PullFrame,
    PushFrame,
    PushPiece,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    Unsubscribe,
)
from paceline.wire.requests import SMALL_BYTES, CallFunction, Initialise, LoadState, TableOperation

MAX_STATE_FACTOR = 64  # the state of a rule is at most this many times as large as the values
_STATE_SLACK_BYTES = 16 << 20  # names, and states that do not grow with the values
_NOTHING = torch.empty(0)
_COPIED = 2 * 3  # of a rule that updates whole tensors there are two copies, of values and mostly two states


class _WaitingPush(msgspec.Struct, frozen=True):
    """A received push that is neither applied nor discarded, and the memory that it came in."""

    contribution: Contribution
    body: memoryview
    buffer: Buffer | None
    checksum: int  # 0 where memory is not checked
    clock: int

    def release(self) -> None:
        """Return the buffer to its pool."""
        if self.buffer is not None:
            self.buffer.release()


def _unless_closed(save: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # of an executor that takes no more
        save()


def _contribution(frame: PushFrame, gradient: Tensor) -> Contribution:
    absent, worker = frozenset(frame.absent), frame.push.id.worker
    return Contribution(gradient, frame.count, absent, frame.hyper, worker, expected=frame.expected)


@dataclass(slots=True)
class ServedDenseTable:
    """One dense table on one server; see `ServedTable`.

    Args:
        spec: the whole table, validated.
        host: what it shares with the other tables of the server.
        held_bytes: bytes of values in the other tables.

    Raises:
        UsageError: its rule is not available, or memory is short.
    """

    spec: TableSpec
    host: TableHost
    held_bytes: int = 0
    kind: ClassVar[Kind] = "shape"
    keyed: ClassVar[bool] = False
    consistency: Consistency = field(init=False)
    shard: Shard = field(init=False)
    memory: memoryview = field(init=False)  # of the shard's values, as bytes
    broken: str = ""
    not_finite: Mapping[PushId, str] = field(default_factory=dict[PushId, str])
    # Skip the check for NaN and infinity where the worker has done it. So it is where pushes lie in the worker's own
    # memory, which it could change after any check here.
    trusts_screening: bool = field(init=False)
    send_buffers: SendBuffers = field(init=False)
    _dtype: torch.dtype = field(init=False)
    # Workers that map the values instead of receiving copies.
    _live: set[Life] = field(default_factory=set[Life])
    _last: PushFrame | None = None  # the last push that was accepted
    _waiting: dict[PushId, _WaitingPush] = field(default_factory=dict[PushId, _WaitingPush])
    # The values, to frames that have not left. Invariant: None if and only if workers map them.
    _lent: LentMemory | None = field(init=False)
    _compared_until: float = inf  # a push of a later clock is not looked at for gradients that workers share
    _assemblies: Assemblies = field(init=False)
    _early: EarlySeries | None = None
    _matrices: dict[int, MatrixPart] = field(init=False)  # by the index of their parameter
    _cold: str = ""

    def __post_init__(self) -> None:
        """Allocate the values and create the rule."""
        spec, host = self.spec, self.host
        transport, server = host.transport, host.settings.server
        self.consistency, self._dtype = Consistency.parse(spec.consistency), torch_dtype(spec.dtype)
        rule = resolve(spec.rule, host.allowed_paths)  # first: imports nothing that is not allowed
        parts = spans(spec, host.settings)
        size_bytes = parts[server].length * self._dtype.itemsize
        num_threads = host.num_threads(self.consistency)
        if host.lasting is None or not host.lasting.is_successor:  # else it is in use already
            require_room(spec.name, size_bytes, host.name, self.held_bytes)
        lasting = self._lasting_memory(rule, parts[server], num_threads)
        try:
            if lasting is None:
                self.memory = (transport.allocate if transport.maps_memory else fresh_buffer)(size_bytes)
            else:
                self.memory = lasting.memory
            values = as_tensor(self.memory, self._dtype)
            self._lent = None if transport.maps_memory else LentMemory(self.memory)
            self.shard = Shard(
                spec,
                parts[server],
                rule=rule,
                values=values,
                num_threads=num_threads,
                now=lambda: host.time,
                lasting=lasting,
                when_idle=self._when_idle,
            )
        except (RuntimeError, OSError) as error:  # torch and mmap raise these when memory is short
            raise UsageError(f"{host.name} cannot hold table '{spec.name}': {error}") from error
        self.trusts_screening = transport.maps_memory
        self.send_buffers = SendBuffers(transport.allocate, host.checks_memory)
        pool = BufferPool(ExactAllocator(fresh_buffer), poisons=host.checks_memory)
        self._assemblies = Assemblies(spec.name, size_bytes, self._dtype, pool)
        self._matrices = matrix_parts(spec, parts[server])
        if self.consistency.lockstep and self.shard.can_preview and has_plenty(size_bytes):
            self._early = EarlySeries(spec.name, self.memory, self._dtype.itemsize, self.shard.preview)
        if server == holders(parts)[0]:  # one server warns
            host.same_gradients.watch(spec.name, self.consistency)

    def _lasting_memory(self, rule: UpdateRule | Kernel, span: Range, num_threads: int) -> ShardMemory | None:
        """Return memory for the shard that outlives this server; None, and the reason in `cold`, if there is none."""
        spec, lasting, replica = self.spec, self.host.lasting, self.host.replica
        if spec.rule.quorum is not None and (lasting is not None or (replica is not None and replica.is_wanted)):
            self._cold = f"table '{spec.name}' keeps pushes until a quorum of them has come"
        if lasting is None or self._cold:
            return None
        value_bytes = span.length * self._dtype.itemsize
        copied_bytes = 0 if isinstance(rule, Kernel) or lasting.is_successor else _COPIED * value_bytes
        if not has_plenty(copied_bytes):
            self._cold = f"there is no memory for copies of table '{spec.name}' and the state of {spec.rule.name}"
        else:
            try:
                num_states = len(rule.known) if isinstance(rule, Kernel) else 0
                saver = self.host.saver if has_plenty((1 + num_states) * value_bytes) else None
                found = ShardMemory(lasting, spec, span, num_states=num_states, num_threads=num_threads, saver=saver)
                if isinstance(self.host.transport, SharesMemory):
                    self.host.transport.share(found.memory, found.descriptor)
            except OSError as error:
                self._cold = f"there is no memory for table '{spec.name}' that outlives its server ({error.strerror})"
            else:
                return found
        return None

    @property
    def cold(self) -> str:
        """See `ServedTable.cold`."""
        return self._cold or (f"of table '{self.spec.name}', {self.shard.cold}" if self.shard.cold else "")

    @property
    def num_applied(self) -> int:
        """See `ServedTable.num_applied`."""
        return self.shard.num_applied

    @property
    def has_values(self) -> bool:
        """Whether the initial values have arrived."""
        return self.shard.initialised

    @property
    def version(self) -> int:
        """Number of updates."""
        return self.shard.version

    @property
    def hyper(self) -> tuple[Hyper, ...]:
        """See `ServedTable.hyper`."""
        return self.shard.hyper

    @property
    def num_waiting(self) -> int:
        """See `ServedTable.num_waiting`."""
        return len(self._waiting)

    @property
    def num_kept(self) -> int:
        """See `ServedTable.num_kept`."""
        return self.shard.num_kept

    @property
    def value_bytes(self) -> int:
        """Bytes of the values here."""
        return self.memory.nbytes

    def require_equal(self, spec: TableSpec | RowTableSpec) -> None:
        """See `ServedTable.require_equal`."""
        if not isinstance(spec, TableSpec):
            raise UsageError(f"table '{spec.name}' exists on {self.host.name} with a shape; use another name")
        if spec != self.spec:
            server = self.host.settings.server
            raise UsageError(
                f"table '{spec.name}' exists on server {server} with other settings than this worker declares: "
                f"{' '.join(differences(spec, self.spec))} Every worker must build the same model and the same "
                "optimizer."
            )

    def encoded_spec(self) -> bytes:
        """See `ServedTable.encoded_spec`."""
        return encode_table(self.spec)

    def add_reader(self, life: Life, *, live: bool) -> None:
        """See `ServedTable.add_reader`."""
        if live:
            self._live.add(life)

    # -- pushes ------------------------------------------------------------------------------------------------------

    def accept(self, frame: PushFrame | RowPushFrame, body: memoryview, buffer: Buffer | None) -> Acceptance:
        """Store the gradient of a push; see `ServedTable.accept`."""
        try:
            problem = self._keep(frame, body, buffer)
        finally:
            if buffer is not None and frame.push.id not in self._waiting:
                buffer.release()
        if problem:
            return Acceptance(problem)
        is_clipped = frame.hyper and CLIP_NORM in frame.hyper[0]
        return TO_CLIP if is_clipped and not self.shard.is_whole else ACCEPTED

    def _keep(self, frame: PushFrame | RowPushFrame, body: memoryview, buffer: Buffer | None) -> str:
        """Store the gradient of a push; return why it is refused, "" if it is accepted."""
        if not isinstance(frame, PushFrame):
            return f"there is no table of rows '{self.spec.name}' on {self.host.name}: this one has a shape"
        if self.broken:
            return self.broken
        server, expected = self.host.settings.server, self.memory.nbytes
        if len(body) != expected:
            return f"its tensor has {len(body)} bytes, server {server} expects {expected} for '{self.spec.name}'"
        checksum = zlib.crc32(body) if self.host.checks_memory or frame.checksums else 0
        if frame.checksums[server : server + 1] not in ((), (checksum,)):
            return f"its {expected} bytes on server {server} are not those that worker {frame.push.id.worker} sent"
        absent, last = frozenset(frame.absent), self._last
        is_as_last = last is not None and (
            frame.hyper == last.hyper
            and frame.absent == last.absent
            and frame.count == last.count
            and frame.expected == last.expected
        )
        problem = "" if is_as_last else push_problem(self.spec, frame) or self._absent_problem(frame.absent)
        if problem:
            return problem
        self._last = frame
        gradient = as_tensor(body, self._dtype)
        contribution = _contribution(frame, gradient)
        if self.spec.nonfinite in ("reject", "halt") and not (frame.screened and self.trusts_screening):
            if self._checks_in_updates:
                contribution = replace(contribution, unchecked=True)
            elif num_bad := self.shard.screen(gradient, absent):
                return self._not_finite_problem(num_bad)
        if frame.push.clock <= self._compared_until:
            self._compared_until = self.host.same_gradients.note(frame.push, gradient)
        self._waiting[frame.push.id] = _WaitingPush(contribution, body, buffer, checksum, frame.push.clock)
        if self.host.replica is not None:
            self.host.replica.note_push(frame, body)
        return ""

    @property
    def _checks_in_updates(self) -> bool:
        """Whether updates leave out what is not finite: where no worker sees values before they are done.

        Of several servers all must leave out the same pushes, so there `accept` says which.
        """
        return self.consistency.lockstep and self.host.settings.num_servers == 1 and self.shard.checks_in_updates

    def _not_finite_problem(self, num_bad: int) -> str:
        return f"{num_bad} of its {self.shard.span.length} elements on {self.host.name} are NaN or infinite"

    def accept_piece(self, piece: PushPiece, body: memoryview, connection: Connection) -> Frame | None:
        """Add a piece of a push; see `ServedTable.accept_piece`."""
        frame, push_id = piece.push, piece.push.push.id
        problem = self.broken or push_problem(self.spec, frame) or self._absent_problem(frame.absent)
        is_new = not problem and push_id not in self._waiting
        if self._early is not None and is_new and not piece.at:
            self._early.add_reader((push_id.worker, push_id.incarnation), connection)
        return self._assemblies.add(piece, body, connection, _contribution(frame, _NOTHING) if is_new else None)

    def expand(self, push: FactoredPush, body: memoryview) -> Frame:
        """Return a push that came with factors as a frame with its whole gradient; see `ServedTable.expand`."""
        num_samples = {matrix.index: matrix.num_samples for matrix in push.matrices}
        problem = self._factors_problem(push, num_samples, len(body))
        if problem:
            raise PeerError(f"a push of table '{self.spec.name}' with factors {problem}")
        size_bytes = self.memory.nbytes
        try:  # as few bytes may become many here
            require_room(self.spec.name, size_bytes, self.host.name, len(self._waiting) * size_bytes)
        except UsageError as error:
            raise PeerError(f"a push of table '{self.spec.name}' with factors has no room: {error}") from error
        buffer = self._assemblies.pool.lend(size_bytes)
        unpack(as_tensor(body, self._dtype), self._matrices, num_samples, as_tensor(buffer.memory, self._dtype))
        return Frame(b"", buffer.memory, buffer)

    def _factors_problem(self, push: FactoredPush, num_samples: Mapping[int, int], size_bytes: int) -> str:
        """Return why factors cannot be multiplied, "" if they can: whether all sizes are those of the table."""
        if not num_samples or list(num_samples) != sorted(matrix.index for matrix in push.matrices):
            return "names no matrix, or one twice, or not in order"
        unknown = [index for index in num_samples if index not in self._matrices]
        if unknown:
            return f"has some of parameter {unknown[0]}, which is not a matrix with elements on {self.host.name}"
        large = [index for index, num in num_samples.items() if num < 0 or not self._matrices[index].is_smaller(num)]
        if large:
            return f"has {num_samples[large[0]]} samples of parameter {large[0]}, which has fewer elements, or none"
        expected = packed_elements(self.shard.span.length, self._matrices, num_samples) * self._dtype.itemsize
        if size_bytes != expected:
            return f"has {size_bytes} bytes, expected {expected}"
        return ""

    @property
    def has_early_readers(self) -> bool:
        """See `ServedTable.has_early_readers`."""
        return self._early is not None and self._early.has_readers

    def early_values(self, members: Sequence[int], clock: int) -> EarlyBody | None:
        """See `ServedTable.early_values`."""
        if self._early is None:
            return None
        held = {
            push_id: (push.contribution, push.body.nbytes)
            for push_id, push in self._waiting.items()
            if push.clock == clock
        }
        return self._early.make(members, clock, self._assemblies.coming(clock) | held)

    def _absent_problem(self, absent: Sequence[int]) -> str:
        """Return why the segments without a gradient are invalid, "" if they are valid."""
        num_segments = len(self.spec.segments)
        if len(absent) > num_segments:
            return f"it leaves out parameters {len(absent)} times, but '{self.spec.name}' has {num_segments}"
        unknown = tuple(index for index in absent if not 0 <= index < num_segments)
        if unknown:
            return f"it leaves out parameters {unknown[:3]}, but '{self.spec.name}' has {num_segments}"
        return ""

    def has(self, push_id: PushId) -> bool:
        """See `ServedTable.has`."""
        return push_id in self._waiting

    def measure(self, wanted: Measure) -> Measured:
        """See `ServedTable.measure`."""
        contributions = [self._waiting[push_id].contribution for push_id in wanted.ids]
        norm = self.shard.measure(contributions) if contributions and not self.broken else 0.0
        return Measured(wanted.table, wanted.clock, norm)

    def apply(self, push_ids: Sequence[PushId], clock: int, norm: float | None = None) -> str:
        """See `ServedTable.apply`."""
        pushes = [self._waiting[push_id] for push_id in push_ids]
        self.not_finite = {}
        problem = self._attempt(partial(self._update, push_ids, pushes, norm))
        if self.not_finite:
            return ""
        if self._early is not None and self._early.is_used:
            self._early.prove()
        for push_id in push_ids:
            buffer = self._waiting.pop(push_id).buffer
            if buffer is not None:
                buffer.release()
        return problem

    def _update(self, push_ids: Sequence[PushId], pushes: Sequence[_WaitingPush], norm: float | None) -> None:
        """Apply these pushes, or note which of them are not finite."""
        for push in pushes if self.host.checks_memory else ():
            if zlib.crc32(push.body) != push.checksum:
                worker = push.contribution.worker
                raise ProtocolBug(f"the memory of a push of worker {worker} changed while it waited")
        if self._lent is not None:
            self._lent.take_back()
        if not pushes:
            self.shard.pass_over()
            return
        found = self.shard.apply([push.contribution for push in pushes], norm)
        self.not_finite = {push_ids[index]: self._not_finite_problem(num) for index, num in found.items()}
        if found:
            for push_id, push in zip(push_ids, pushes, strict=True):
                checked = replace(push.contribution, unchecked=False)
                self._waiting[push_id] = replace(push, contribution=checked)

    def _when_idle(self, save: Callable[[], object]) -> None:
        """Have the shard saved for a successor: now, or where values have to be sent when workers have them."""
        if self._lent is None:
            save()
        else:
            self._lent.when_left(partial(_unless_closed, save))

    def _attempt(self, update: Callable[[], None]) -> str:
        """Run an update unless an earlier one has failed; return why the table is broken, "" if it is not."""
        if not self.broken:
            try:
                update()
            except REQUEST_ERRORS as error:
                self.broken = describe_broken_table(self.spec.name, self.host.settings.server, error)
        return self.broken

    def discard(self, push_id: PushId) -> None:
        """See `ServedTable.discard`."""
        push = self._waiting.pop(push_id, None)
        if push is not None:
            push.release()

    # -- reads -------------------------------------------------------------------------------------------------------

    def accept_pull(self, frame: PullFrame | RowPullFrame, connection: Connection, body: memoryview) -> Acceptance:
        """See `ServedTable.accept_pull`."""
        if not isinstance(frame, PullFrame):
            raise PeerError(f"row pull of dense table '{self.spec.name}'")
        if self.send_buffers.lent:
            self.send_buffers.reclaim(connection, "read", frame.taken)
        return ACCEPTED

    def serve(self, life: Life, connection: Connection, message: Fetched | Delivered) -> ServedValues | None:
        """Return the values after the updates that are due; see `ServedTable.serve`."""
        if self.broken or self.spec.rule.quorum is not None:
            self._settle()
        if self._lent is None:
            return ServedValues(self.memory if life in self._live else self._shared_copy(connection, message))
        num_early = 0
        if self._early is not None and self._early.is_used and isinstance(message, Fetched):
            num_early = self._early.take_sent(life, connection)
        if self.spec.rule.quorum is not None:  # it may be reached at any access
            return ServedValues(self.memory)
        lent = self._lent.lend(num_early)
        return ServedValues(lent.memory, lent, num_early)

    def _shared_copy(self, connection: Connection, message: Fetched | Delivered) -> memoryview:
        """Return a copy of the values in memory shared with this worker."""
        size_bytes = self.memory.nbytes
        if isinstance(message, Delivered):
            body = self.send_buffers.lend(connection, "delivery", message.clock, size_bytes)
        else:
            body = self.send_buffers.lend(connection, "read", message.request, size_bytes)
        if size_bytes:
            self.shard.copy_values(as_tensor(body, self._dtype))
        return body

    def _settle(self, *, all_kept: bool = False) -> None:
        """Make the deferred updates that are due, or all; raises UsageError if an update has failed."""
        problem = self._attempt(partial(self.shard.settle, all_kept=all_kept))
        if problem:
            raise UsageError(problem)

    def miss_reader(self, life: Life, message: Fetched | Delivered) -> None:
        """Make the deferred updates that are due: whether a read is answered decides nothing."""
        if self.spec.rule.quorum is not None:
            self._attempt(self.shard.settle)

    def repeat_look(self, message: RowPullFrame | RowsUsed, ids: memoryview) -> NoReturn:
        """Raise PeerError: there are no rows."""
        raise PeerError(f"ids of dense table '{self.spec.name}'")

    def note_taken(self, connection: Connection, clock: int) -> None:
        """See `ServedTable.note_taken`."""
        self.send_buffers.reclaim(connection, "delivery", clock)

    def note_read(self, life: Life, message: RowsUsed | Unsubscribe, body: memoryview) -> None:
        """Ignore what is about rows."""

    # -- clocks and members ------------------------------------------------------------------------------------------

    def advance(self, clock: int) -> None:
        """Do nothing: values change by updates alone."""

    def forget_worker(self, life: Life) -> None:
        """See `ServedTable.forget_worker`."""
        self._live.discard(life)

    def forget_connection(self, connection: Connection) -> None:
        """See `ServedTable.forget_connection`."""
        self.send_buffers.forget(connection)
        self._assemblies.forget_connection(connection)
        if self._early is not None:
            self._early.forget_connection(connection)

    def close(self) -> None:
        """See `ServedTable.close`."""
        self.shard.close()
        self.send_buffers.clear()
        self._assemblies.clear()
        self._waiting.clear()

    # -- the whole table ---------------------------------------------------------------------------------------------

    def body_bounds(self, message: object) -> tuple[int, int]:
        """See `ServedTable.body_bounds`."""
        match message:
            case PushFrame() | Initialise():
                return self.memory.nbytes, self.memory.nbytes
            case PushPiece():
                return 1, self.memory.nbytes
            case FactoredPush():
                return 0, self.memory.nbytes
            case LoadState():
                return 0, self.memory.nbytes * MAX_STATE_FACTOR + _STATE_SLACK_BYTES
            case _:
                return 0, SMALL_BYTES

    def _prepare_change(self) -> None:
        """Call before values change otherwise than by pushes: what was sent early does not count."""
        if self._lent is not None:
            self._lent.take_back()
        if self._early is not None:
            self._early.forget()

    def initialise(self, body: memoryview) -> None:
        """See `ServedTable.initialise`."""
        if self.shard.initialised:
            return
        expected = self.memory.nbytes
        if len(body) != expected:
            raise UsageError(f"first values of '{self.spec.name}' have {len(body)} bytes, expected {expected}")
        self._prepare_change()
        self.shard.store(as_tensor(body, self._dtype))

    def state(self) -> bytes:
        """Return values and rule state, after merging pushes that wait for a quorum; see `ServedTable.state`."""
        self._settle(all_kept=True)
        state = self.shard.state()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        require_memory(f"the state of table '{self.spec.name}'", 2 * num_bytes)
        return save(state)

    def load_state(self, body: memoryview) -> None:
        """See `ServedTable.load_state`."""
        require_memory(f"the state of table '{self.spec.name}'", 3 * body.nbytes)
        self._prepare_change()
        self.shard.load_state(load(bytes(body)), version=self.shard.version + 1)
        self.broken = ""  # all that a failed update may have changed is replaced

    def cut(self, *, values_only: bool = False, since: str | None = None) -> TableCut:
        """Return the values and the rule's state of now, after merging pushes that wait for a quorum."""
        del since  # all of it may have changed
        self._settle(all_kept=True)
        return self.shard.cut(has_plenty, values_only=values_only)

    def carry_out(self, request: TableOperation, body: memoryview, clock: int) -> memoryview:
        """Run a function over the range here; see `ServedTable.carry_out`."""
        self._settle()
        self._prepare_change()
        if not isinstance(request, CallFunction):
            raise UsageError(f"table '{self.spec.name}' on {self.host.name} has a shape, and no rows")
        return call_over_range(request, self.shard, self.host)

    @property
    def log(self) -> None:
        """There is none: what readers take of a table with a shape are versions."""

    def follow(self, clock: int) -> NoReturn:
        """Refuse: see `log`."""
        raise UsageError(f"table '{self.spec.name}' has a shape, and no rows: publish it")

    def part_to_publish(self) -> PartToPublish:
        """See `ServedTable.part_to_publish`."""
        self._settle()
        size_bytes = self.memory.nbytes
        if size_bytes and not self.shard.initialised:
            raise UsageError(f"table '{self.spec.name}' has no values yet: publish it after a clock")
        require_memory(f"a version of table '{self.spec.name}'", size_bytes)
        made = self.shard.cut(has_plenty, values_only=True)
        return PartToPublish(self.shard.span.start, size_bytes, made, self.host.transport)

    def save(self, path: Path, clock: int) -> None:
        """See `ServedTable.save`."""
        if self.broken:
            raise UsageError(self.broken)
        save_file({name: tensor.contiguous() for name, tensor in self.shard.state().items()}, path)

    def restore(self, saved: SavedTable, clock: int, version: int, hyper: tuple[Hyper, ...]) -> None:
        """See `ServedTable.restore`."""
        self._prepare_change()
        self.shard.load_state(saved.tensors(self.shard.span), version=version)
        self.shard.restore_hyper(hyper)
