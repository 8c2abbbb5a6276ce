"""What a table keeps in memory that outlives its server, so that a successor goes on where a killed server stopped.

A killed process has made some of its writes, in their order, and none of the later ones. So what belongs together is
written beside what is valid, and one byte at the end says that the new is valid now (`LastingRecord`). An update of a
dense shard changes too much for that: it goes chunk by chunk, and notes which chunks are done and what the chunks at
hand looked like before (`UpdateProgress`). Rows are written ahead, piece by piece (`RowsMemory`). What has no fixed
size is copied whole, beside the last copy, which counts meanwhile (`SavedTensors`).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Final, final

import msgspec
import torch

from paceline.errors import ProtocolBug, UsageError
from paceline.update.dtypes import dtype_name, torch_dtype
from paceline.update.native_steps import ITEM_BYTES, NO_UNDO, Undo
from paceline.update.placement import as_tensor
from paceline.update.rows.layout import IDS, layouts, use_columns
from paceline.update.rows.memory import PIECE_ROWS
from paceline.update.rules import Hyper
from paceline.update.summing import CHUNK
from paceline.update.table import TableSpec, cut

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.partition import Range
    from paceline.transport.lasting_memory import LastingMemory
    from paceline.update.rows.rules import RowRule
    from paceline.update.rows.spec import RowTableSpec

_LENGTH_BYTES: Final = 8  # of the list of tensors, which follows it
_ALIGNMENT: Final = 64

_Entry = tuple[str, str, tuple[int, ...]]  # name, dtype and shape
_decoder: Final = msgspec.msgpack.Decoder(tuple[_Entry, ...])


@final
class SavedTensors:
    """Two copies of named tensors, whose names and shapes may change from copy to copy.

    Copies are numbered, and a new one is written over the one before the last. So the copy of the number that was
    noted last, elsewhere and at once, is whole, wherever this process ends.

    Args:
        lasting: where they lie.
        name: of their memory.

    Example:
        >>> from paceline.transport.lasting_memory import LastingMemory, MemoryHolder
        >>> with MemoryHolder() as holder:
        ...     holder.start()
        ...     saved = SavedTensors(LastingMemory.connect(holder.theirs), "saved")
        ...     saved.write(1, {"step": torch.tensor(2.0), "sum": torch.ones(1, 2)})
        ...     saved.read(1)
        {'step': tensor(2.), 'sum': tensor([[1., 1.]])}
    """

    def __init__(self, lasting: LastingMemory, name: str) -> None:
        self._lasting, self._name = lasting, name

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a copy, one number after the other.

        Raises:
            OSError: there is no memory for it.
            ProtocolBug: one of them is not a plain tensor of main memory.
        """
        entries = tuple(_entry(name, tensor) for name, tensor in tensors.items())
        encoded = msgspec.msgpack.encode(entries)
        start, starts = _aligned(_LENGTH_BYTES + len(encoded)), list[int]()
        for tensor in tensors.values():
            starts.append(start)
            start += _aligned(tensor.nbytes)
        memory = self._room(number, start)
        memory[:_LENGTH_BYTES] = len(encoded).to_bytes(_LENGTH_BYTES, "little")
        memory[_LENGTH_BYTES : _LENGTH_BYTES + len(encoded)] = encoded
        for begin, tensor in zip(starts, tensors.values(), strict=True):
            if tensor.nbytes:
                as_tensor(memory[begin : begin + tensor.nbytes], tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def read(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a copy, which lie where they were written: copy them before the next but one."""
        memory, found = self._lasting.region(self._region(number), 0), dict[str, torch.Tensor]()
        length = int.from_bytes(memory[:_LENGTH_BYTES], "little")
        start = _aligned(_LENGTH_BYTES + length)
        for name, dtype, shape in _decoder.decode(memory[_LENGTH_BYTES : _LENGTH_BYTES + length]):
            empty = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
            if empty.nbytes:
                found[name] = as_tensor(memory[start : start + empty.nbytes], empty.dtype).view(shape)
            else:
                found[name] = torch.empty(shape, dtype=empty.dtype)
            start += _aligned(empty.nbytes)
        return found

    def _room(self, number: int, size_bytes: int) -> memoryview:
        name = self._region(number)
        if self._lasting.has(name) and self._lasting.region(name, size_bytes).nbytes < size_bytes:
            self._lasting.drop(name)
        return self._lasting.region(name, size_bytes)

    def _region(self, number: int) -> str:
        return f"{self._name}-{number % 2}"


def _entry(name: str, tensor: Tensor) -> _Entry:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ProtocolBug(f"'{name}' is on {tensor.device} and {tensor.layout}, expected a plain tensor of main memory")
    return name, dtype_name(tensor.dtype), tuple(tensor.shape)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


_HEAD_BYTES: Final = 64  # the first byte says which numbers are valid
_NUMBER_BYTES: Final = 8
_LEAST_AHEAD_BYTES: Final = 1 << 20  # less is copied faster than a thread is woken
_BLOCK_BYTES: Final = 256 * 1024  # copied at once, as longer copies go past the cache
UNDO_BLOCK: Final = 1024  # elements of a copy that the C library makes: two copies stay in the cache
_UNDO_HEAD_BYTES: Final = 64  # of what `steps.c` keeps, and of each copy in it
_NUM_WAYS, _WHOLE, _AHEAD, _IN_BLOCKS = 3, 0, 1, 2  # how a chunk is saved
_REACHED_BITS: Final = 32


@final
class LastingRecord:
    """Whole numbers and some bytes that change all at once, in memory that outlives this process.

    Args:
        memory: of `LastingRecord.size_bytes`, zero at first.
        names: of the numbers, which are 0 at first.

    Example:
        >>> memory = memoryview(bytearray(LastingRecord.size_bytes(2, 100)))
        >>> LastingRecord(memory, ("version", "rows")).commit(b"settings", version=3)
        >>> found = LastingRecord(memory, ("version", "rows"))
        >>> found.numbers, found.settings
        ({'version': 3, 'rows': 0}, b'settings')
    """

    def __init__(self, memory: memoryview, names: Sequence[str]) -> None:
        self._memory = memory
        self._names = tuple(names)
        self._layout = struct.Struct(f"={len(names) + 2}q")  # and where the settings lie, and how long they are
        self._room = (memory.nbytes - _HEAD_BYTES - 2 * self._layout.size) // 2
        *numbers, self._area, length = self._layout.unpack_from(memory, self._numbers_at(memory[0]))
        self.numbers: Final = dict(zip(self._names, numbers, strict=True))
        start = self._settings_at(self._area)
        self.settings = bytes(memory[start : start + length])

    @staticmethod
    def size_bytes(num_numbers: int, settings_bytes: int) -> int:
        """Return how much memory a record takes with settings of so many bytes at most."""
        return _HEAD_BYTES + 2 * (_NUMBER_BYTES * (num_numbers + 2) + settings_bytes)

    def commit(self, settings: bytes | None = None, **changes: int) -> None:
        """Change some numbers, and the settings where they are given; raises UsageError if these do not fit."""
        if settings is not None:
            if len(settings) > self._room:
                raise UsageError(f"the settings of a table take {len(settings)} bytes, expected {self._room} at most")
            self._area = 1 - self._area
            start = self._settings_at(self._area)
            self._memory[start : start + len(settings)] = settings
            self.settings = settings
        self.numbers.update(changes)
        slot = 1 - self._memory[0]
        self._layout.pack_into(
            self._memory, self._numbers_at(slot), *self.numbers.values(), self._area, len(self.settings)
        )
        self._memory[0] = slot

    def _numbers_at(self, slot: int) -> int:
        return _HEAD_BYTES + slot * self._layout.size

    def _settings_at(self, area: int) -> int:
        return _HEAD_BYTES + 2 * self._layout.size + area * self._room


class ChunkMemory(msgspec.Struct, frozen=True):
    """What one chunk of an update changes.

    Args:
        index: number of the chunk.
        offset: where it lies in a copy of the whole shard, in bytes.
        spans: address and bytes of each part.
    """

    index: int
    offset: int
    spans: tuple[tuple[int, int], ...]

    def copy_to(self, target: int) -> None:
        """Copy it to an address."""
        for address, num_bytes in self.spans:
            for start in range(0, num_bytes, _BLOCK_BYTES):
                ctypes.memmove(target + start, address + start, min(_BLOCK_BYTES, num_bytes - start))
            target += num_bytes

    def copy_from(self, source: int) -> None:
        """Restore it from a copy."""
        for address, num_bytes in self.spans:
            ctypes.memmove(address, source, num_bytes)
            source += num_bytes

    def restore_block(self, source: int) -> int:
        """Restore the block that steps of the C library have kept last; return how many elements they changed before.

        `source` is their memory, as `steps.c` lays it out.
        """
        begin = _NUMBER_BYTES * ctypes.c_int64.from_address(source).value
        if not begin:  # nothing has changed yet
            return 0
        num_changed, first, num, kept = (ctypes.c_int64 * 4).from_address(source + begin)
        source += begin + _UNDO_HEAD_BYTES
        for number, (address, _) in enumerate(self.spans):
            if kept >> number & 1:
                ctypes.memmove(address + first * ITEM_BYTES, source, num * ITEM_BYTES)
            source += UNDO_BLOCK * ITEM_BYTES
        return int(num_changed)


@final
class UpdateProgress:
    """Which chunks of one update are done, and what those under way looked like before.

    Updates are numbered from 1. The threads of an update call it at once, each with its own chunks. What a chunk looks
    like is saved as it is about to be changed, in memory of the thread: block by block while the C library goes through
    it, as a block stays in the cache; else all of it. Or it is saved ahead, between two updates, while workers compute,
    as an update takes half as long again if it saves whole chunks. A copy that was made ahead counts if nothing has
    changed the shard since then.

    Where all chunks were saved ahead, an update may be *tried*: it looks for gradients that are not finite as it adds
    them, and what it has changed by then can be undone, by this process or by a successor of it.

    Args:
        memory: of `size_bytes`, zero at first.
        num_chunks: the most chunks of an update.
        saved: memory of each thread.
        whole: memory for the whole shard, to save chunks ahead; it takes none until then.
    """

    def __init__(self, memory: memoryview, num_chunks: int, saved: Sequence[memoryview], whole: memoryview) -> None:
        words = memory.cast("q")
        self._done = words[:num_chunks]  # by chunk, the last update that has changed it
        self._zeroed = words[num_chunks : 2 * num_chunks]  # by chunk, how many elements that update replaced by 0
        # By chunk, the last update that was undone in its middle, and how many elements it has changed for good.
        self._reached = words[2 * num_chunks : 3 * num_chunks]
        self._tried = words[3 * num_chunks : 3 * num_chunks + 1]  # the last update that was begun as a trial
        self._notes = words[3 * num_chunks + 1 :]  # by thread: update, chunk, and how that was saved
        self._num_chunks = num_chunks
        self._memory = (*saved, whole)
        self._saved = [_address(each) for each in saved]
        self._whole = _address(whole) if whole else 0
        self._epoch = 0  # counts changes of the shard
        self._ahead: dict[int, tuple[int, ChunkMemory]] = {}  # by chunk, what was saved ahead, and in which epoch

    @staticmethod
    def size_bytes(num_chunks: int, num_threads: int) -> int:
        """Return how much memory it takes, besides what chunks are saved in."""
        return _NUMBER_BYTES * (3 * num_chunks + 1 + num_threads)

    def note_change(self) -> None:
        """Note that the shard is about to change: what was saved ahead counts for this change alone."""
        self._epoch += 1

    def begin_trial(self, update: int, chunks: Sequence[ChunkMemory]) -> bool:
        """Note that an update is tried; False, and nothing is noted, if some of its chunks are not saved ahead."""
        if not all(self._ahead.get(chunk.index) == (self._epoch, chunk) for chunk in chunks):
            return False
        self.note_change()
        self._tried[0] = update
        return True

    def is_tried(self, update: int) -> bool:
        """Return whether this update was begun as a trial that is not undone, perhaps by a predecessor."""
        return self._tried[0] == update

    def end_trial(self, update: int, chunks: Sequence[ChunkMemory]) -> None:
        """Restore all chunks as they were before this update, if it was begun as a trial and is not undone yet.

        The chunks are those of the trial: another cut would find other bytes in their copies.
        """
        if not self.is_tried(update):
            return
        for chunk in chunks:
            chunk.copy_from(self._at(chunk))
        for index in range(self._num_chunks):
            self._done[index] = 0
        for thread in range(len(self._notes)):
            self._notes[thread] = 0
        self._tried[0] = 0  # last: a successor of a process that was killed meanwhile restores them once more

    def undo(self, update: int, chunks: Sequence[ChunkMemory]) -> None:
        """Restore the chunks that an update has begun and not done; called before the update goes on."""
        self.end_trial(update, chunks)
        for thread, note in enumerate(self._notes):
            number, rest = divmod(note, _NUM_WAYS * self._num_chunks)
            index, way = divmod(rest, _NUM_WAYS)
            if number == update and self._done[index] != update:
                chunk = chunks[index]
                if way == _IN_BLOCKS:
                    reached = max(chunk.restore_block(self._saved[thread]), self._num_reached(update, chunk))
                    self._reached[index] = (update << _REACHED_BITS) + reached
                else:
                    chunk.copy_from(self._at(chunk) if way == _AHEAD else self._saved[thread])
            self._notes[thread] = 0  # only now may the thread save another chunk

    def _num_reached(self, update: int, chunk: ChunkMemory) -> int:
        """Return how many elements of a chunk an update has changed for good that was undone in its middle."""
        number, num_changed = divmod(self._reached[chunk.index], 1 << _REACHED_BITS)
        return num_changed if number == update else 0

    def num_zeroed(self, update: int, chunk: ChunkMemory) -> int | None:
        """Return what `finish` was told if the update has done this chunk, else None."""
        return self._zeroed[chunk.index] if self._done[chunk.index] == update else None

    def save(self, update: int, chunk: ChunkMemory, thread: int, *, in_blocks: bool = False) -> Undo:
        """Save what a chunk looks like, unless it was saved ahead; called before it is changed.

        With `in_blocks`, its steps save it, where the result says, and go on behind what is changed for good.
        """
        way, undo = _WHOLE, NO_UNDO
        if self._ahead.get(chunk.index) == (self._epoch - 1, chunk):
            way = _AHEAD
        elif in_blocks:
            way, undo = _IN_BLOCKS, Undo(self._saved[thread], self._num_reached(update, chunk), block=UNDO_BLOCK)
            ctypes.c_int64.from_address(self._saved[thread]).value = 0  # no copy counts yet
        elif self._num_reached(update, chunk):
            raise ProtocolBug(f"a part of chunk {chunk.index} was changed for good by another library than this one")
        else:
            chunk.copy_to(self._saved[thread])
        self._notes[thread] = _NUM_WAYS * (update * self._num_chunks + chunk.index) + way
        return undo

    def finish(self, update: int, chunk: ChunkMemory, num_zeroed: int) -> None:
        """Note that an update has changed a chunk."""
        self._zeroed[chunk.index] = num_zeroed
        self._done[chunk.index] = update

    @property
    def epoch(self) -> int:
        """How often the shard was about to change."""
        return self._epoch

    def save_ahead(self, chunks: Sequence[ChunkMemory], epoch: int) -> None:
        """Save what chunks look like, until the shard changes; in a thread of its own, called once in an epoch.

        Called twice, it would write over a copy that an update relies on.
        """
        for chunk in chunks:
            if self._epoch != epoch:
                return
            chunk.copy_to(self._at(chunk))
            if self._epoch == epoch:  # nothing was changed while it was copied
                self._ahead[chunk.index] = epoch, chunk

    def _at(self, chunk: ChunkMemory) -> int:
        return self._whole + chunk.offset


def _undo_bytes(num_arrays: int) -> int:
    """Return how much memory the C library takes for its two copies of a block, of values and all states of a rule."""
    return _UNDO_HEAD_BYTES + 2 * (_UNDO_HEAD_BYTES + num_arrays * UNDO_BLOCK * ITEM_BYTES)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class ShardSettings(msgspec.Struct, frozen=True):
    """What a shard knows besides numbers and tensors.

    Args:
        hyper: of each group, as of the last push with hyperparameters.
        numbers: all hyperparameters of each group.
        held: for each piece, the names of the states that it has.
        begun: whether the rule has given the pieces their first state.
    """

    hyper: tuple[Hyper, ...]
    numbers: tuple[Hyper, ...] = ()
    held: tuple[tuple[str, ...], ...] = ()
    begun: bool = False


_SHARD_NUMBERS: Final = ("num_applied", "version", "num_zeroed", "initialised", "steps_row", "num_saves")
_settings_decoder: Final = msgspec.msgpack.Decoder(ShardSettings)
_SETTINGS_BYTES: Final = 64 * 1024  # and more for each group and piece


@final
class ShardMemory:
    """The memory of one dense shard that outlives its server: values, state, settings and progress.

    Args:
        lasting: where it lies.
        spec: the whole table.
        span: of the shard.
        num_states: the most states that an element has.
        num_threads: threads of an update.
        saver: saves chunks ahead of updates, if there is to be memory for it: as much as the shard has.

    Raises:
        OSError: there is no such memory.
    """

    def __init__(
        self,
        lasting: LastingMemory,
        spec: TableSpec,
        span: Range,
        *,
        num_states: int,
        num_threads: int,
        saver: Executor | None = None,
    ) -> None:
        self._lasting, self._prefix, self._dtype = lasting, f"table/{spec.name}/", torch_dtype(spec.dtype)
        item_bytes, num_pieces = self._dtype.itemsize, len(cut(spec, span))
        self.value_bytes: Final = span.length * item_bytes
        self.memory: Final = region_of(lasting, self._values_name, max(1, self.value_bytes))[: self.value_bytes]
        record_bytes = LastingRecord.size_bytes(
            len(_SHARD_NUMBERS), _SETTINGS_BYTES + 1024 * len(spec.rule.groups) + 64 * num_pieces
        )
        num_chunks = span.length // (CHUNK // 2) + 2
        most_threads = max(num_threads, os.cpu_count() or 1)
        progress_bytes = UpdateProgress.size_bytes(num_chunks, most_threads)
        steps_bytes, all_bytes = 2 * 4 * max(1, num_pieces), (1 + num_states) * self.value_bytes
        # One region for all of it, as each takes a descriptor in two processes.
        sizes = (record_bytes, progress_bytes, steps_bytes, num_states * self.value_bytes, all_bytes)
        record, progress, steps, self._states, whole = _parts(lasting, f"{self._prefix}shard", sizes)
        self.record: Final = LastingRecord(record, _SHARD_NUMBERS)
        self._steps: Final = as_tensor(steps, torch.float32).view(2, -1)[:, :num_pieces]
        # One update at a time: the tables of a server may share it, and it stays in the cache.
        saved_bytes = max((1 + num_states) * CHUNK * item_bytes, _undo_bytes(1 + num_states))
        saved = [
            lasting.region(name, saved_bytes, sparse=True)
            for thread in range(most_threads)
            if lasting.has(name := f"saved/{thread}/{saved_bytes}") or thread < num_threads
        ]
        self.saved: Final = SavedTensors(lasting, f"{self._prefix}saved")  # of rules that update whole tensors
        self._saver = saver if all_bytes >= _LEAST_AHEAD_BYTES else None
        self.progress: Final = UpdateProgress(progress, num_chunks, saved, whole)

    @property
    def _values_name(self) -> str:
        return f"{self._prefix}values"

    @property
    def descriptor(self) -> int:
        """The file of the values."""
        return self._lasting.file(self._values_name, self.value_bytes)

    @property
    def settings(self) -> ShardSettings | None:
        """What was committed last; None before that."""
        return _settings_decoder.decode(self.record.settings) if self.record.settings else None

    def state(self, number: int) -> Tensor:
        """Return the memory of a state by its number, (elements of the range,), as it was left; zero if it is new."""
        start = number * self.value_bytes
        return as_tensor(self._states[start : start + self.value_bytes], self._dtype)

    def saving(self, chunks: Sequence[ChunkMemory]) -> Callable[[], object] | None:
        """Return what has these chunks saved for the next update, while the server waits for it; does not block."""
        saver, progress, epoch = self._saver, self.progress, self.progress.epoch
        return None if saver is None else lambda: saver.submit(progress.save_ahead, chunks, epoch)

    @property
    def steps(self) -> Tensor:
        """The number of steps of each piece, as of the last commit."""
        return self._steps[self.record.numbers["steps_row"]]

    @property
    def next_steps(self) -> Tensor:
        """Memory for the number of steps of each piece after the update at hand, valid with `advances_steps`."""
        return self._steps[1 - self.record.numbers["steps_row"]]

    def commit(self, settings: ShardSettings | None = None, *, advances_steps: bool = False, **changes: int) -> None:
        """Change numbers of the record, and the settings where they are given, at once."""
        if advances_steps:
            changes["steps_row"] = 1 - self.record.numbers["steps_row"]
        self.record.commit(None if settings is None else msgspec.msgpack.encode(settings), **changes)


_ROW_NUMBERS: Final = (
    "num_applied",
    "version",
    "num_slots",
    "num_admitted",
    "num_zeroed",
    "num_pieces",  # of the update at hand that are written
    "num_ahead",  # rows of the next piece that lie ready to be written
)
_hyper_decoder: Final = msgspec.msgpack.Decoder(tuple[Hyper, ...])


@final
class RowsMemory:
    """The memory of the rows of one table that outlives their server.

    Rows are written ahead: the new rows of a piece of an update first lie here, then this is noted, then they are
    written to their columns. A successor writes them again, which changes nothing where they were written already.

    Args:
        lasting: where it lies.
        spec: of the table.
        rule: whose state is kept.

    Raises:
        OSError: there is no such memory.
    """

    def __init__(self, lasting: LastingMemory, spec: RowTableSpec, rule: RowRule) -> None:
        self._lasting, self._prefix = lasting, f"table/{spec.name}/"
        self._layouts = {name: each for name, each in layouts(spec, rule).items() if name not in use_columns(spec.life)}
        sizes = [PIECE_ROWS * layout.row_bytes for layout in self._layouts.values()]
        record_bytes = LastingRecord.size_bytes(len(_ROW_NUMBERS), _SETTINGS_BYTES)
        record, *ahead = _parts(lasting, f"{self._prefix}rows", [record_bytes, *sizes])
        self.record: Final = LastingRecord(record, _ROW_NUMBERS)
        self._ahead = {  # by column, the rows of a piece
            name: as_tensor(part, layout.dtype).view(PIECE_ROWS, layout.width)
            for (name, layout), part in zip(self._layouts.items(), ahead, strict=True)
        }
        for name in self._layouts:  # now, while it can still be said that there is none
            lasting.file(self._column_name(name), PAGESIZE, sparse=True)

    @property
    def hyper(self) -> tuple[Hyper, ...]:
        """What was committed last; empty before that."""
        return _hyper_decoder.decode(self.record.settings) if self.record.settings else ()

    def column(self, name: str) -> int:
        """Return a descriptor of the file of a column, which the caller owns."""
        return os.dup(self._lasting.file(self._column_name(name), PAGESIZE, sparse=True))

    def _column_name(self, name: str) -> str:
        return f"{self._prefix}column/{name}"

    def rows(self, num: int) -> dict[str, Tensor]:
        """Return memory for so many rows of a piece by column, without ids."""
        return {name: rows[:num] for name, rows in self._ahead.items() if name != IDS}

    @property
    def ids_ahead(self) -> Tensor:
        """The ids of the rows that lie ready to be written, (n,)."""
        return self._ahead[IDS].view(-1)[: self.record.numbers["num_ahead"]]

    def write_ahead(self, ids: Tensor) -> None:
        """Note that the rows of a piece lie ready in `rows`, under these distinct ids."""
        self._ahead[IDS].view(-1)[: len(ids)] = ids
        self.record.commit(num_ahead=len(ids))

    def note_written(self, num_slots: int, num_admitted: int) -> None:
        """Note that the rows that lay ready are written."""
        num_pieces = self.record.numbers["num_pieces"] + 1
        self.record.commit(num_ahead=0, num_pieces=num_pieces, num_slots=num_slots, num_admitted=num_admitted)

    def commit(self, hyper: tuple[Hyper, ...] | None, **changes: int) -> None:
        """Change numbers of the record, and the hyperparameters where they are given, between two updates."""
        self.record.commit(None if hyper is None else msgspec.msgpack.encode(hyper), num_pieces=0, **changes)


def _parts(lasting: LastingMemory, name: str, sizes: Sequence[int]) -> list[memoryview]:
    """Return parts of one sparse region, each at an address that any number may have."""
    whole, start, parts = region_of(lasting, name, sum(map(_padded, sizes)), sparse=True), 0, list[memoryview]()
    for size in sizes:
        parts.append(whole[start : start + size])
        start += _padded(size)
    return parts


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // PAGESIZE) * PAGESIZE


def region_of(lasting: LastingMemory, name: str, size_bytes: int, *, sparse: bool = False) -> memoryview:
    """Return a region of this very size: a declaration that has failed may have left one of another size."""
    found = lasting.region(name, size_bytes, sparse=sparse)
    if found.nbytes != size_bytes:
        lasting.drop(name)
        found = lasting.region(name, size_bytes, sparse=sparse)
    return found
