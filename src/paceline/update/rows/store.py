"""The rows of one table on one server: values, update rule and lifecycle, without protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, final

import torch

from paceline.errors import ProtocolBug
from paceline.update.dtypes import torch_dtype
from paceline.update.rows.contribution import Combined, RowContribution, combine, part_of
from paceline.update.rows.cuts import RowsCut
from paceline.update.rows.initializers import first_rows
from paceline.update.rows.layout import (
    IDS,
    VALUES,
    RowPiece,
    RowStatistics,
    layouts,
    state_name,
    use_columns,
)
from paceline.update.rows.lifecycle import Candidates, RowUsage
from paceline.update.rows.marks import RowMarks
from paceline.update.rows.memory import RowMemory

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.lasting import RowsMemory
    from paceline.update.rows.ops import RowOps
    from paceline.update.rows.read_ahead import SpillReads
    from paceline.update.rows.rules import RowRule
    from paceline.update.rows.spec import RowTableSpec
    from paceline.update.rules import Hyper


_NONE: Final = torch.empty(0, dtype=torch.int64)


@final
class RowStore:
    """The rows of one table on one server; used by one thread at a time.

    A push creates the rows of its ids; ids without a row read as the first values. Only `advance` removes rows, so
    there may be more than `max_rows` between two calls.

    Args:
        spec: of the table, the same on every server.
        rule: of `spec.rule`.
        ops: does the work; the results are the same whichever it is.
        lasting: where the rows lie if they outlive this process; what a predecessor has left there is taken over, in
            the middle of an update, too: then the next update has to be that one.

    Raises:
        UsageError: the memory budget is too small, or its directory is of no use.

    Example:
        >>> from paceline.update.rows.ops import row_ops
        >>> from paceline.update.rows.rules import row_rule
        >>> from paceline.update.rows.spec import RowTableSpec
        >>> from paceline.update.named_rules import Add
        >>> spec = RowTableSpec("users", 2, "float32", Add(), "bsp", "sum", "reject")
        >>> store = RowStore(spec, row_rule(spec.rule, allowed=None), row_ops())
        >>> store.apply([RowContribution(torch.tensor([7, -1, 7]), torch.ones(3, 2))], clock=0)
        tensor([ 7, -1])
        >>> store.read(torch.tensor([7, 8]), clock=0)
        tensor([[2., 2.],
                [0., 0.]])
        >>> store.close()
    """

    def __init__(self, spec: RowTableSpec, rule: RowRule, ops: RowOps, lasting: RowsMemory | None = None) -> None:
        self.spec = spec
        self._lasting = lasting
        left = {} if lasting is None else lasting.record.numbers
        self.version = left.get("version", 0)  # number of updates
        # As the last push that said so.
        self.hyper: tuple[Hyper, ...] = (lasting.hyper if lasting else ()) or spec.rule.groups
        self._rule = rule
        self._ops = ops
        self._dtype = torch_dtype(spec.dtype)
        self._layouts = layouts(spec, rule)
        self.row_bytes = sum(layout.row_bytes for layout in self._layouts.values())  # of memory, state included
        self._memory = RowMemory(spec, rule, ops, lasting)
        self._usage = RowUsage(spec.life, self._memory.columns)
        self._candidates = Candidates(ops, spec.life) if spec.life.admit_after > 1 else None
        self._echo = next((column for column in rule.columns if column.name == rule.echo), None)
        self._echo_width = self._echo.elements(spec.width) if self._echo else 0
        counts = {name: left.get(name, 0) for name in ("num_admitted", "num_zeroed")}
        self._done = RowStatistics(**counts)  # what was counted so far
        self._cuts: list[RowsCut] = []  # that may still need rows which change
        self._marks: RowMarks | None = None  # of rows that change, for a later cut
        if lasting is not None:
            self._finish_piece(lasting)

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def num_slots(self) -> int:
        """The number of slots ever used."""
        return self._memory.num_slots

    @property
    def counts_use(self) -> bool:
        """Whether rows go that are not used."""
        return self._usage.limits

    @property
    def read_width(self) -> int:
        """Numbers per row of a read: its values, then its echo if the rule has one."""
        return self.spec.width + self._echo_width

    def read(self, ids: Tensor, clock: int | None = None) -> Tensor:
        """Return (n, read_width) for ids (n,), int64, which may repeat; with a clock, this is a use of those rows.

        Ids without a row, candidates among them, read as the first values; reading makes no row.
        """
        self._require_ids(ids)
        out = torch.empty((ids.numel(), self.read_width), dtype=self._dtype)
        for piece, slots in self._memory.located(ids):
            self._read(part_of(ids, piece), slots, part_of(out, piece), clock)
        return out

    def find_values(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return those of distinct ids that have a row, (n,), their values, (n, width), and the others, (m,)."""
        slots, values = torch.empty_like(ids), torch.empty((len(ids), self.spec.width), dtype=self._dtype)
        for piece, found in self._memory.located(ids):
            slots[piece] = found
            self._memory.read_column(VALUES, found, values[piece])
        if not _absent(slots).numel():
            return ids, values, ids[:0]
        return ids[slots >= 0], values[slots >= 0], ids[slots < 0]

    def stored(self, ids: Tensor) -> Tensor:
        """Return those of these ids that have a row, in the same order."""
        return ids[self._memory.find(ids) >= 0]

    def use(self, ids: Tensor, clock: int) -> None:
        """Note a use, at a clock, of the rows of these ids (n,), int64; ids without a row are left out."""
        self._require_ids(ids)
        for _, slots in self._memory.located(ids):
            self._note_use(slots[slots >= 0], clock)

    def reserve(self, ids: Sequence[Tensor]) -> None:
        """Make room for the rows of all these ids, so that no update of them can run out of memory.

        Raises:
            UsageError: the memory budget or the disk does not suffice; nothing has changed.
        """
        if not self._memory.make_room(sum(each.numel() for each in ids)):
            self._memory.reserve(self._ops.unique(torch.cat(list(ids)))[0])

    @torch.no_grad()
    def apply(self, contributions: Sequence[RowContribution], clock: int) -> Tensor:
        """Update the rows of all contributions once; return their ids, distinct, in the order they first came.

        Gradients are added in the order given, scaled, then given to the rule, whose hyperparameters are those of the
        last contribution that has some, from now on. A row that does not exist yet begins with the first values.

        Raises:
            UsageError: the memory budget or the disk does not suffice, or the rule refuses; nothing has changed.
            ProtocolBug: there is no contribution, or one does not fit this table.
        """
        self._require_contributions(contributions)
        num_zeroed = 0
        if self.spec.nonfinite == "zero":
            finite = [contribution.finite() for contribution in contributions]
            contributions, num_zeroed = [each for each, _ in finite], sum(num for _, num in finite)
        admitted = None if self._candidates is None else self._candidates.admit(contributions, self._memory.find)
        applied = contributions if admitted is None else admitted.contributions
        update = combine(applied, self.spec.scale, self._ops, self._echo_width)
        self._memory.reserve(update.ids)
        hyper = next((each.hyper for each in reversed(contributions) if each.hyper), self.hyper)
        used_at = max(clock, *(each.clock for each in contributions))
        done = 0 if self._lasting is None else self._lasting.record.numbers["num_pieces"]  # by a predecessor
        for piece, slots in islice(self._memory.located(update.ids), done, None):
            self._update(update.part(piece), slots, hyper[0], used_at)
        has_news, self.hyper = hyper != self.hyper, hyper
        if self._candidates is not None and admitted is not None:
            self._candidates.count(admitted)
        num_dropped = 0 if admitted is None else admitted.num_dropped
        if num_dropped or num_zeroed:
            self._done += RowStatistics(num_dropped=num_dropped, num_zeroed=num_zeroed)
        self.version += 1
        self._commit(is_update=True, has_hyper=has_news)
        return update.ids

    @property
    def num_applied(self) -> int:
        """How many updates are done, in this process and its predecessors; 0 if the rows do not last."""
        return 0 if self._lasting is None else self._lasting.record.numbers["num_applied"]

    def restore(self, version: int, hyper: tuple[Hyper, ...]) -> None:
        """Set what comes with rows that were saved."""
        self.version, self.hyper = version, hyper
        self._commit(has_hyper=True)

    @property
    def spill_reads(self) -> SpillReads:
        """What was mapped ahead of pieces and what they waited for, of a table in files; see `SpillReads`."""
        return self._memory.columns.reads

    def advance(self, clock: int) -> Tensor:
        """Remove the rows that are due when the table reaches a clock; return their ids, (n,).

        First those last used more than `expire_after` clocks ago, as long as `floor` rows are left; then the least used
        ones in excess of `max_rows`.
        """
        if not self._usage.limits:
            return _NONE
        num_slots = self._memory.num_slots
        if (self._cuts or self._marks is not None) and self._usage.fades(len(self)):
            for cut in self._cuts:
                cut.keep_all()
            if self._marks is not None:
                self._marks.note_all(self._memory.num_slots)
        self._usage.fade(len(self), num_slots)
        expired = self._remove(self._usage.expired(clock, len(self), num_slots))
        evicted = self._remove(self._usage.surplus(len(self), num_slots))
        if not expired.numel() + evicted.numel():
            return expired
        self._done += RowStatistics(num_expired=len(expired), num_evicted=len(evicted))
        return torch.cat((expired, evicted))

    def statistics(self) -> RowStatistics:
        """Return the current numbers of rows and bytes, and the counts so far."""
        candidates, memory = self._candidates, self._memory
        return self._done + RowStatistics(
            num_rows=len(self),
            num_candidates=0 if candidates is None else len(candidates),
            index_bytes=memory.index_bytes + (0 if candidates is None else candidates.memory_bytes),
            column_bytes=memory.column_bytes,
            spilled_bytes=memory.spilled_bytes,
        )

    def rows(self, start_slot: int, limit: int) -> RowPiece:
        """Return copies of the rows in `limit` slots from `start_slot` on; this does not count as a use of them.

        The first piece starts at slot 0, the others at `next_slot` of the piece before. Together they are the table, if
        it does not change meanwhile.
        """
        stop = min(start_slot + limit, self._memory.num_slots)
        parts = [self._copies(_NONE, self._layouts)]
        for piece in self._memory.pieces(stop - start_slot):
            slots = self._memory.slots_in(start_slot + piece.start, start_slot + piece.stop)
            parts.append(self._copies(slots, self._layouts))
        columns = {name: torch.cat([part[name] for part in parts]) for name in self._layouts}
        ids = columns.pop(IDS).view(-1)
        return RowPiece(ids, columns, stop if stop < self._memory.num_slots else None)

    @torch.no_grad()
    def load(self, piece: RowPiece, clock: int) -> None:
        """Write rows that `rows` of such a table returned, over those that are here under the same ids.

        Use that was not saved begins with one use at `clock`. Candidates are never saved: they are counted anew.

        Raises:
            UsageError: the memory budget or the disk does not suffice; nothing has changed.
            ProtocolBug: the piece does not fit this table.
        """
        piece.require(self._layouts, optional=use_columns(self.spec.life))
        self._memory.reserve(piece.ids)
        for part, slots in self._memory.located(piece.ids):
            ids = piece.ids[part]
            absent = (slots < 0).nonzero().view(-1)
            self._keep_for_cuts(slots[slots >= 0])
            slots[absent] = self._memory.add(ids[absent])
            self._memory.columns.visit(slots)
            self._skip_for_cuts(slots[absent])
            self._usage.note_new(slots, clock)
            self._usage.note_use(slots, clock)
            for name in self._layouts.keys() & piece.columns.keys():
                self._memory.write_column(name, slots, piece.columns[name][part])
        self._usage.forget_bounds()
        self._commit()

    def cut(
        self, has_room: Callable[[int], bool] = lambda _: True, *, values_only: bool = False, since: str | None = None
    ) -> RowsCut:
        """Return the rows as they are now, to be read while updates go on; raises nothing, and copies nothing.

        With `since`, rows are marked from now on as they change. If it names the marks that there are, the cut has only
        the rows which have changed since these began; see `RowsCut.base`.
        """
        names = (IDS, VALUES) if values_only else tuple(self._layouts)
        row_bytes = sum(self._layouts[name].row_bytes for name in names)
        copies = partial(self._all_copies, names=names)
        num_slots, before = self._memory.num_slots, None
        if since is not None:
            before = self._marks if self._marks is not None and self._marks.name == since else None
            self._marks = RowMarks(num_slots)
        marks = None if since is None else self._marks
        cut = RowsCut(num_slots, row_bytes, self._live, copies, has_room, marks=marks, since=before)
        self._cuts.append(cut)
        return cut

    def close(self) -> None:
        """Release all memory; no call may follow."""
        self._memory.close()
        if self._candidates is not None:
            self._candidates.close()

    def _read(self, ids: Tensor, slots: Tensor, out: Tensor, clock: int | None) -> None:
        self._memory.read_column(VALUES, slots, out[:, : self.spec.width] if self._echo else out)
        if self._echo:
            self._memory.read_column(state_name(self._echo.name), slots, out[:, self.spec.width :])
        absent = _absent(slots)
        if absent.numel():
            first = first_rows(self.spec.first, ids[absent], self.spec.width, self._dtype)
            echo = first.new_full((len(absent), self._echo_width), self._echo.fill if self._echo else 0.0)
            out[absent] = torch.cat((first, echo), 1)
            slots = slots[slots >= 0]
        if clock is not None:
            self._note_use(slots, clock)

    def _update(self, update: Combined, slots: Tensor, hyper: Hyper, clock: int) -> None:
        """Update distinct rows, at these slots or new ones; a rule that refuses leaves them as they were."""
        absent = _absent(slots)
        rows = self._empty_rows(slots.numel(), update.gradient)
        values = rows.pop(VALUES)
        self._memory.read_column(VALUES, slots, values)
        if absent.numel():
            values[absent] = first_rows(self.spec.first, update.ids[absent], self.spec.width, self._dtype)
        for column in self._rule.columns:
            self._memory.read_column(state_name(column.name), slots, rows[state_name(column.name)].fill_(column.fill))
        state = {column.name: rows[state_name(column.name)] for column in self._rule.columns}
        self._rule.update(values, update.gradient, state, hyper, update.echo)
        if self._lasting is not None:
            self._lasting.write_ahead(update.ids)
        self._write(update.ids, slots, {VALUES: values, **rows}, clock)

    def _empty_rows(self, num: int, like: Tensor) -> dict[str, Tensor]:
        """Return memory for all columns of some rows but their ids."""
        if self._lasting is not None:
            return self._lasting.rows(num)
        names = [VALUES, *(state_name(column.name) for column in self._rule.columns)]
        return {name: like.new_empty((num, self._layouts[name].width)) for name in names}

    def _write(self, ids: Tensor, slots: Tensor, rows: Mapping[str, Tensor], clock: int) -> None:
        """Write columns of the rows with these ids, at these slots or new ones."""
        absent = _absent(slots)
        if self._cuts or self._marks is not None:
            self._keep_for_cuts(slots[slots >= 0])
        if absent.numel():
            slots[absent] = self._memory.add(ids[absent])
            self._memory.columns.visit(slots)
            self._skip_for_cuts(slots[absent])
            self._usage.note_new(slots[absent], clock)
            self._done += RowStatistics(num_admitted=absent.numel())
        for name, column in rows.items():
            self._memory.write_column(name, slots, column)
        self._usage.note_use(slots, clock)
        if self._lasting is not None:
            self._lasting.note_written(self._memory.num_slots, self._done.num_admitted)

    def _finish_piece(self, lasting: RowsMemory) -> None:
        """Write the rows that a predecessor was about to write."""
        ids = lasting.ids_ahead
        if len(ids):
            self._memory.reserve(ids)
            self._write(ids, self._memory.find(ids), lasting.rows(len(ids)), 0)

    def _commit(self, *, is_update: bool = False, has_hyper: bool = False) -> None:
        """Have a successor go on from here."""
        if self._lasting is not None:
            self._lasting.commit(
                self.hyper if has_hyper else None,
                num_applied=self.num_applied + is_update,
                version=self.version,
                num_slots=self._memory.num_slots,
                num_admitted=self._done.num_admitted,
                num_zeroed=self._done.num_zeroed,
            )

    def _remove(self, slots: Tensor) -> Tensor:
        """Remove rows, and return their ids."""
        ids = torch.empty_like(slots)
        if not slots.numel():
            return ids
        for piece in self._memory.pieces(len(slots)):
            self._keep_for_cuts(slots[piece])
            ids[piece] = self._memory.ids_of(slots[piece])
            self._usage.note_removed(slots[piece])
        if self._marks is not None:
            self._marks.note_removed(ids)
        self._memory.remove(slots)
        return ids

    def _note_use(self, slots: Tensor, clock: int) -> None:
        if self._usage.limits:
            self._keep_for_cuts(slots)
        self._usage.note_use(slots, clock)

    def _keep_for_cuts(self, slots: Tensor) -> None:
        """Have cuts keep these rows, which are about to change, and mark them."""
        if self._marks is not None:
            self._marks.note(slots)
        if self._cuts:
            self._cuts = [cut for cut in self._cuts if not cut.is_over]
            for cut in self._cuts:
                cut.keep(slots)

    def _skip_for_cuts(self, slots: Tensor) -> None:
        if self._marks is not None:
            self._marks.note(slots)
        for cut in self._cuts:
            cut.skip(slots)

    def _live(self, start: int, stop: int) -> Tensor:
        pieces = self._memory.pieces(stop - start)
        found = [self._memory.slots_in(start + piece.start, start + piece.stop) for piece in pieces]
        return torch.cat(found) if found else _NONE

    def _all_copies(self, slots: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        parts = [self._copies(_NONE, names)]
        for piece in self._memory.pieces(len(slots)):
            self._memory.columns.visit(slots[piece])
            parts.append(self._copies(slots[piece], names))
        columns = {name: torch.cat([part[name] for part in parts]) for name in names}
        return {**columns, IDS: columns[IDS].view(-1)}

    def _copies(self, slots: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        copies: dict[str, Tensor] = {}
        for name in names:
            layout = self._layouts[name]
            copies[name] = torch.empty((len(slots), layout.width), dtype=layout.dtype)
            self._memory.read_column(name, slots, copies[name])
        return copies

    def _require_contributions(self, contributions: Sequence[RowContribution]) -> None:
        self._require(bool(contributions), "got an update without contributions, expected at least one")
        for contribution in contributions:
            self._require_ids(contribution.ids)
            num = contribution.ids.numel()
            self._require_rows("a gradient", contribution.gradient, num, self.spec.width)
            if contribution.echo is not None:
                self._require_rows("an echo", contribution.echo, num, self._echo_width)
            num_groups = len(contribution.hyper)
            self._require(num_groups < 2, f"a push carries hyperparameters of {num_groups} groups, expected 1")

    def _require_ids(self, ids: Tensor) -> None:
        if ids.dtype is not torch.int64 or ids.dim() != 1:
            self._require(False, f"got ids of shape {tuple(ids.shape)} and {ids.dtype}, expected (n,) and torch.int64")

    def _require_rows(self, what: str, rows: Tensor, num: int, width: int) -> None:
        if rows.shape != (num, width) or rows.dtype is not self._dtype:
            wanted = f"{(num, width)} and {self._dtype}"
            self._require(False, f"got {what} of shape {tuple(rows.shape)} and {rows.dtype}, expected {wanted}")

    def _require(self, fits: bool, problem: str) -> None:
        if not fits:
            raise ProtocolBug(f"Row table '{self.spec.name}': {problem}.")


def _absent(slots: Tensor) -> Tensor:
    """Return the positions of slots that are -1."""
    if slots.numel() and int(slots.min()) >= 0:  # mostly, and found out faster than where
        return slots[:0]
    return (slots < 0).nonzero().view(-1)
