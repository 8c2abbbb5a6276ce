"""Declarations of dense tables, as plain data that is equal in all processes of a job; the pieces of a range."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, zip_longest
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from paceline.core.consistency import Consistency
from paceline.errors import PeerError, UsageError
from paceline.update.rules import Hyper, RuleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.partition import Range

DType: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]
TABLE_DTYPES: tuple[DType, ...] = get_args(DType)
Scale: TypeAlias = Literal["sum", "mean", "samples"]
NonFinite: TypeAlias = Literal["reject", "zero", "halt", "ignore"]

MAX_NAME = 500  # characters of the name of a table
MAX_SEGMENTS = 1 << 14  # parameters of a table
MAX_DIMS = 64  # of a parameter, as torch computes with
MAX_CONSISTENCY = 100  # characters of its name
MAX_QUORUM = 1 << 16  # pushes that become one update
_MOST_ELEMENTS = 1 << 63


class Segment(msgspec.Struct, frozen=True):
    """One parameter: its name, its shape (`()` for a scalar) and its hyperparameter group."""

    name: str
    shape: tuple[int, ...]
    group: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TableSpec(msgspec.Struct, frozen=True):
    """Parameters that share an update rule and a consistency, laid out flat in the order of `segments`.

    Args:
        name: unique in the job.
        segments: the parameters; their order is the flat order.
        dtype: of values, gradients and optimizer state.
        rule: how gradients become values.
        consistency: as `Consistency.parse` reads it, "ssp:3" for example.
        scale: what one update applies of the gradients g_i with their sample counts n_i: "sum" is Σ g_i, "mean" is
            Σ g_i / number of contributions, "samples" is Σ n_i g_i / Σ n_i.
        nonfinite: what happens to a gradient with NaN or infinity: "reject" drops the push, "zero" zeroes those
            elements, "halt" stops the job, "ignore" applies it unchecked.

    Example:
        >>> spec = TableSpec(
        ...     name="w",
        ...     segments=(Segment("weight", (2, 3)), Segment("bias", (2,))),
        ...     dtype="float32",
        ...     rule=RuleSpec("add", ({},)),
        ...     consistency="bsp",
        ...     scale="sum",
        ...     nonfinite="reject",
        ... )
        >>> spec.validate()
        >>> spec.numel, spec.offsets
        (8, (0, 6))
    """

    name: str
    segments: tuple[Segment, ...]
    dtype: DType
    rule: RuleSpec
    consistency: str
    scale: Scale
    nonfinite: NonFinite

    @property
    def numel(self) -> int:
        """Number of elements of the whole table."""
        return sum(segment.numel for segment in self.segments)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of each segment in the flat table."""
        return tuple(accumulate((segment.numel for segment in self.segments[:-1]), initial=0))

    def validate(self) -> None:
        """Raise UsageError for the first invalid value; types are not checked."""
        for problem in self._problems():
            raise UsageError(f"Table {shown_name(self.name)}: {problem}")

    def _problems(self) -> Iterator[str]:
        if not self.name:
            yield "it has no name. Give it one that is unique in the job."
        if not self.name.isprintable():
            yield "its name has characters that cannot be printed. Give it one of letters and digits."
        if len(self.name) > MAX_NAME:
            yield f"its name has {len(self.name)} characters, expected at most {MAX_NAME}."
        if not self.segments:
            yield "it has no parameters. Give at least one."
        if len(self.segments) > MAX_SEGMENTS:
            yield f"it has {len(self.segments)} parameters, expected at most {MAX_SEGMENTS}. Make several tables."
        yield from self._segment_problems()
        choices = (("dtype", self.dtype, DType), ("scale", self.scale, Scale), ("nonfinite", self.nonfinite, NonFinite))
        for field, value, allowed in choices:
            if value not in get_args(allowed):
                yield f"{field} is '{value}', expected one of {', '.join(get_args(allowed))}."
        if not self.rule.name:
            yield "its update rule has no name. Use one of paceline.update, SGD(lr=0.1) for example."
        if not self.rule.groups:
            yield f"its rule {self.rule.name} has no hyperparameter group. Give at least one; it may be empty."
        yield from consistency_problems(self.consistency)
        yield from self._quorum_problems()

    def _quorum_problems(self) -> Iterator[str]:
        quorum, policy = self.rule.quorum, Consistency.parse(self.consistency)
        if quorum is not None and not (1 <= quorum.num_pushes <= quorum.num_workers <= MAX_QUORUM):
            yield f"its rule waits for {quorum.num_pushes} pushes of {quorum.num_workers} workers, expected 1 to all."
        if quorum is not None and not 0 <= quorum.grace_s < math.inf:
            yield f"its rule waits {quorum.grace_s} s for further pushes, expected 0 s or more."
        if self.rule.quorum is not None and (policy.bound is not None or policy.visible == "on_clock"):
            yield f"its rule waits for a quorum of pushes, but {self.consistency} waits for clocks: take asynchronous."

    def _segment_problems(self) -> Iterator[str]:
        seen: set[str] = set()
        for index, segment in enumerate(self.segments):
            where = f"parameter {index} ('{segment.name}')"
            if segment.name in seen:
                yield f"{where} has the name of an earlier parameter. Give each its own."
            if len(segment.shape) > MAX_DIMS:
                yield f"{where} has {len(segment.shape)} dimensions, expected at most {MAX_DIMS}."
            if any(size < 0 for size in segment.shape):
                yield f"{where} has shape {segment.shape}, expected sizes of 0 or more."
            if not counts_in_torch(segment.shape):
                yield f"{where} has shape {segment.shape}, expected sizes whose product without zeros is below 2**63."
            if not 0 <= segment.group < len(self.rule.groups):
                yield f"{where} is in group {segment.group}, but its rule has {len(self.rule.groups)} group(s)."
            seen.add(segment.name)


