"""The state of an open row table on a worker: layouts, cache, filters, hyperparameters, lists of ids."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from paceline.core.consistency import Consistency, Deferral
from paceline.errors import UsageError
from paceline.update.dtypes import torch_dtype
from paceline.update.filters.key_cache import KeyLists, digest, key_lists_of
from paceline.update.filters.pipeline import FilterPipeline
from paceline.update.filters.traffic import RowTraffic
from paceline.update.named_rules import scales_pushes
from paceline.update.placement import RowSharding
from paceline.update.rows.layout import use_columns
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import Hyper
from paceline.wire.messages import Keys
from paceline.wire.row_codec import RowBodyLayout, body_layouts
from paceline.worker.rows.cache import CacheUses, RowCache
from paceline.worker.rows.managed import Managed


class CacheOptions(msgspec.Struct, frozen=True):
    """Options of one worker for a row table: caching, and how pushes are sent.

    Args:
        keep: cache rows that were pulled; by default where servers deliver changes (essp), and where the rule or a
            filter needs the rows that were read.
        max_rows: the largest number of cached rows; 0 means no limit.
        reads_own_writes: reads contain own pushes that servers have not applied yet.
        communication: throttles pushes to a budget; None sends each at once.
    """

    keep: bool | None = None
    max_rows: int = 0
    reads_own_writes: bool = True
    communication: Managed | None = None


@dataclass(slots=True)
class RowTableState:
    """The state of an open row table, apart from its pushes and reads. Used under the lock of the worker node."""

    spec: RowTableSpec
    consistency: Consistency
    up: RowBodyLayout  # of pushes
    down: RowBodyLayout  # of values
    cache: RowCache | None
    pipeline: FilterPipeline
    replays: bool  # add own pushes to rows that do not contain them yet
    is_lazy: bool  # by default, reads use cached rows that are fresh enough
    deferral: Deferral  # how many clocks pushes wait here, and what reads need for that
    uses: CacheUses | None = None  # rows read from the cache, where servers expire unused rows
    is_held: bool = field(init=False)  # servers hold pushes until their clock is complete
    is_delivered: bool = field(init=False)  # servers deliver rows that change, without a request
    # A push counts even on servers that get no rows of it: in the mean of a clock.
    counts_all_workers: bool = field(init=False)
    # The result of a read is fixed when it starts, whenever it is finished: where pushes are visible at the end of
    # their clock, unless servers deliver changes.
    reads_are_fixed: bool = field(init=False)
    lists_ids: bool = field(init=False)  # servers keep lists of ids, which frames then name by a digest
    traffic: RowTraffic = field(default_factory=RowTraffic)
    # By server: the lists of ids that it keeps, as far as this worker knows.
    _lists: dict[int, KeyLists] = field(default_factory=dict[int, KeyLists])
    # The last hyperparameters of this worker, and the servers that have received them.
    _hyper: tuple[Hyper, ...] = ()
    _told: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        """Note what follows from the declaration, which every step asks for."""
        self.is_held = self.consistency.visible == "on_clock"
        self.is_delivered = self.consistency.deliver == "on_clock"
        self.counts_all_workers = self.is_held and self.spec.scale != "sum"
        self.reads_are_fixed = self.is_held and not self.is_delivered
        self.lists_ids = key_lists_of(self.spec.filters) is not None

    @staticmethod
    def make(spec: RowTableSpec, options: CacheOptions, sharding: RowSharding, worker: int) -> RowTableState:
        """Create the state of a table; raises UsageError for options that contradict the declaration."""
        consistency, rule = Consistency.parse(spec.consistency), row_rule(spec.rule, None)
        dtype = torch_dtype(spec.dtype)
        up, down = body_layouts(spec, rule)
        ops = sharding.ops
        pipeline = FilterPipeline(spec.filters, spec.width, dtype, ops, worker)
        deferral = Deferral(consistency)
        if options.communication is not None:
            deferral = options.communication.deferral(spec, sums=can_replay(spec, consistency))
        needed = consistency.deliver == "on_clock" or bool(rule.echo) or pipeline.needs_values
        needed = needed or options.communication is not None
        if options.keep is False and needed:
            raise UsageError(
                f"table '{spec.name}' cannot do without a cache: its consistency ({spec.consistency}), its rule "
                f"({spec.rule.name}), a filter or its communication needs the rows that were read. Leave out "
                "cache=False."
            )
        keep = needed if options.keep is None else options.keep
        cache = RowCache(ops, down.full_width, dtype, options.max_rows, down.echo_width) if keep else None
        admits_all = spec.life.admit_after <= 1  # else servers drop pushes, and the worker does not know which
        replays = keep and options.reads_own_writes and admits_all and can_replay(spec, consistency)
        is_lazy = consistency.deliver == "on_clock" or bool(options.keep)
        uses = CacheUses(sharding) if keep and use_columns(spec.life) else None
        return RowTableState(spec, consistency, up, down, cache, pipeline, replays, is_lazy, deferral, uses)

    def keys(self, server: int, ids: Tensor, *, sent: bool = False) -> Keys:
        """Return how ids travel: as a digest where the server keeps the list, unless they must be `sent`."""
        lists = self._lists.get(server) or (key_lists_of(self.spec.filters) if self.spec.filters else None)
        if lists is None:
            return Keys(ids.numel(), b"", sent=True)
        self._lists[server] = lists
        name = digest(self.spec.name, server, ids)
        if not sent and lists.get(name) is not None:
            return Keys(len(ids), name, sent=False)
        lists.put(name, ids)
        return Keys(len(ids), name, sent=True)

    def forget_lists(self, server: int) -> None:
        """Send this server full ids from now on: frames with lists of ids may be lost."""
        self._lists.pop(server, None)

    def give_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        """Send hyperparameters, if there are any, to every server with its next push."""
        if hyper:
            self._hyper = hyper
            self._told.clear()

    def resend_hyper(self) -> None:
        """Send the hyperparameters again: the push that carried them was refused."""
        self._told.clear()

    def hyper_for(self, server: int) -> tuple[Hyper, ...]:
        """Return the hyperparameters for the next push to this server; none if it has received them."""
        if server in self._told:
            return ()
        self._told.add(server)
        return self._hyper

    @property
    def knows_change(self) -> bool:
        """Whether `change` is valid under the last hyperparameters."""
        return all(scales_pushes(self.spec.rule.name, group) for group in self._hyper)

    def change(self, rows: Tensor) -> Tensor:
        """Return what a push of these rows adds to the values; for addition and plain SGD."""
        if self.spec.rule.name == "add":
            return rows
        lr = (self._hyper or self.spec.rule.groups)[0]["lr"]
        assert isinstance(lr, float | int)
        return rows * -lr

    def refuse_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        """Raise UsageError for hyperparameters of a push that is summed with others."""
        if hyper:
            raise UsageError(
                f"table '{self.spec.name}' sums pushes before it sends them, so none can bring hyperparameters of its "
                "own: scale the rows, or leave out communication=managed(...)."
            )

    def close(self) -> None:
        """Release all memory."""
        if self.cache is not None:
            self.cache.close()


def can_replay(spec: RowTableSpec, consistency: Consistency) -> bool:
    """Return whether a worker can compute the effect of its own pushes: addition, and plain SGD."""
    return consistency.visible == "on_arrival" and scales_pushes(spec.rule.name, spec.rule.groups[0])
