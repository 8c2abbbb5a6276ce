"""The filter pipeline of a worker: which part of a push is sent, and which is kept back for later ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.errors import ProtocolBug
from paceline.update.filters.check import named, number
from paceline.update.filters.encoding import Plain, codec_of
from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.ops import RowOps
from paceline.update.rows.spec import FilterSpec

NEVER = -1  # the clock of rows that wait for their next push, however late


class Stationary(msgspec.Struct, frozen=True):
    """The optimality condition of an L1 penalty: a zero with a gradient below the penalty stays zero."""

    l1: float
    margin: float
    reset_every: int

    def resets(self, clock: int) -> bool:
        """Whether everything is sent at this clock."""
        return clock % self.reset_every == 0

    def holds(self, values: Tensor, gradient: Tensor) -> Tensor:
        """Return which rows would stay zero, bool [n]; values of NaN are unknown and never do."""
        zero = (values == 0).all(dim=1)
        return zero & (gradient.abs() < self.l1 - self.margin).all(dim=1)


class Selection(msgspec.Struct, frozen=True):
    """Selection of the rows to send now.

    Args:
        threshold: some number of a row must exceed it in magnitude; None selects all rows.
        share: the share of these to send, by greatest Euclidean norm; 1 sends all.
        max_age: clocks after which a row is sent anyway; 0 means never.
    """

    threshold: float | None = None
    share: float = 1.0
    max_age: int = 0

    @property
    def takes_all(self) -> bool:
        """Whether no row is ever kept back."""
        return self.threshold is None and self.share == 1.0

    def mask(self, rows: Tensor) -> Tensor:
        """Return which of the rows [n, width] are sent, bool [n]."""
        chosen = torch.ones(len(rows), dtype=torch.bool)
        if self.threshold is not None:
            chosen = rows.abs().amax(dim=1) > self.threshold
        if self.share < 1.0:
            chosen = _largest(rows, chosen, self.share)
        return chosen


@final
class Skip:
    """Draws rows with probability `keep`."""

    def __init__(self, keep: float, seed: int, worker: int) -> None:
        self.keep = keep
        # Torch uses 32 bits of a seed, which must depend on all bits of both numbers.
        mixed = random.Random(f"{seed}:{worker}").getrandbits(32)
        self._random = torch.Generator().manual_seed(mixed)

    def draw(self, num_rows: int) -> Tensor:
        """Return which rows are sent, bool [num_rows]."""
        return torch.rand(num_rows, generator=self._random, dtype=torch.float64) < self.keep


def stationary_of(filters: Sequence[FilterSpec]) -> Stationary | None:
    """Return the KKT condition of a table, if declared."""
    spec = named(filters, "kkt")
    if spec is None:
        return None
    return Stationary(number(spec, "l1"), number(spec, "margin"), int(number(spec, "reset_every")))


def selection_of(filters: Sequence[FilterSpec]) -> Selection:
    """Return the selection by `Significant` and `TopK` of a table, with the lower age of the two."""
    significant, largest = named(filters, "significant"), named(filters, "top_k")
    ages = [int(number(spec, "max_age")) for spec in (significant, largest) if spec is not None]
    return Selection(
        threshold=number(significant, "threshold") if significant else None,
        share=number(largest, "share") if largest else 1.0,
        max_age=min((age for age in ages if age), default=0),
    )


def skip_of(filters: Sequence[FilterSpec], worker: int) -> Skip | None:
    """Return the draws of one worker, if the table declares `RandomSkip`."""
    spec = named(filters, "random_skip")
    return None if spec is None else Skip(number(spec, "keep"), int(number(spec, "seed")), worker)


def _largest(rows: Tensor, among: Tensor, share: float) -> Tensor:
    """Return the largest share of the rows where `among` is true, bool [n]."""
    places = among.nonzero().squeeze(1)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    norms = torch.linalg.vector_norm(rows[places], dim=1, dtype=wide)
    # A share of 0.07 of 100 rows is 7 of them, though the product of the floats is a little more.
    wanted = max(1, math.ceil(share * len(places) - 1e-6))
    best = norms.topk(min(wanted, len(places))).indices
    chosen = torch.zeros(len(rows), dtype=torch.bool)
    chosen[places[best]] = True
    return chosen


class FilteredPush(msgspec.Struct, frozen=True):
    """The part of a push that is sent.

    Args:
        ids: int64 [m], distinct: selected ids of the push, in its order, then overdue rows.
        encoded: uint8 [m, row_bytes], as sent; may share memory with the push.
        decoded: [m, width], as the server will decode them; may share memory with `encoded`.
        change: of the rows kept back, for `FilterPipeline.undo`; None if there were none before and after.
    """

    ids: Tensor
    encoded: Tensor
    decoded: Tensor
    change: KeptChange | None = None


@dataclass(slots=True)
class FilterCounts:
    """Counts of rows so far: `given + late == sent + dropped + kept_back + skipped`.

    Args:
        given: pushed rows.
        late: rows kept back earlier that a later push without them has sent.
        sent: rows sent.
        dropped: rows dropped by `KKT`.
        kept_back: rows kept back, once for each time.
        skipped: rows dropped by `RandomSkip`.
    """

    given: int = 0
    late: int = 0
    sent: int = 0
    dropped: int = 0
    kept_back: int = 0
    skipped: int = 0


@final
class FilterPipeline:
    """The filters of one table on one worker, as they act on pushes.

    The sums of rows sent, as the server decodes them, and of rows kept back equal those pushed, except for rows that
    `KKT` drops and for `RandomSkip`, which is right on average.

    Args:
        filters: as `check_filters` has seen them.
        width: numbers a row.
        dtype: of the rows.
        ops: the operations on rows.
        worker: its rank, so that workers draw differently.

    Attributes:
        counts: counts of rows so far.
    """

    def __init__(
        self, filters: Sequence[FilterSpec], width: int, dtype: torch.dtype, ops: RowOps, worker: int = 0
    ) -> None:
        self._width = width
        self._dtype = dtype
        self._codec = codec_of(filters, "push")
        self._stationary = stationary_of(filters)
        self._selection = selection_of(filters)
        self._skip = skip_of(filters, worker)
        self._error_feedback = ErrorFeedback(width, dtype, ops)
        self.counts = FilterCounts()

    @property
    def needs_values(self) -> bool:
        """Whether `sift` needs the current values."""
        return self._stationary is not None

    @property
    def keeps_back(self) -> bool:
        """Whether a part of a push may be kept back, be it a rounding error."""
        return not (isinstance(self._codec, Plain) and self._selection.takes_all)

    @property
    def num_kept_back(self) -> int:
        """Number of rows kept back now, without those of which only a rounding error is left."""
        return self._error_feedback.num_waiting

    def must_send(self, clock: int) -> Tensor:
        """Return the ids of overdue rows, ascending; the next push has them."""
        if not self._selection.max_age:
            return torch.empty(0, dtype=torch.int64)
        return self._error_feedback.overdue(clock - self._selection.max_age)

    def sift(
        self, ids: Tensor, rows: Tensor, clock: int, values: Callable[[Tensor], Tensor] | None = None
    ) -> FilteredPush:
        """Return the part of a push to send; keep back or drop the rest.

        Args:
            ids: int64 [n], distinct.
            rows: [n, width] of the table's dtype; only read.
            clock: of the push; never lower than that of the push before.
            values: returns the current values [k, width] of rows, with NaN for unknown ones; called only for `KKT`.
        """
        self.counts.given += ids.numel()
        ids, rows = self._drop(ids, rows, clock, values)
        if self._lets_all_pass():
            return self._pack(ids, rows)
        finite = rows.isfinite().all(dim=1)
        if finite.all():
            return self._sift_finite(ids, rows, clock)
        filtered = self._sift_finite(ids[finite], rows[finite], clock)
        return _joined(filtered, self._pack(ids[~finite], rows[~finite]))

    def flush(self) -> FilteredPush:
        """Return all rows kept back, to be sent now; their rounding errors stay."""
        kept = self._error_feedback.pop_all()
        self.counts.late += len(kept.ids)
        return self._with_change(self._send(kept.ids, kept.rows), kept)

    def undo(self, change: KeptChange) -> None:
        """Restore the rows kept back before a refused push.

        Exact for rows that no later push has changed. For others the difference is kept back, so that all rows sent add
        up to the pushes that were not refused.
        """
        now = self._error_feedback.pop(change.ids)
        untouched = (now.rows == change.after).all(dim=1)
        corrected = self._saturate(now.rows + (change.before - change.after))
        rows = torch.where(untouched.unsqueeze(1), change.before, corrected)
        since = torch.where(untouched, change.since, _earliest(now.since, change.since))
        self._error_feedback.keep(change.ids, rows, since)

    def _lets_all_pass(self) -> bool:
        return not self.keeps_back and self._skip is None and not len(self._error_feedback)

    def _drop(
        self, ids: Tensor, rows: Tensor, clock: int, values: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Drop the rows that are zero and would stay zero."""
        if self._stationary is None or self._stationary.resets(clock):
            return ids, rows
        if values is None:
            raise ProtocolBug("A table with the filter KKT was pushed to without a way to look at its values.")
        wanted = ~self._stationary.holds(values(ids), rows)
        left = ids[wanted]
        self.counts.dropped += len(ids) - len(left)
        return left, rows[wanted]

    def _sift_finite(self, ids: Tensor, rows: Tensor, clock: int) -> FilteredPush:
        late = self.must_send(clock)
        kept = self._error_feedback.pop(torch.cat((ids, late[~torch.isin(late, ids)])))
        before = kept._replace(rows=kept.rows.clone())
        self.counts.late += len(kept.ids) - len(ids)
        kept.rows[: len(ids)] += rows
        self._saturate(kept.rows)
        forced = torch.isin(kept.ids, late)
        chosen = self._selection.mask(kept.rows)
        self._keep_back(kept, ~(chosen | forced), clock)
        if self._skip is None:
            chosen |= forced
        else:
            chosen = self._draw(self._skip, kept.rows, chosen & ~forced) | forced
        return self._with_change(self._send(kept.ids[chosen], kept.rows[chosen]), before)

    def _with_change(self, filtered: FilteredPush, before: Kept) -> FilteredPush:
        """Return the part to send, with the change of the rows kept back; `before` has all that it could change."""
        after = self._error_feedback.read(before.ids).rows
        return replace(filtered, change=KeptChange(before.ids, before.rows, before.since, after))

    def _keep_back(self, kept: Kept, waits: Tensor, clock: int) -> None:
        since = kept.since[waits]
        self._error_feedback.keep(kept.ids[waits], kept.rows[waits], since.masked_fill(since == NEVER, clock))
        self.counts.kept_back += len(since)

    def _draw(self, skip: Skip, rows: Tensor, candidates: Tensor) -> Tensor:
        """Return which candidates are drawn, and scale their rows in place."""
        places = candidates.nonzero().squeeze(1)
        won = places[skip.draw(len(places))]
        rows[won] = self._saturate(rows[won] / skip.keep)
        self.counts.skipped += len(places) - len(won)
        winners = torch.zeros_like(candidates)
        winners[won] = True
        return winners

    def _send(self, ids: Tensor, rows: Tensor) -> FilteredPush:
        filtered = self._pack(ids, rows)
        if not isinstance(self._codec, Plain):
            self._error_feedback.keep(ids, rows - filtered.decoded, torch.full_like(ids, NEVER))
        return filtered

    def _saturate(self, rows: Tensor) -> Tensor:
        """Saturate in place, as servers would refuse infinite sums of finite numbers forever."""
        most = torch.finfo(self._dtype).max
        return rows.clamp_(-most, most)

    def _pack(self, ids: Tensor, rows: Tensor) -> FilteredPush:
        encoded = self._codec.encode(rows)
        self.counts.sent += ids.numel()
        is_plain = isinstance(self._codec, Plain)
        return FilteredPush(ids, encoded, rows if is_plain else self._codec.decode(encoded, self._width, self._dtype))