def counts_in_torch(shape: Sequence[int]) -> bool:
    """Return whether torch and files can name this shape: without its zeros, it has fewer than 2**63 elements.

    >>> counts_in_torch((2**31, 2**31)), counts_in_torch((0, 2**63)), counts_in_torch((0, 2**32, 2**32))
    (True, False, False)
    """
    return math.prod(size or 1 for size in shape) < _MOST_ELEMENTS


def shown_name(name: str) -> str:
    """Return a name as messages show it, on one line and of bounded length."""
    return f"'{name}'" if name.isprintable() and len(name) <= MAX_NAME else f"{name[:60]!r}..."


def consistency_problems(consistency: str) -> Iterator[str]:
    """Yield a problem for the name of a consistency that is longer than any valid one."""
    if len(consistency) > MAX_CONSISTENCY:
        short = consistency[:MAX_CONSISTENCY]
        yield f"its consistency '{short}...' has {len(consistency)} characters, expected at most {MAX_CONSISTENCY}."


def positional_name(group: int, index: int) -> str:
    """Return the name of a parameter that is known only by its position in an optimizer."""
    return f"group{group}.{index}"


def position_hint(name: str) -> str:
    """Return a sentence for messages that explains a positional name of a parameter; "" for other names.

    >>> position_hint("group0.2")
    " ('group0.2' is parameter 2 of group 0 of the optimizer: with model=... messages use the names in the model.)"
    >>> position_hint("layer.weight")
    ''
    """
    group, dot, index = name.removeprefix("group").partition(".")
    if name != f"group{group}.{index}" or not (dot and group.isdecimal() and index.isdecimal()):
        return ""
    return (
        f" ('{name}' is parameter {index} of group {group} of the optimizer: with model=... messages use the names in "
        "the model.)"
    )


_decoder = msgspec.msgpack.Decoder(TableSpec)


def encode_table(spec: TableSpec) -> bytes:
    """Return the table as msgpack; `decode_table` is the inverse."""
    return msgspec.msgpack.encode(spec)


def decode_table(data: bytes | memoryview) -> TableSpec:
    """Decode a table of another process, and validate it.

    Raises:
        PeerError: the data are not a table, or have invalid values.
    """
    try:
        spec = _decoder.decode(data)
        spec.validate()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UsageError) as error:
        raise PeerError(f"A peer sent a table that cannot be used (do both run the same version?): {error}") from error
    return spec


def differences(ours: TableSpec, theirs: TableSpec, limit: int = 3) -> list[str]:
    """Return the first `limit` differences of `theirs` from `ours`, one sentence each; empty if equal."""
    return list(islice(_differences(ours, theirs), limit))


def _differences(ours: TableSpec, theirs: TableSpec) -> Iterator[str]:
    yield from _field("the name", ours.name, theirs.name)
    yield from _segment_differences(ours, theirs)
    yield from _field("the dtype", ours.dtype, theirs.dtype)
    yield from _field("the update rule", ours.rule.name, theirs.rule.name)
    yield from _group_differences(ours.rule.groups, theirs.rule.groups)
    yield from _field("the quorum", ours.rule.quorum, theirs.rule.quorum)
    yield from _field("the consistency", ours.consistency, theirs.consistency)
    yield from _field("the scale", ours.scale, theirs.scale)
    yield from _field("the treatment of non-finite gradients", ours.nonfinite, theirs.nonfinite)


