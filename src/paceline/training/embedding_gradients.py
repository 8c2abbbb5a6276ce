"""Embedding rows pulled as a model looks them up, and their gradients collected until the clock ends."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from paceline.errors import IdOutOfRange, UsageError
from paceline.worker.metrics import MANY_PUSHES
from paceline.worker.pushes import PushOutcome
from paceline.worker.rows.table import RowFuture, RowTable

MAX_ASKED = 8  # reads ahead that are kept; a script that asks for more of them just waits in its forward


@dataclass(frozen=True, slots=True)
class CollectedGradients:
    """What a lookup gives a model.

    Args:
        rows: (n, width), where the ids are; one leaf of the graph, or a leaf with a row of zeros below.
        places: of each id, its row.
        padding: the row of zeros, None if no id is the padding.
    """

    rows: Tensor
    places: Tensor
    padding: int | None


@dataclass(slots=True)
class _Asked:
    """Rows that were asked for ahead: those of `ids`, (n,) distinct."""

    ids: Tensor
    future: RowFuture
    _rows: Tensor | None = None

    def rows(self) -> Tensor:
        """Return the rows; blocks until they are there."""
        if self._rows is None:
            self._rows = self.future.result()
        return self._rows


@dataclass(slots=True)
class EmbeddingLookup:
    """One row table as the layer of a model.

    Args:
        table: where the rows live.
        num_ids: ids are 0 to this; None lets them be any.
        padding: an id that stands for nothing: its row is zeros here, and is never pulled or pushed.

    Attributes:
        num_refused: pushes that were not applied (not finite, or late under backup).
        exact: read what contains every update of the clocks before, as `EmbeddingLookups.exactly` says.
    """

    table: RowTable
    num_ids: int | None = None
    padding: int | None = None
    num_refused: int = 0
    exact: bool = False
    # Collected since the clock began: ids and gradient of each backward pass.
    _collected: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    _banked: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])  # of slices, weighed
    _asked: list[_Asked] = field(default_factory=list[_Asked])  # for this clock or a later one

    def __deepcopy__(self, memo: dict[int, object]) -> EmbeddingLookup:
        """Return this one: a copy of a layer reads and trains the same rows, in the same push."""
        return self

    def __reduce__(self) -> str:
        """Refuse to be pickled: the rows are on the servers."""
        raise UsageError(
            f"table '{self.table.name}': a layer whose rows live on the servers cannot be pickled. Save the model's "
            "state_dict(), and the rows by table.export(path)."
        )

    def find(self, ids: Tensor, *, learn: bool = True, by_frequency: bool = False) -> CollectedGradients:
        """Return the rows of these ids, ready to be differentiated; blocks as `RowTable.pull` does.

        What backward finds for them is collected; the graph keeps no rows alive that it does not need itself.

        Args:
            ids: integers, any shape.
            learn: whether gradients are wanted at all.
            by_frequency: divide the gradient of each row by how often it is among the ids.
        """
        distinct, places = self._distinct(ids)
        padding = None
        if self.padding is not None:
            distinct, places, padding = _without(self.padding, distinct, places)
        leaf = self._read(distinct).to(ids.device)
        if learn and torch.is_grad_enabled():
            times = places.bincount(minlength=len(distinct))[: len(distinct)] if by_frequency else None
            leaf.requires_grad_().register_post_accumulate_grad_hook(partial(self._collect, distinct, times))
        rows = leaf
        if padding is not None or not len(distinct):
            rows = torch.cat((leaf, leaf.new_zeros((1, self.table.width))))
        return CollectedGradients(rows, places.view(ids.shape).to(ids.device), padding)

    def ask(self, ids: Tensor, ahead: int) -> None:
        """Ask for the rows that `find` will need so many clocks from now. Does not block."""
        clock = self.table.node.clock
        self._asked = [asked for asked in self._asked if asked.future.clock >= clock]
        if len(self._asked) >= MAX_ASKED:
            return
        distinct, _ = self._distinct(ids)
        if self.padding is not None:
            distinct = distinct[distinct != self.padding]
        self._asked.append(_Asked(distinct, self.table.pull_later(distinct, ahead=ahead)))

    def push(self, samples: float | None, expected: float) -> None:
        """Send what was collected, as one push that stands for so many samples; None if nobody says of how many.

        `expected` are those of all workers together in this clock, 0 where that is not known.
        Where an update is a mean over the workers, one that has trained without finding any gradient counts as well,
        unless it has trained on 0 samples.
        """
        collected, self._collected = self._collected, []
        if not collected and (not samples or not self.table.opened.counts_everyone):
            return
        ids = torch.cat([ids for ids, _ in collected] or [torch.empty(0, dtype=torch.int64)])
        rows = torch.cat([rows for _, rows in collected] or [torch.empty((0, self.table.width))])
        known = expected if self.table.consistency.lockstep else 0.0
        pushed = self.table.push(ids, rows, samples=1.0 if samples is None else samples, expected=known)
        pushed.add_done_callback(self._count_refusal)

    def zero_grad(self) -> None:
        """Drop what was collected, and keep what was banked."""
        self._collected.clear()

    @property
    def num_collected(self) -> int:
        """How many backward passes have left a gradient since the clock began."""
        return len(self._collected)

    @property
    def has_gradients(self) -> bool:
        """Say whether something was collected since the clock began."""
        return bool(self._collected)

    def multiply(self, factor: float) -> None:
        """Multiply what was collected."""
        self._collected = [(ids, rows * factor) for ids, rows in self._collected]

    def accumulator(self, weight: float) -> None:
        """Put aside what was collected, times a weight; a clock has several such slices."""
        self._banked += [(ids, rows * weight) for ids, rows in self._collected]
        self._collected.clear()

    def pay(self, weight: float, total: float) -> None:
        """Join what was put aside to what was collected, weighed too, over the total of all weights."""
        self.accumulator(weight)
        self._collected = [(ids, rows / total) for ids, rows in self._banked]
        self._banked.clear()

    def forget(self) -> None:
        """Drop what was put aside."""
        self._banked.clear()

    def _distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids without repeats, (n,), and the place among them of each, (number of ids,)."""
        distinct, places = self.table.node.rows.ops.unique(self.table.keys(ids).view(-1))
        if self.num_ids is not None and len(distinct):
            lowest, highest = (int(bound) for bound in distinct.aminmax())
            if lowest < 0 or highest >= self.num_ids:
                bad = lowest if lowest < 0 else highest
                raise IdOutOfRange(
                    f"table '{self.table.name}': id {bad} is out of range: there are {self.num_ids}, from 0 on. "
                    "(num_embeddings=None takes any 64-bit id.)"
                )
        return distinct, places

    def _read(self, distinct: Tensor) -> Tensor:
        """Return the rows of these ids, (n, width): of those asked for ahead, if they are for this very clock."""
        if self.exact:
            bounded = self.table.consistency.bound is not None
            return self.table.pull(distinct, refresh=None if bounded else True, exact=bounded)
        for asked in self._asked:
            if asked.future.clock == self.table.node.clock:
                at = self._places_in(asked.ids, distinct)
                if at is not None:
                    return asked.rows()[at]
        return self.table.pull(distinct)

    def _places_in(self, ids: Tensor, wanted: Tensor) -> Tensor | None:
        """Return where these ids, both distinct, lie among others; None if some do not."""
        together, places = self.table.node.rows.ops.unique(torch.cat((ids, wanted)))
        return places[len(ids) :] if len(together) == len(ids) else None

    def _collect(self, ids: Tensor, times: Tensor | None, rows: Tensor) -> None:
        """Take the gradient that a backward pass has left in a leaf; divide it by `times`, a number for each row."""
        gradient, rows.grad = rows.grad, None
        if gradient is not None:
            gradient = gradient.detach().to("cpu")
            self._collected.append((ids, gradient if times is None else gradient / times.unsqueeze(1)))
            if len(self._collected) == MANY_PUSHES:
                name, num, meter = self.table.name, len(self._collected), self.table.meter
                meter.open_clocks.tell_of(name, self.table.node.clock, f"found {num} gradients for embedding '{name}'")

    def _count_refusal(self, pushed: Future[PushOutcome]) -> None:
        if pushed.exception() is None:  # else the worker has failed, which the next call tells
            self.num_refused += not pushed.result().applied