def _joined(first: FilteredPush, second: FilteredPush) -> FilteredPush:
    return FilteredPush(
        torch.cat((first.ids, second.ids)),
        torch.cat((first.encoded, second.encoded)),
        torch.cat((first.decoded, second.decoded)),
        first.change,  # rows that are not finite change nothing
    )


def _earliest(first: Tensor, second: Tensor) -> Tensor:
    """Return the earlier of two clocks, each of which may be `NEVER`, int64 [n]."""
    earlier = torch.minimum(first, second)
    return torch.where(earlier == NEVER, torch.maximum(first, second), earlier)


class Kept(NamedTuple):
    """Rows that were kept back: int64 ids [n], rows [n, width], and since when, int64 [n]."""

    ids: Tensor
    rows: Tensor
    since: Tensor


class KeptChange(NamedTuple):
    """The change of the rows kept back by a push: int64 ids [n], rows [n, width] before and after, and the old clocks.

    It allows to undo a push that is refused.
    """

    ids: Tensor
    before: Tensor
    since: Tensor
    after: Tensor

    def part(self, where: Tensor) -> KeptChange:
        """Return the change of some of the rows, bool [n]."""
        return KeptChange(self.ids[where], self.before[where], self.since[where], self.after[where])


@final
class ErrorFeedback:
    """Rows that are kept back, by id; rows of zeros are not kept.

    A row takes its numbers, 8 bytes for its clock and what `RowIndex` says.

    Args:
        width: numbers a row.
        dtype: of the rows.
        ops: the operations on rows.
    """

    def __init__(self, width: int, dtype: torch.dtype, ops: RowOps) -> None:
        self._width = width
        self._dtype = dtype
        self._ops = ops
        self._forget()

    def __len__(self) -> int:
        return len(self._index)

    def read(self, ids: Tensor) -> Kept:
        """Return the rows of `ids`, in order; zeros since `NEVER` for ids without one."""
        return self._read(ids, self._index.find(ids))

    def pop(self, ids: Tensor) -> Kept:
        """Remove and return the rows of distinct `ids`, in order; zeros since `NEVER` for ids without one."""
        slots = self._index.find(ids)
        kept = self._read(ids, slots)
        slots = slots[slots >= 0]
        self._since.tensor[slots] = NEVER
        self._index.remove(slots)
        return kept

    def keep(self, ids: Tensor, rows: Tensor, since: Tensor) -> None:
        """Keep finite rows of distinct ids without a row now; rows of zeros are left out."""
        some = rows.any(dim=1)
        if not some.any():
            return
        slots, _ = self._index.add(ids[some])
        for column in (self._rows, self._since):
            column.grow(self._index.num_slots)
        self._ops.scatter(self._rows.tensor, slots, rows[some])
        self._ops.scatter(self._since.tensor, slots, since[some].unsqueeze(1))

    @property
    def num_waiting(self) -> int:
        """Number of rows that wait since some clock."""
        return int((self._since.tensor[: self._index.num_slots] != NEVER).sum())

    def overdue(self, latest: int) -> Tensor:
        """Return the ids of the rows that wait since clock `latest` or earlier, ascending."""
        since = self._since.tensor[: self._index.num_slots, 0]  # NEVER where a slot is free
        slots = ((since != NEVER) & (since <= latest)).nonzero().squeeze(1)
        return self._index.ids_of(slots).sort().values

    def pop_all(self) -> Kept:
        """Remove and return all rows, ids ascending."""
        kept = self.read_all()
        self._forget()
        return kept

    def read_all(self) -> Kept:
        """Return copies of all rows, ids ascending."""
        ids = self._index.ids_of(self._index.live_slots()).sort().values
        return self.read(ids)

    def _read(self, ids: Tensor, slots: Tensor) -> Kept:
        rows = torch.zeros(len(ids), self._width, dtype=self._dtype)
        since = torch.full((len(ids), 1), NEVER)
        self._ops.gather(self._rows.tensor, slots, rows)
        self._ops.gather(self._since.tensor, slots, since)
        return Kept(ids, rows, since.squeeze(1))

    def _forget(self) -> None:
        self._index = RowIndex(self._ops, RowColumn(1, torch.int64))
        self._rows = RowColumn(self._width, self._dtype)
        self._since = RowColumn(1, torch.int64)
