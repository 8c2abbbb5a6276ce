"""Embedding rows pulled as a model looks them up, and their gradients collected until the clock ends."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch
from torch import Tensor

from paceline.errors import IdOutOfRange, UsageError
from paceline.worker.metrics import MANY_PUSHES
from paceline.worker.pushes import PushOutcome
from paceline.worker.rows.table import RowFuture, RowTable
from paceline.worker.validation import brief

MAX_ASKED = 8  # pending requests ahead; further ones are ignored, and their forward waits for the rows


class CollectedGradients(msgspec.Struct, frozen=True):
    """Rows that a lookup returns to a model.

    Args:
        rows: (n, width), the distinct rows, a leaf of the graph; with padding, that leaf with a row of zeros below.
        places: row index of each id, in the shape of the ids.
        padding: index of the row of zeros, None if no id is the padding.
    """

    rows: Tensor
    places: Tensor
    padding: int | None


@dataclass(slots=True)
class _Asked:
    """Rows requested ahead: those of `ids`, (n,) distinct."""

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
        num_ids: ids are 0 to this, exclusive; None allows any.
        padding: id without a row: its values are zeros here, and it is never pulled or pushed.

    Attributes:
        num_refused: pushes that were not applied (not finite, or late under backup).
        exact: whether reads contain every update of the clocks before, see `EmbeddingLookups.exactly`.
    """

    table: RowTable
    num_ids: int | None = None
    padding: int | None = None
    num_refused: int = 0
    exact: bool = False
    # Collected since the clock began: ids and gradient of each backward pass.
    _collected: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    _set_aside: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])  # of slices, weighted
    _asked: list[_Asked] = field(default_factory=list[_Asked])  # for this clock or a later one

    def __deepcopy__(self, memo: dict[int, object]) -> EmbeddingLookup:
        """Return this object: a copy of a layer reads and trains the same rows, in the same push."""
        return self

    def __reduce__(self) -> str:
        """Refuse to be pickled: the rows are on the servers."""
        raise UsageError(
            f"table '{self.table.name}': a layer whose rows live on the servers cannot be pickled. Save the model's "
            "state_dict(), and the rows by table.export(path)."
        )

    def find(self, ids: Tensor, *, learn: bool = True, by_frequency: bool = False) -> CollectedGradients:
        """Return the rows of these ids, as leaves of autograd; blocks as `RowTable.pull` does.

        Their gradients are collected during backward; the graph keeps no rows alive that it does not need itself.

        Args:
            ids: integers, any shape.
            learn: whether gradients are wanted.
            by_frequency: divide the gradient of each row by the number of its occurrences among the ids.
        """
        if not isinstance(ids, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            copied = ".copy()" if hasattr(ids, "strides") else ""  # torch takes no array that is reversed
            raise UsageError(
                f"embedding of table '{self.table.name}' was given {brief(ids)}, expected a tensor of integers: "
                f"torch.tensor(ids{copied})."
            )
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

    def prefetch(self, ids: Tensor, ahead: int) -> None:
        """Request the rows that `find` will need `ahead` clocks from now. Does not block."""
        self.table.require_ahead(ahead)
        clock = self.table.node.clock
        self._asked = [asked for asked in self._asked if asked.future.clock >= clock]
        if len(self._asked) >= MAX_ASKED:
            return
        distinct, _ = self._distinct(ids)
        if self.padding is not None:
            distinct = distinct[distinct != self.padding]
        self._asked.append(_Asked(distinct, self.table.pull_later(distinct, ahead=ahead)))

    def push(self, samples: float | None, expected: float) -> None:
        """Push the collected gradients, which stand for `samples` samples; None where their number is not known.

        `expected` is the number of samples of all workers together in this clock, 0 where that is not known. Where an
        update is a mean over the workers, a worker that trained without any gradient here counts as well, unless it has
        trained on 0 samples.
        """
        collected, self._collected = self._collected, []
        if not collected and (not samples or not self.table.client.state.counts_all_workers):
            return
        ids = torch.cat([ids for ids, _ in collected] or [torch.empty(0, dtype=torch.int64)])
        rows = torch.cat([rows for _, rows in collected] or [torch.empty((0, self.table.width))])
        known = expected if self.table.consistency.lockstep else 0.0
        pushed = self.table.push(ids, rows, samples=1.0 if samples is None else samples, expected=known)
        pushed.add_done_callback(self._count_refusal)

    def zero_grad(self) -> None:
        """Drop the collected gradients, but not those set aside from earlier slices."""
        self._collected.clear()

    @property
    def num_collected(self) -> int:
        """Number of backward passes that have left a gradient since the clock began."""
        return len(self._collected)

    @property
    def has_gradients(self) -> bool:
        """Return whether gradients have been collected since the clock began."""
        return bool(self._collected)

    def multiply(self, factor: float) -> None:
        """Multiply the collected gradients."""
        self._collected = [(ids, rows * factor) for ids, rows in self._collected]

    def set_aside(self, weight: float) -> None:
        """Set the collected gradients of one slice of a clock aside, multiplied by its weight."""
        self._set_aside += [(ids, rows * weight) for ids, rows in self._collected]
        self._collected.clear()

    def combine_slices(self, weight: float, total: float) -> None:
        """Combine the gradients set aside with the collected ones into a mean, divided by the total of all weights."""
        self.set_aside(weight)
        self._collected = [(ids, rows / total) for ids, rows in self._set_aside]
        self._set_aside.clear()

    def forget(self) -> None:
        """Drop the gradients set aside."""
        self._set_aside.clear()

    def _distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct ids, (n,), and the index of each id among them, (number of ids,)."""
        distinct, places = self.table.client.distinct.among(self.table.keys(ids).view(-1))
        if self.num_ids is not None and len(distinct):
            lowest, highest = (int(bound) for bound in distinct.aminmax())
            if lowest < 0 or highest >= self.num_ids:
                bad = lowest if lowest < 0 else highest
                raise IdOutOfRange(
                    f"table '{self.table.name}': id {bad} is out of range: there are {self.num_ids}, from 0 on. "
                    "(num_embeddings=None takes any 64-bit id.)"
                )
        return distinct, torch.arange(len(distinct)) if places is None else places

    def _read(self, distinct: Tensor) -> Tensor:
        """Return the rows of these ids, (n, width), from a request ahead if there is one for this clock."""
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
        """Return the indices of distinct ids among others; None if some are missing."""
        together, places = self.table.client.ops.unique(torch.cat((ids, wanted)))
        return places[len(ids) :] if len(together) == len(ids) else None

    def _collect(self, ids: Tensor, times: Tensor | None, rows: Tensor) -> None:
        """Collect the gradient that backward has left in a leaf, divided by `times`, a number for each row."""
        gradient, rows.grad = rows.grad, None
        if gradient is not None:
            gradient = gradient.detach().to("cpu")
            self._collected.append((ids, gradient if times is None else gradient / times.unsqueeze(1)))
            if len(self._collected) == MANY_PUSHES:
                name, num, metrics = self.table.name, len(self._collected), self.table.metrics
                metrics.open_clocks.tell_of(
                    name, self.table.node.clock, f"found {num} gradients for embedding '{name}'"
                )

    def _count_refusal(self, pushed: Future[PushOutcome]) -> None:
        if pushed.exception() is None:  # a failed worker raises in its next call
            self.num_refused += not pushed.result().applied


@dataclass(slots=True)
class EmbeddingLookups:
    """The embedding lookups of one worker, in the order in which they were made.

    Attributes:
        expected: samples of all workers together in the clock that is about to end; 0 where that is not known.
    """

    expected: float = 0.0
    are_used: bool = False  # whether there are any
    _all: list[EmbeddingLookup] = field(default_factory=list[EmbeddingLookup])

    def over(self, table: RowTable, num_ids: int | None, padding: int | None) -> EmbeddingLookup:
        """Return the lookup of a table, whose gradients are pushed when a clock ends; layers of one table share it.

        A second one would push again in the same clock, and count this worker twice in its mean.

        Raises:
            UsageError: the table has a lookup with other ids or another padding.
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
        self.are_used = True
        return lookup

    def push(self, samples: float | None) -> None:
        """Push the gradients of each lookup, in the clock that is about to end; see `EmbeddingLookup.push`."""
        expected, self.expected = self.expected, 0.0
        together = self._all[0].table.node.together() if len(self._all) > 1 else nullcontext()
        with together:
            for lookup in self._all:
                lookup.push(samples, expected)

    def zero_grad(self) -> None:
        """Drop the collected gradients of each lookup."""
        for lookup in self._all:
            lookup.zero_grad()

    def unpushed(self) -> list[tuple[str, int]]:
        """Return the tables with gradients since the clock began, and the number of their backward passes."""
        return [(lookup.table.name, lookup.num_collected) for lookup in self._all if lookup.has_gradients]

    @property
    def have_gradients(self) -> bool:
        """Return whether a lookup has collected gradients since the clock began."""
        return any(lookup.has_gradients for lookup in self._all)

    def multiply(self, factor: float) -> None:
        """Multiply the collected gradients of each lookup."""
        for lookup in self._all:
            lookup.multiply(factor)

    def set_aside(self, weight: float) -> None:
        """Set the gradients of one slice of a clock aside, in each lookup, multiplied by its weight."""
        for lookup in self._all:
            lookup.set_aside(weight)

    def combine_slices(self, weight: float, total: float) -> None:
        """Combine the gradients of all slices into their mean, in each lookup; `weight` is that of the last slice."""
        for lookup in self._all:
            lookup.combine_slices(weight, total)

    def forget(self) -> None:
        """Drop the gradients set aside."""
        for lookup in self._all:
            lookup.forget()

    @contextmanager
    def exactly(self) -> Generator[None]:
        """Make reads in the block contain all updates of earlier clocks, or without a bound all that have arrived."""
        before = [lookup.exact for lookup in self._all]
        for lookup in self._all:
            lookup.exact = True
        try:
            yield
        finally:
            for lookup, exact in zip(self._all, before, strict=False):  # lookups made inside the block come last
                lookup.exact = exact


def _without(padding: int, distinct: Tensor, places: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """Return ids without the padding, indices among them, and the index of the padding: behind all others."""
    kept = distinct != padding
    if kept.all():
        return distinct, places, None
    moved = (kept.cumsum(0) - 1).masked_fill_(~kept, len(distinct) - 1)
    return distinct[kept], moved[places], len(distinct) - 1
