"""Updates in chunks that stay in the cache: each element of gradients, values and state is read from memory once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, final

import msgspec
import torch
from msgspec.structs import replace
from torch.nn.functional import pad

from paceline.errors import UsageError
from paceline.update.kernels import Kernel, Numbers, Operands
from paceline.update.lasting import ChunkMemory, ShardMemory, ShardSettings
from paceline.update.native_steps import LANES, NO_UNDO, Addends, NativeSteps, StepMemory, Undo, steps_of
from paceline.update.rules import Hyper
from paceline.update.summing import (
    CHUNK,
    Combining,
    Contribution,
    ThreadPool,
    combine_stretch,
    divisor_of,
    num_nonfinite,
    weights_of,
)
from paceline.update.table import SegmentPiece, cut_within
from paceline.update.torch_rule import PREFIX, defaults_of, require_count

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.cuts import ShardCut

BLOCK: Final = 64  # elements: a multiple of torch's vector length on every machine and for every dtype
_WHOLE: Final = (0, 0)
# Neighbouring elements of a range, (start, stop), and the indices of the contributions with a gradient there.
Stretch: TypeAlias = tuple[tuple[int, int], tuple[int, ...]]


class Age(NamedTuple):
    """Key of pieces that one kernel call may step together.

    Args:
        group: hyperparameter group.
        step: number of steps that they have taken.
        fresh: whether their state has never been written.
    """

    group: int
    step: float
    fresh: bool


class Slice(msgspec.Struct, frozen=True):
    """Elements of a piece that one kernel call steps.

    Args:
        start: first element, counted from the start of the range.
        stop: one past the last element.
        piece: index of the piece.
        filling: numbers of elements of its block before and after it, outside of the range.
    """

    start: int
    stop: int
    piece: int
    filling: tuple[int, int] = _WHOLE


class UpdateCall(msgspec.Struct, frozen=True):
    """One call of a kernel: slices of one group and age, on views that are made once.

    Args:
        age: of all slices, before this step.
        piece: index of the piece of one slice.
        spans: (start, stop) of each slice, counted from the start of the chunk.
        values: view of each slice.
        state: by name, view of the state of each slice.
        filling: see `Slice`; a call with filling has one slice.
    """

    age: Age
    piece: int
    spans: tuple[tuple[int, int], ...]
    values: list[Tensor]
    state: dict[str, list[Tensor]]
    filling: tuple[int, int]

    def run(
        self, kernel: Kernel, gradient: Tensor, spare: Tensor, step: float, numbers: Numbers, divisor: float
    ) -> None:
        """Take one step with the gradient of the chunk, divided by `divisor`."""
        gradients = [gradient[start:stop] for start, stop in self.spans]
        if self.filling == _WHOLE:
            kernel.step(Operands(self.values, gradients, self.state, step, self.age.fresh, spare, divisor), numbers)
            return
        values = [pad(value, self.filling) for value in self.values]
        state = {name: [pad(part, self.filling) for part in parts] for name, parts in self.state.items()}
        gradients = [pad(part, self.filling) for part in gradients]
        kernel.step(Operands(values, gradients, state, step, self.age.fresh, spare, divisor), numbers)
        for own, filled in ((self.values, values), *((self.state[name], state[name]) for name in state)):
            own[0].copy_(filled[0][self.filling[0] :][: own[0].numel()])


class NativeCall(msgspec.Struct, frozen=True):
    """Calls of the C library for slices of one group and age.

    Args:
        age: of all slices, before this step.
        piece: index of the piece of one slice.
        having: indices of the contributions with a gradient there.
        places: of the slices.
    """

    age: Age
    piece: int
    having: tuple[int, ...]
    places: tuple[StepMemory, ...]


class Chunk(msgspec.Struct, frozen=True):
    """Neighbouring elements that one thread updates.

    Args:
        start: first element, counted from the start of the range.
        stop: one past the last element.
        sums: what kernel calls step: (start, stop) in the range, and the indices of the contributions that have it.
        calls: kernel calls, in any order.
        native: what the C library steps instead, in any order.
        memory: what all these change.
    """

    start: int
    stop: int
    sums: tuple[Stretch, ...]
    calls: tuple[UpdateCall, ...]
    native: tuple[NativeCall, ...]
    memory: ChunkMemory


@dataclass(slots=True)
class _Update:
    """One update, as all its threads see it.

    Args:
        contributions: to add.
        steps: of each piece, this one included.
        divisor: of the sums that is left to the kernel, see `Operands`.
        gradients: those of the contributions for the C library, if it is to be used.
        checks: whether it looks for sums that are not finite, and stops at the first.
        is_suspect: whether it has found one.
    """

    contributions: Sequence[Contribution]
    steps: Sequence[float]
    divisor: float
    gradients: Addends | None
    checks: bool = False
    is_suspect: bool = False


def cut_into_chunks(
    pieces: Sequence[SegmentPiece], taken: Sequence[int], size: int, *, in_lanes: bool
) -> list[list[Slice]]:
    """Return the slices of each chunk.

    Args:
        pieces: of the range.
        taken: indices of the pieces to step.
        size: largest number of elements in a chunk; a multiple of a block.
        in_lanes: whether elements must have the same vector lanes as in the whole tensor.
    """
    chunks: list[list[Slice]] = []
    for index in taken:
        piece = pieces[index]
        for start, stop, filling in _parts(piece) if in_lanes else [(piece.start, piece.stop, _WHOLE)]:
            shift, position = piece.offset - piece.start, start
            while position < stop:
                room = chunks[-1][0].start + size - (position + shift) if chunks else 0
                end = min(stop, position + room)
                if end < stop:
                    end -= end % BLOCK
                if end > position:
                    chunks[-1].append(Slice(position + shift, end + shift, index, filling))
                    position = end
                else:
                    end = stop if stop - position <= size else (position + size) // BLOCK * BLOCK
                    chunks.append([Slice(position + shift, end + shift, index, filling)])
                    position = end
    return chunks


def _parts(piece: SegmentPiece) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield (start, stop, filling) in the segment: the middle, and the cut block at either end."""
    head = min(piece.stop, -(-piece.start // BLOCK) * BLOCK)
    tail = piece.stop if piece.stop == piece.total else max(head, piece.stop // BLOCK * BLOCK)
    for start, stop in ((piece.start, head), (head, tail), (tail, piece.stop)):
        if start < stop:
            whole = (start, stop) == (head, tail)
            block = start // BLOCK * BLOCK
            yield start, stop, _WHOLE if whole else (start - block, min(block + BLOCK, piece.total) - stop)


def make_chunk(
    slices: Sequence[Slice],
    having: Sequence[tuple[int, ...]],
    ages: Sequence[Age],
    memory: tuple[Tensor, Mapping[str, Tensor]],
    names: Sequence[tuple[str, ...]],
    *,
    in_lanes: bool,
    is_native: bool,
    leaves_ends: bool,
    index: int,
    known: Sequence[str],
) -> Chunk:
    """Return the sums and kernel calls of one chunk.

    Args:
        slices: one chunk of `cut_into_chunks`.
        having: for each piece of the range, the indices of the contributions with a gradient for it.
        ages: of each piece.
        memory: values of the range, and its state by name.
        names: states of each group.
        in_lanes: whether neighbouring slices get separate kernel calls.
        is_native: whether the C library is to step what it can.
        leaves_ends: whether it leaves the last elements of slices to torch.
        index: number of the chunk.
        known: all states that an element may have.
    """
    start, stop = slices[0].start, slices[-1].stop
    sums: tuple[Stretch, ...] = tuple(
        ((members[0].start, members[-1].stop), having[members[0].piece])
        for members in _neighbours(slices, [having[each.piece] for each in slices])
    )
    grouped: dict[tuple[Age, tuple[int, int], int], list[tuple[int, int, int]]] = {}
    keys = [ages[each.piece] for each in slices]
    runs = [[each] for each in slices] if in_lanes else _neighbours(slices, keys)
    for run in runs:
        first, last = run[0], run[-1]
        alone = first.start if first.filling != _WHOLE else -1
        grouped.setdefault((ages[first.piece], first.filling, alone), []).append((first.start, last.stop, first.piece))
    values, state = memory
    calls = tuple(
        UpdateCall(
            age,
            members[0][2],
            tuple((a - start, b - start) for a, b, _ in members),
            [values[a:b] for a, b, _ in members],
            {name: [state[name][a:b] for a, b, _ in members] for name in names[age.group]},
            filling,
        )
        for (age, filling, _), members in grouped.items()
    )
    changed = [values, *(state[name] for name in sorted({name for call in calls for name in call.state}))]
    spans = tuple((part[start:stop].data_ptr(), part[start:stop].nbytes) for part in changed)
    offset = start * values.itemsize * (1 + len(known))
    changes = ChunkMemory(index, offset, spans)
    if not is_native or len({contributors for _, contributors in sums}) > 1:
        return Chunk(start, stop, sums, calls, (), changes)
    having_all = sums[0][1]
    whole = [call for call in calls if call.filling == _WHOLE]
    native = tuple(_native_call(call, start, having_all, known, leaves_ends=leaves_ends) for call in whole)
    rest = tuple(left for call in calls if (left := _rest_of(call, leaves_ends=leaves_ends)).spans)
    left_sums = tuple(((start + a, start + b), having_all) for call in rest for a, b in call.spans)
    return Chunk(start, stop, left_sums, rest, native, changes)


def _num_native(num: int, *, leaves_ends: bool) -> int:
    """Return how many of these elements the C library steps: the last ones may have other bits in torch."""
    return num - num % LANES if leaves_ends else num


def _native_call(
    call: UpdateCall, start: int, having: tuple[int, ...], known: Sequence[str], *, leaves_ends: bool
) -> NativeCall:
    """Return what the C library steps of a kernel call in a chunk that starts there."""
    places: list[StepMemory] = []
    for number, (a, b) in enumerate(call.spans):
        num = _num_native(b - a, leaves_ends=leaves_ends)
        state = [call.state[name][number][:num] if name in call.state else None for name in known]
        places += [StepMemory.of(start + a, call.values[number][:num], state)] if num else []
    return NativeCall(call.age, call.piece, having, tuple(places))


def _rest_of(call: UpdateCall, *, leaves_ends: bool) -> UpdateCall:
    """Return what of a kernel call the C library leaves to torch."""
    if call.filling != _WHOLE:
        return call
    firsts = [a + _num_native(b - a, leaves_ends=leaves_ends) for a, b in call.spans]
    kept = [number for number, (_, b) in enumerate(call.spans) if firsts[number] < b]

    def tails(parts: list[Tensor]) -> list[Tensor]:
        return [parts[number][firsts[number] - call.spans[number][0] :] for number in kept]

    return replace(
        call,
        spans=tuple((firsts[number], call.spans[number][1]) for number in kept),
        values=tails(call.values),
        state={name: tails(parts) for name, parts in call.state.items()},
    )


def _neighbours(slices: Sequence[Slice], keys: Sequence[object]) -> list[list[Slice]]:
    """Return the runs of slices with equal keys and without a gap."""
    shifts: list[int] = []  # number of gaps before each slice
    reached = slices[0].start
    for each in slices:
        shifts.append((shifts[-1] if shifts else 0) + (each.start != reached))
        reached = each.stop
    together = groupby(zip(slices, keys, shifts, strict=True), key=lambda found: found[1:])
    return [[each for each, _, _ in members] for _, members in together]


_HALF = (torch.bfloat16, torch.float16)
# Segments that are absent from each contribution; states of each group; whether slices lie in lanes; whether C steps.
PlanKey: TypeAlias = tuple[tuple[frozenset[int], ...], list[tuple[str, ...]], bool, bool]


class _Plan(msgspec.Struct, frozen=True):
    """Chunks of an update; the next update takes them again if `key` is equal and no state in them is fresh.

    Args:
        key: all that the chunks depend on, except the ages of the pieces.
        chunks: with all pieces that are stepped.
        taken: (pieces,), 1 for a piece that is stepped, else 0.
        is_fresh: whether some of their state has never been written.
    """

    key: PlanKey
    chunks: list[Chunk]
    taken: Tensor
    is_fresh: bool


class _Groups(NamedTuple):
    """What follows from the hyperparameters of all groups."""

    numbers: list[dict[str, Any]]
    names: list[tuple[str, ...]]  # states of the elements of each group
    in_lanes: bool
    divides: bool  # the kernel divides sums, where their dtype does not round meanwhile

    @classmethod
    def of(cls, kernel: Kernel, numbers: list[dict[str, Any]], dtype: torch.dtype) -> _Groups:
        """Ask the kernel."""
        is_half = dtype in _HALF
        divides = bool(numbers) and not is_half and all(map(kernel.divides, numbers))
        in_lanes = is_half or any(bool(each.get("fused")) for each in numbers)
        return cls(numbers, [kernel.names(each) for each in numbers], in_lanes, divides)


@final
class Chunked:
    """Runs a kernel over a range, chunk by chunk, and owns the state of its elements.

    Args:
        kernel: the rule.
        pieces: of the range.
        values: (elements of the range,), changed in place.
        combining: how contributions become one gradient.
        threads: pool that runs the chunks.
        lasting: where the state lies if it outlives this process; what a predecessor has left there is taken over.
        cuts: of the shard, whose owner changes the list: they keep what updates change.
    """

    def __init__(
        self,
        kernel: Kernel,
        pieces: Sequence[SegmentPiece],
        values: Tensor,
        combining: Combining,
        threads: ThreadPool,
        lasting: ShardMemory | None = None,
        cuts: Sequence[ShardCut] = (),
    ) -> None:
        self._cuts = cuts
        self._kernel, self._pieces, self._values = kernel, pieces, values
        self._combining, self._threads = combining, threads
        self._numbers: list[dict[str, Any]] = []  # all hyperparameters of each group, as of the last update
        self._groups = _Groups.of(kernel, self._numbers, values.dtype)  # of the last plan
        self._told: tuple[Hyper, ...] = ()  # the argument that `_numbers` was made from
        # None where torch takes all steps; zeroing is left to it, too.
        self._native: NativeSteps | None = steps_of(kernel, values) if combining.nonfinite != "zero" else None
        self._plan: _Plan | None = None  # of the last update
        self._state: dict[str, Tensor] = {}  # by name, each as long as the range
        self._held: list[tuple[str, ...]] = [()] * len(pieces)  # states of each piece
        self._steps = torch.zeros(len(pieces), dtype=torch.float32)  # of each piece, if the kernel counts them
        self._begun = False
        self._lasting = lasting
        self._resumes = False  # the next update may have been begun by a predecessor
        self.is_changed = False  # the settings, since they were last committed
        if lasting is not None:
            self._take_over(lasting)
        size = min(CHUNK, max(values.numel(), BLOCK))
        self._scratch = [values.new_empty((3, size)) for _ in range(threads.num_threads)]

    def apply(self, contributions: Sequence[Contribution], hyper: tuple[Hyper, ...]) -> int:
        """Update the values once; return the number of gradient elements that were replaced by 0."""
        self._set_hyper(hyper)
        self._begin()
        chunks, update = self._prepare(contributions)
        lasting = self._lasting
        if lasting is None:
            return self._threads.total(chunks, partial(self._do, update))
        lasting.progress.note_change()
        if self._resumes:
            number = lasting.record.numbers["num_applied"] + 1
            lasting.progress.undo(number, [chunk.memory for chunk in chunks])
            self._resumes = False
        return self._change(lasting, chunks, update)

    def try_to_apply(self, contributions: Sequence[Contribution], hyper: tuple[Hyper, ...]) -> bool:
        """Do as `apply` if all gradients and their sum are finite; else change nothing, and return False.

        They are looked at as they are added, while they are in the cache, and what was changed by then is undone. So
        it does not even begin where that could not be: unless all that changes was saved ahead.
        """
        lasting, plan = self._lasting, self._plan
        if lasting is None or (plan is None and not self._resumes):
            return False
        before = self._numbers, self._told, self._steps, self.is_changed
        self._set_hyper(hyper)
        number = lasting.record.numbers["num_applied"] + 1
        if self._resumes and lasting.progress.is_tried(number):  # the process before was killed in the same trial
            chunks, _ = self._prepare(contributions)
            lasting.progress.end_trial(number, [chunk.memory for chunk in chunks])
        elif plan is not None and plan.key == self._key(
            contributions, self._native_gradients(contributions)
        ):  # no state is written for the first time
            memory = [chunk.memory for chunk in plan.chunks]
            if lasting.progress.begin_trial(number, memory):
                chunks, update = self._prepare(contributions)
                update.checks = True
                self._change(lasting, chunks, update)
                if not update.is_suspect:
                    return True
                lasting.progress.end_trial(number, memory)
        self._numbers, self._told, self._steps, self.is_changed = before
        return False

    def _prepare(self, contributions: Sequence[Contribution]) -> tuple[list[Chunk], _Update]:
        """Return the chunks of an update, and what they have in common."""
        gradients = self._native_gradients(contributions)
        chunks = self._planned(contributions, gradients)
        steps: list[float] = self._steps.tolist() if self._kernel.counts_steps else [0.0] * len(self._pieces)
        divisor = self._left_to_kernel(contributions) if any(chunk.calls for chunk in chunks) else 1.0
        return chunks, _Update(contributions, steps, divisor, gradients)

    def _native_gradients(self, contributions: Sequence[Contribution]) -> Addends | None:
        """Return what the C library needs of contributions; None if torch is to take the steps."""
        if self._native is None or not self._native.takes(self._numbers):
            return None
        counts, scale = [contribution.count for contribution in contributions], self._combining.scale
        tensors = [contribution.gradient for contribution in contributions]
        return Addends.of(tensors, weights_of(counts, scale), divisor_of(counts, scale))

    def _change(self, lasting: ShardMemory, chunks: list[Chunk], update: _Update) -> int:
        """Update all chunks that are not done, so that a successor can go on in the middle."""
        progress, number = lasting.progress, lasting.record.numbers["num_applied"] + 1

        def change(chunk: Chunk, thread: int) -> int:
            if update.is_suspect:
                return 0
            done = progress.num_zeroed(number, chunk.memory)
            if done is not None:
                return done
            undo = progress.save(number, chunk.memory, thread, in_blocks=not chunk.calls)
            num_zeroed = self._do(update, chunk, thread, undo)
            progress.finish(number, chunk.memory, num_zeroed)
            return num_zeroed

        return self._threads.total(chunks, change)

    def preview(self, start: int, stop: int, contributions: Sequence[Contribution], hyper: tuple[Hyper, ...]) -> Tensor:
        """Return what `apply` would make of the elements `start` to `stop` of the range; changes nothing.

        Args:
            start: first element.
            stop: one past the last element.
            contributions: as for `apply`, but with the gradients of these elements.
            hyper: as for `apply`.
        """
        first, pieces = cut_within(self._pieces, start, stop)
        mine = slice(first, first + len(pieces))
        part = Chunked(self._kernel, pieces, self._values[start:stop].clone(), self._combining, ThreadPool(1))
        part._numbers, part._told, part._begun = list(self._numbers), self._told, self._begun
        part._state = {name: state[start:stop].clone() for name, state in self._state.items()}
        part._held, part._steps = self._held[mine], self._steps[mine].clone()
        part.apply(contributions, hyper)
        return part._values

    def saving(self, *, is_tried: bool) -> Callable[[], object] | None:
        """Return what has the chunks of the last update saved for the next one, which mostly has the same.

        The C library saves what it changes as it goes, so then only an update that is tried needs more.
        """
        plan = self._plan
        if self._lasting is None or plan is None or not (is_tried or any(chunk.calls for chunk in plan.chunks)):
            return None
        return self._lasting.saving([chunk.memory for chunk in plan.chunks])

    def _take_over(self, lasting: ShardMemory) -> None:
        """Go on with what a predecessor has committed, if there was one."""
        self._steps = lasting.steps
        settings = lasting.settings
        if settings is not None:
            self._numbers, self._begun, self._resumes = list(settings.numbers), settings.begun, True
            for index, names in enumerate(settings.held):
                self._hold(index, names)
            self.is_changed = False

    def settings(self, hyper: tuple[Hyper, ...]) -> ShardSettings:
        """Return what a successor has to know besides the tensors; note that it is committed."""
        self.is_changed = False
        return ShardSettings(hyper, tuple(self._numbers), tuple(self._held), self._begun)

    def state(self) -> dict[str, Tensor]:
        """Return the live state of every piece; see `UpdateRule.state`."""
        named: dict[str, Tensor] = {}
        for index, (piece, names) in enumerate(zip(self._pieces, self._held, strict=True)):
            if names and self._kernel.counts_steps:
                named[f"{index}.step"] = self._steps[index]
            named.update({f"{index}.{name}": piece.view(self._state[name]) for name in names})
        return named

    def element_states(self) -> tuple[dict[str, Tensor], tuple[tuple[str, ...], ...]]:
        """Return the live states by name, each as long as the range, and which of them each piece has."""
        return dict(self._state), tuple(self._held)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of `state`; see `UpdateRule.load_state`.

        Raises:
            UsageError: the state belongs to another rule.
        """
        foreign = sorted(key for key in state if key.partition(".")[2] not in (*self._kernel.known, "step"))
        if foreign or (state and not self._kernel.known):
            raise UsageError(
                f"The rule '{self._kernel.name}' has no state like this, but was given {sorted(foreign or state)[:3]}. "
                "Was it another rule?"
            )
        self._require_shapes(state)
        self._plan, self._begun = None, False
        self._held = [()] * len(self._pieces)
        self._steps.zero_()
        for held in self._state.values():
            held.zero_()  # a parameter without a state begins anew, from zero
        for key, value in state.items():
            index, _, name = key.partition(".")
            if name == "step":
                self._steps[int(index)] = value
            else:
                self._hold(int(index), (name,))
                self._pieces[int(index)].view(self._state[name]).copy_(value)

    def _require_shapes(self, state: Mapping[str, Tensor]) -> None:
        for key, value in state.items():
            index, _, name = key.partition(".")
            shape = () if name == "step" else self._pieces[int(index)].view(self._values).shape
            if value.shape != shape or not value.is_floating_point():
                raise UsageError(
                    f"State '{key}' has shape {tuple(value.shape)} and {value.dtype}, expected {tuple(shape)} and "
                    f"{self._values.dtype}."
                )
            require_count(name, value)

    def _left_to_kernel(self, contributions: Sequence[Contribution]) -> float:
        """Return the divisor that is left to the kernel; 1 if sums are divided before, as their dtype rounds then."""
        if not self._groups.divides:
            return 1.0
        divisor = divisor_of([contribution.count for contribution in contributions], self._combining.scale)
        exact = divisor == torch.tensor(divisor, dtype=torch.float32).item()  # as which torch takes it
        return divisor if exact else 1.0

    def _do(self, update: _Update, chunk: Chunk, thread: int, undo: Undo = NO_UNDO) -> int:
        """Update one chunk; return the number of gradient elements that were zeroed."""
        for cut in self._cuts:
            cut.keep(chunk.start, chunk.stop)
        if self._native is not None and update.gradients is not None:
            self._do_natively(self._native, update.gradients, chunk, update, undo)
        return self._do_in_torch(chunk, update, thread) if chunk.calls else 0

    def _do_natively(self, native: NativeSteps, gradients: Addends, chunk: Chunk, update: _Update, undo: Undo) -> None:
        """Take the steps of the C library, except for the elements that a predecessor has changed for good."""
        reached, passed, kept = undo.num_changed, 0, undo
        for call in chunk.native:
            numbers, step, fresh = self._numbers[call.age.group], update.steps[call.piece], call.age.fresh
            for whole in call.places:
                place = whole.after(min(reached - passed, whole.length)) if passed < reached else whole
                passed += whole.length
                if not place.length:
                    continue
                if undo.memory is not None:
                    kept = Undo(undo.memory, passed - place.length, place.start - chunk.start, undo.block)
                is_finite = native.step(place, gradients, call.having, numbers, step=step, fresh=fresh, undo=kept)
                if update.checks and not is_finite:
                    update.is_suspect = True

    def _do_in_torch(self, chunk: Chunk, update: _Update, thread: int) -> int:
        scratch, num_zeroed, divide = self._scratch[thread], 0, update.divisor == 1.0
        contributions = update.contributions
        if len(contributions) == 1 and self._combining.nonfinite != "zero":
            gradient = contributions[0].gradient[chunk.start : chunk.stop]
        else:
            gradient = scratch[2]
            for (start, stop), having in chunk.sums:
                out = gradient[start - chunk.start : stop - chunk.start]
                num_zeroed += combine_stretch(out, (start, stop), having, contributions, self._combining, divide=divide)
        spans = (gradient[start - chunk.start : stop - chunk.start] for (start, stop), _ in chunk.sums)
        if update.checks and any(map(num_nonfinite, spans)):
            update.is_suspect = True
        for call in chunk.calls:
            step, numbers = update.steps[call.piece], self._numbers[call.age.group]
            call.run(self._kernel, gradient, scratch, step, numbers, update.divisor)
        return num_zeroed

    def _set_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        """Set the hyperparameters of an update; omitted ones keep their value."""
        if hyper is self._told or hyper == self._told:
            return
        self.is_changed = True
        name = self._kernel.name
        known = self._numbers or [defaults_of(name) if name.startswith(PREFIX) else {}] * len(hyper)
        self._numbers = [{**old, **new} for old, new in zip(known, hyper, strict=True)]
        self._told = hyper

    def _begin(self) -> None:
        """Give every piece without loaded state its state before the first step."""
        if self._begun or not self._numbers:
            return
        for name, value in self._kernel.initial(self._numbers[0]).items():
            for index, piece in enumerate(self._pieces):
                if name not in self._held[index]:
                    self._hold(index, (name,))
                    piece.view(self._state[name]).fill_(value)
        self._begun = True
        if self._lasting is not None:  # else a successor would begin again, in the middle of the first update
            self._lasting.commit(self.settings(self._told))

    def _hold(self, index: int, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._state:
                self._state[name] = self._zeros(name)
        self.is_changed = True
        self._held[index] = tuple(name for name in self._kernel.known if name in names or name in self._held[index])

    def _zeros(self, name: str) -> Tensor:
        """Return memory for a state, zero unless a predecessor has left it."""
        if self._lasting is None:
            return torch.zeros_like(self._values)
        return self._lasting.state(self._kernel.known.index(name))

    def _key(self, contributions: Sequence[Contribution], gradients: Addends | None) -> PlanKey:
        """Return what the chunks of an update depend on, the ages of the pieces aside."""
        if self._groups.numbers is not self._numbers:
            self._groups = _Groups.of(self._kernel, self._numbers, self._values.dtype)
        absent = tuple(contribution.absent for contribution in contributions)
        return absent, self._groups.names, self._groups.in_lanes, gradients is not None

    def _planned(self, contributions: Sequence[Contribution], gradients: Addends | None) -> list[Chunk]:
        """Return the chunks of an update, and count a step of each of its pieces."""
        key, plan = self._key(contributions, gradients), self._plan
        if plan is None or plan.key != key:
            absent, names, in_lanes, is_native = key
            chunks, taken = self._make_plan(absent, names, in_lanes=in_lanes, is_native=is_native)
            is_fresh = any(call.age.fresh for chunk in chunks for call in (*chunk.calls, *chunk.native))
            plan = _Plan(key, chunks, taken, is_fresh)
        self._plan = None if plan.is_fresh else plan  # the next update has no fresh state here
        if self._kernel.counts_steps and self._lasting is None:
            self._steps += plan.taken
        elif self._kernel.counts_steps and self._lasting is not None:  # valid once the update is done
            self._steps = torch.add(self._lasting.steps, plan.taken, out=self._lasting.next_steps)
        return plan.chunks

    def _make_plan(
        self, absent: Sequence[frozenset[int]], names: list[tuple[str, ...]], *, in_lanes: bool, is_native: bool
    ) -> tuple[list[Chunk], Tensor]:
        having = [
            tuple(number for number, gone in enumerate(absent) if piece.segment not in gone) for piece in self._pieces
        ]
        taken = [index for index, contributors in enumerate(having) if contributors]
        steps: list[float] = self._steps.tolist()
        ages = [
            Age(piece.group, steps[index], not set(names[piece.group]) <= set(self._held[index]))
            for index, piece in enumerate(self._pieces)
        ]
        for index in taken:
            self._hold(index, names[self._pieces[index].group])
        chunks = [
            make_chunk(
                slices,
                having,
                ages,
                (self._values, self._state),
                names,
                in_lanes=in_lanes,
                is_native=is_native,
                leaves_ends=in_lanes and not (self._native is not None and self._native.takes_ends),
                index=number,
                known=self._kernel.known,
            )
            for number, slices in enumerate(cut_into_chunks(self._pieces, taken, CHUNK, in_lanes=in_lanes))
        ]
        return chunks, torch.tensor([float(bool(contributors)) for contributors in having], dtype=torch.float32)
