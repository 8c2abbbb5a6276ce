"""Stores, and a plain model of them, that the tests of row tables share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.update.named_rules import Add
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.initializers import first_rows
from paceline.update.rows.ops import row_ops
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import First, Lifecycle, RowTableSpec
from paceline.update.rows.store import RowStore
from paceline.update.rules import RuleSpec


def rows_of(rule: RuleSpec | None = None, life: Lifecycle | None = None, width: int = 2) -> RowTableSpec:
    """A small table; change more of it with `replace`."""
    spec = RowTableSpec("rows", width, "float32", rule or Add(), "bsp", "sum", "reject")
    return replace(spec, life=life or Lifecycle())


def store_of(spec: RowTableSpec, ops: str = "torch") -> RowStore:
    return RowStore(spec, row_rule(spec.rule, None), row_ops(ops))


def ids_of(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def push_of(ids: Sequence[int], number: float = 1.0, width: int = 2) -> RowContribution:
    """The same gradient for all of some ids."""
    return RowContribution(ids_of(*ids), torch.full((len(ids), width), number))


def push(store: RowStore, ids: Sequence[int], clock: int = 0) -> list[int]:
    """Push ones; return the ids that were touched."""
    return store.apply([push_of(ids, width=store.spec.width)], clock).tolist()


def held(store: RowStore) -> dict[int, Tensor]:
    """All rows of a store by id, read in small pieces."""
    found: dict[int, Tensor] = {}
    start: int | None = 0
    while start is not None:
        piece = store.rows(start, 7)
        found.update(zip(piece.ids.tolist(), piece.values, strict=True))
        start = piece.next_slot
    return found


class Model:
    """What a store must do, one row after the other, in dicts."""

    def __init__(self, spec: RowTableSpec) -> None:
        self.spec = spec
        self.rule = row_rule(spec.rule, None)
        self.hyper = spec.rule.groups[0]
        self.values: dict[int, Tensor] = {}
        self.state: dict[int, Mapping[str, Tensor]] = {}

    def first(self, key: int) -> Tensor:
        return first_rows(self.spec.first, ids_of(key), self.spec.width, torch.float32)

    def read(self, ids: Sequence[int]) -> Tensor:
        rows = [self.row(key) for key in ids]
        return torch.cat(rows) if rows else torch.empty(0, self.spec.width + len(self.rule.echo and [0] * 2))

    def row(self, key: int) -> Tensor:
        values = self.values.get(key, self.first(key))
        return torch.cat((values, self.state_of(key)[self.rule.echo]), 1) if self.rule.echo else values

    def state_of(self, key: int) -> Mapping[str, Tensor]:
        fresh = {c.name: torch.full((1, c.elements(self.spec.width)), c.fill) for c in self.rule.columns}
        return self.state.get(key, fresh)

    def apply(self, contributions: Sequence[RowContribution]) -> list[int]:
        counts = [c.count for c in contributions]
        weighted = self.spec.scale == "samples" and len(set(counts)) > 1
        sums: dict[int, Tensor] = {}
        echoes: dict[int, Tensor | None] = {}
        for c in contributions:
            self.hyper = c.hyper[0] if c.hyper else self.hyper
            for index, key in enumerate(c.ids.tolist()):
                gradient = c.gradient[index : index + 1] * (c.count if weighted else 1.0)
                sums[key] = sums.get(key, torch.zeros_like(gradient)) + gradient
                nothing = torch.full((1, self.spec.width), torch.nan) if self.rule.echo else None
                echoes.setdefault(key, nothing if c.echo is None else c.echo[index : index + 1])
        divisor = sum(counts) if weighted else 1.0 if self.spec.scale == "sum" else len(counts)
        for key, total in sums.items():
            values = self.values.get(key, self.first(key)).clone()
            state = {name: column.clone() for name, column in self.state_of(key).items()}
            self.rule.update(values, total / divisor, state, self.hyper, echoes[key])
            self.values[key], self.state[key] = values, state
        return list(sums)


RANDOM_FIRST = First("uniform", 0.5, 3)