@dataclass(slots=True)
class EmbeddingLookups:
    """Those of one worker, in the order in which they were made.

    Attributes:
        expected: samples of all workers together in the clock that is about to end; 0 where that is not known.
    """

    expected: float = 0.0
    _all: list[EmbeddingLookup] = field(default_factory=list[EmbeddingLookup])

    def over(self, table: RowTable, num_ids: int | None, padding: int | None) -> EmbeddingLookup:
        """Return one whose gradients are pushed whenever a clock ends, the same for layers of the same table.

        A second one would push again in the same clock, and count this worker twice in its mean.

        Raises:
            UsageError: there is one of this table with other ids or another padding.
        """
        known = next((one for one in self._all if one.table is table), None)
        if known is not None:
            if (known.num_ids, known.padding) != (num_ids, padding):
                raise UsageError(
                    f"table '{table.name}' has a layer with num_embeddings={known.num_ids} and "
                    f"padding_idx={known.padding}, and this one has {num_ids} and {padding}: layers of one table need "
                    "the same; or give this one a name of its own (name=...)."
                )
            return known
        lookup = EmbeddingLookup(table, num_ids, padding)
        self._all.append(lookup)
        return lookup

    def push(self, samples: float | None) -> None:
        """Push what each has collected, in the clock that is about to end; see `EmbeddingLookup.push`."""
        expected, self.expected = self.expected, 0.0
        for lookup in self._all:
            lookup.push(samples, expected)

    def zero_grad(self) -> None:
        """Drop what each has collected."""
        for lookup in self._all:
            lookup.zero_grad()

    def unpushed(self) -> list[tuple[str, int]]:
        """Return the tables for which gradients were found since the clock began, each with how many."""
        return [(lookup.table.name, lookup.num_collected) for lookup in self._all if lookup.has_gradients]

    @property
    def have_gradients(self) -> bool:
        """Say whether one has collected something since the clock began."""
        return any(lookup.has_gradients for lookup in self._all)

    def multiply(self, factor: float) -> None:
        """Multiply what each has collected."""
        for lookup in self._all:
            lookup.multiply(factor)

    def accumulator(self, weight: float) -> None:
        """Put aside what each has collected for a slice of a clock, times its weight."""
        for lookup in self._all:
            lookup.accumulator(weight)

    def pay(self, weight: float, total: float) -> None:
        """Let each have collected the mean over all slices, of which the last has this weight."""
        for lookup in self._all:
            lookup.pay(weight, total)

    def forget(self) -> None:
        """Drop what each has put aside."""
        for lookup in self._all:
            lookup.forget()

    @contextmanager
    def exactly(self) -> Generator[None]:
        """Let reads inside contain every update of all earlier clocks, or where nothing bounds them all there are."""
        before = [lookup.exact for lookup in self._all]
        for lookup in self._all:
            lookup.exact = True
        try:
            yield
        finally:
            for lookup, exact in zip(self._all, before, strict=False):  # those that were made inside come last
                lookup.exact = exact


def _without(padding: int, distinct: Tensor, places: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """Return ids without the padding, places among them, and the place of the padding: behind all others."""
    kept = distinct != padding
    if kept.all():
        return distinct, places, None
    moved = (kept.cumsum(0) - 1).masked_fill_(~kept, len(distinct) - 1)
    return distinct[kept], moved[places], len(distinct) - 1