def _field(what: str, ours: object, theirs: object) -> Iterator[str]:
    if ours != theirs:
        yield f"{what} is {ours} here and {theirs} there."


def _segment_differences(ours: TableSpec, theirs: TableSpec) -> Iterator[str]:
    yield from _field("the number of parameters", len(ours.segments), len(theirs.segments))
    for index, (our, their) in enumerate(zip_longest(ours.segments, theirs.segments)):
        if our is None:
            yield f"parameter {index} ('{their.name}' {their.shape}) exists only there."
        elif their is None:
            yield f"parameter {index} ('{our.name}' {our.shape}) exists only here."
        elif (our.name, our.shape) != (their.name, their.shape):
            hint = position_hint(our.name) or position_hint(their.name)
            yield f"parameter {index} is '{our.name}' {our.shape} here and '{their.name}' {their.shape} there.{hint}"
        else:
            yield from _field(f"the group of parameter {index} ('{our.name}')", our.group, their.group)


def _group_differences(ours: tuple[Hyper, ...], theirs: tuple[Hyper, ...]) -> Iterator[str]:
    yield from _field("the number of hyperparameter groups", len(ours), len(theirs))
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        for key in sorted({*our, *their}):
            yield from _field(f"{key} of group {index}", our.get(key, "not given"), their.get(key, "not given"))


class SegmentPiece(msgspec.Struct, frozen=True):
    """The part of one segment that lies in a range.

    Args:
        segment: index of the segment in the table.
        start: first element, counted from the start of the segment.
        stop: one past the last element, counted likewise.
        offset: first element, counted from the start of the range.
        whole: whether the piece is all of the segment.
        shape: of the segment if whole, else flat.
        group: hyperparameter group.
        total: number of elements of the segment.
    """

    segment: int
    start: int
    stop: int
    offset: int
    whole: bool
    shape: tuple[int, ...]
    group: int
    total: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def view(self, flat: Tensor) -> Tensor:
        """Return a view of this piece of a flat tensor of the whole range, in its shape."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)

    def cut(self, segment: Tensor) -> Tensor:
        """Return the elements of this piece from its whole segment, in its shape; a view of a contiguous one."""
        return segment.reshape(-1)[self.start : self.stop].view(self.shape)


class ShardLayout(msgspec.Struct, frozen=True):
    """How the bytes of a cut of a dense shard are to be read; see `update.cuts`.

    Args:
        num_elements: of the range.
        piece_elements: elements of each piece but the last.
        parts: name and dtype of what each piece has of its elements, one after the other: the values, then states.
        held: for each segment piece of the range, the states that its elements have; the bytes of others mean nothing.
    """

    num_elements: int
    piece_elements: int
    parts: tuple[tuple[str, str], ...]
    held: tuple[tuple[str, ...], ...] = ()


def cut_within(pieces: Sequence[SegmentPiece], start: int, stop: int) -> tuple[int, tuple[SegmentPiece, ...]]:
    """Return what of the pieces of a range lies in its elements `start` to `stop`, and the index of the first of them.

    Args:
        pieces: of the range, in order and without gaps.
        start: first element, counted from the start of the range.
        stop: one past the last element.
    """
    first, found = bisect_right(pieces, start, key=lambda piece: piece.offset) - 1, list[SegmentPiece]()
    for piece in islice(pieces, first, None):
        if piece.offset >= stop:
            break
        skipped, end = max(start - piece.offset, 0), min(stop - piece.offset, piece.numel)
        is_all = (skipped, end) == (0, piece.numel)
        found.append(
            replace(
                piece,
                start=piece.start + skipped,
                stop=piece.start + end,
                offset=piece.offset + skipped - start,
                whole=piece.whole and is_all,
                shape=piece.shape if is_all else (end - skipped,),
            )
        )
    return first, tuple(found)


def cut(spec: TableSpec, span: Range) -> tuple[SegmentPiece, ...]:
    """Return the non-empty pieces of segments in `span`, in order."""
    found: list[SegmentPiece] = []
    for index, (segment, offset) in enumerate(zip(spec.segments, spec.offsets, strict=True)):
        numel = segment.numel
        start, stop = max(span.start - offset, 0), min(span.stop - offset, numel)
        if start < stop:
            whole = stop - start == numel
            shape = segment.shape if whole else (stop - start,)
            found.append(
                SegmentPiece(index, start, stop, offset + start - span.start, whole, shape, segment.group, numel)
            )
    return tuple(found)
