"""Declarations of row tables: plain data that travels as msgpack and must be equal on all processes of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias, get_args

import msgspec

from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.update.rules import Hyper, RuleSpec
from paceline.update.table import MAX_NAME, DType, NonFinite, Scale, consistency_problems, shown_name

FirstKind: TypeAlias = Literal["constant", "uniform", "normal"]
Evict: TypeAlias = Literal["lru", "lfu"]

_MOST_PUSHES = (1 << 31) - 1  # of a row, that are counted
_LARGEST: Mapping[DType, float] = {"float32": 3.4e38, "float64": 1.79e308, "bfloat16": 3.38e38, "float16": 65504.0}


class First(msgspec.Struct, frozen=True):
    """The values that a row has before its first update: a function of the seed, its id and the column alone.

    Args:
        kind: "constant" is `scale` everywhere, "uniform" lies in [-scale, scale), "normal" has deviation `scale`.
        scale: as the kind says.
        seed: what makes one table's random rows differ from another's.
    """

    kind: FirstKind = "constant"
    scale: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """When rows of a table come, go, and where they lie; every number is that of one server, and 0 means no limit.

    Args:
        admit_after: a row is kept from its n-th push on; pushes before that are counted and dropped.
        expire_after: rows that were neither pushed nor pulled for this many clocks are removed.
        floor: expiry leaves at least this many rows.
        max_rows: beyond this many rows, those used least recently ("lru") or least often ("lfu") are removed.
        evict: which ones.
        memory_bytes: what the table may take of main memory; the rest spills to a file in `spill`.
        spill: a directory on a fast disk.

    Example:
        >>> import paceline
        >>> life = paceline.Lifecycle(admit_after=3, expire_after=1000, floor=10_000)
        >>> with paceline.connect() as ps:
        ...     users = ps.table("users", rows=2, update=paceline.update.Add(), life=life)
        ...     _ = users.push([7], [[1.0, 1.0]])  # the first of three pushes that a row needs to be kept
        ...     _ = ps.clock()
        ...     users.pull([7])
        tensor([[0., 0.]])
    """

    admit_after: int = 1
    expire_after: int = 0
    floor: int = 0
    max_rows: int = 0
    evict: Evict = "lru"
    memory_bytes: int = 0
    spill: str = ""


class FilterSpec(msgspec.Struct, frozen=True):
    """A filter as data: its name, and plain numbers."""

    name: str
    numbers: Hyper


class RowTableSpec(msgspec.Struct, frozen=True):
    """Rows of `width` numbers under 64-bit ids, which come into being as they are pushed.

    Args:
        name: unique in the job, among dense tables too.
        width: numbers a row.
        dtype: of values, gradients and optimizer state.
        rule: how gradients become values; it acts on the rows of a push alone.
        consistency: as `Consistency.parse` reads it, "ssp:3" for example.
        scale: what one update applies of the contributions of a clock, as for dense tables.
        nonfinite: what happens to a push with NaN or infinity, as for dense tables.
        first: the values of a row before its first update.
        life: when rows come and go.
        filters: what is left out or made smaller on the way.
        hold: for how many clocks a worker may hold an update back; reads of all workers take that into account.

    Example:
        >>> spec = RowTableSpec("users", 16, "float32", RuleSpec("add", ({},)), "ssp:2", "sum", "reject")
        >>> spec.validate()
    """

    name: str
    width: int
    dtype: DType
    rule: RuleSpec
    consistency: str
    scale: Scale
    nonfinite: NonFinite
    first: First = First()
    life: Lifecycle = Lifecycle()
    filters: tuple[FilterSpec, ...] = ()
    hold: int = 0

    def validate(self) -> None:
        """Raise UsageError for the first invalid value; types are not checked."""
        for problem in self._problems():
            raise UsageError(f"Row table {shown_name(self.name)}: {problem}")

    def _problems(self) -> Iterator[str]:
        if not self.name:
            yield "it has no name. Give it one that is unique in the job."
        if not self.name.isprintable():
            yield "its name has characters that cannot be printed. Give it one of letters and digits."
        if len(self.name) > MAX_NAME:
            yield f"its name has {len(self.name)} characters, expected at most {MAX_NAME}."
        if not 1 <= self.width <= 1 << 20:
            yield f"its rows have {self.width} numbers, expected 1 to {1 << 20}."
        if len(self.rule.groups) != 1:
            yield f"its rule {self.rule.name} has {len(self.rule.groups)} hyperparameter groups, expected 1."
        if self.rule.quorum is not None:
            yield f"its rule {self.rule.name} waits for a quorum, which only tables of a shape do."
        if self.hold < 0:
            yield f"its updates may be held back for {self.hold} clocks, expected 0 or more."
        choices = (
            ("dtype", self.dtype, DType),
            ("scale", self.scale, Scale),
            ("nonfinite", self.nonfinite, NonFinite),
            ("first values", self.first.kind, FirstKind),
            ("evict", self.life.evict, Evict),
        )
        for field, value, allowed in choices:
            if value not in get_args(allowed):
                yield f"{field} is '{value}', expected one of {', '.join(get_args(allowed))}."
        if not abs(self.first.scale) <= _LARGEST[self.dtype]:
            yield f"its first values are scaled by {self.first.scale}, expected a number that {self.dtype} can hold."
        yield from self._life_problems()
        yield from consistency_problems(self.consistency)
        Consistency.parse(self.consistency)

    def _life_problems(self) -> Iterator[str]:
        life = self.life
        if not 1 <= life.admit_after <= _MOST_PUSHES:
            yield f"admit_after is {life.admit_after}, expected 1 (every row) to {_MOST_PUSHES} pushes."
        for field in ("expire_after", "floor", "max_rows", "memory_bytes"):
            number: int = getattr(life, field)
            if number < 0:
                yield f"{field} is {number}, expected 0 (no limit) or more."
        if life.floor and not life.expire_after:
            yield "floor is given, but not expire_after: there is no expiry that it could hold up."
        if bool(life.memory_bytes) != bool(life.spill):
            yield "memory_bytes and spill belong together: how much stays in memory, and where the rest goes."


def row_differences(ours: RowTableSpec, theirs: RowTableSpec, limit: int = 3) -> list[str]:
    """Return the first `limit` differences of `theirs` from `ours`, a sentence each; empty when equal."""
    return list(islice(_differences(ours, theirs), limit))


def _differences(ours: RowTableSpec, theirs: RowTableSpec) -> Iterator[str]:
    for name in RowTableSpec.__struct_fields__:
        our, their = getattr(ours, name), getattr(theirs, name)
        if our != their:
            yield f"{name} is {our} here and {their} there."
