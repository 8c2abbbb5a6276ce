"""A row table that a worker has opened: what is fixed about it, and what the worker keeps for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.core.consistency import Consistency, Deferral
from paceline.errors import UsageError
from paceline.update.filters.key_cache import KeyLists, digest, key_lists_of
from paceline.update.filters.pipeline import FilterPipeline
from paceline.update.filters.traffic import RowTraffic
from paceline.update.placement import torch_dtype
from paceline.update.rows.lifecycle import use_columns
from paceline.update.rows.rules import row_rule
from paceline.update.rows.sharding import RowSharding
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import Hyper
from paceline.wire.messages import Keys
from paceline.wire.row_codec import RowBodyLayout, body_layouts
from paceline.worker.rows.cache import CacheUses, RowCache
from paceline.worker.rows.managed import Managed
from paceline.worker.rows.throttle import BudgetedRows


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a worker keeps of a row table, and how it sends its pushes.

    Args:
        keep: whether rows that were pulled are kept; by default where servers send what changes (essp), and where the
            rule or a filter has to know what was read.
        max_rows: how many at most; 0 means no limit.
        reads_own_writes: whether reads contain own pushes that the servers have yet to apply.
        communication: lets pushes wait for a budget; else each is sent at once.
    """

    keep: bool | None = None
    max_rows: int = 0
    reads_own_writes: bool = True
    communication: Managed | None = None


@dataclass(slots=True)
class OpenedRows:
    """One row table on one worker. Used under the lock of the worker node."""

    spec: RowTableSpec
    consistency: Consistency
    up: RowBodyLayout  # of pushes
    down: RowBodyLayout  # of values
    cache: RowCache | None
    pipeline: FilterPipeline
    replays: bool  # own pushes are added to rows that do not contain them yet
    is_lazy: bool  # reads make do with kept rows that are fresh enough, unless told otherwise
    deferral: Deferral  # how long pushes wait here, and what reads need for that
    uses: CacheUses | None = None  # what was read from the cache, where servers decide by use which rows go
    budgeted: BudgetedRows | None = None  # the pushes that wait, where there is a budget
    traffic: RowTraffic = field(default_factory=RowTraffic)
    # By server: the lists of ids that it keeps, as far as this worker knows.
    _lists: dict[int, KeyLists] = field(default_factory=dict[int, KeyLists])
    # The hyperparameters that this worker gave last, and the servers that have been told of them.
    _hyper: tuple[Hyper, ...] = ()
    _told: set[int] = field(default_factory=set[int])

    @staticmethod
    def make(spec: RowTableSpec, options: CacheOptions, owners: RowSharding, worker: int) -> OpenedRows:
        """Work with a table from now on."""
        consistency, rule, dtype = Consistency.parse(spec.consistency), row_rule(spec.rule, None), torch_dtype(spec)
        up, down = body_layouts(spec, rule)
        ops = owners.ops
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
        admits_all = spec.life.admit_after <= 1  # else servers drop pushes, and who made them cannot tell which
        replays = keep and options.reads_own_writes and admits_all and can_replay(spec, consistency)
        is_lazy = consistency.deliver == "on_clock" or bool(options.keep)
        uses = CacheUses(owners) if keep and use_columns(spec.life) else None
        return OpenedRows(spec, consistency, up, down, cache, pipeline, replays, is_lazy, deferral, uses)

    @property
    def is_held(self) -> bool:
        """Say whether servers keep pushes until their clock is complete."""
        return self.consistency.visible == "on_clock"

    @property
    def counts_everyone(self) -> bool:
        """Say whether a push counts even where it brings no rows: in the mean of a clock."""
        return self.is_held and self.spec.scale != "sum"

    @property
    def reads_are_fixed(self) -> bool:
        """Say whether what a read returns is decided when it begins, and not by when it is used.

        So it is where pushes show at the end of their clock, unless servers send what changes.
        """
        return self.is_held and not self.is_delivered

    @property
    def is_delivered(self) -> bool:
        """Say whether servers send what changes, unasked."""
        return self.consistency.deliver == "on_clock"

    def keys(self, server: int, ids: Tensor, *, sent: bool = False) -> Keys:
        """Say how ids travel: by their digest alone where the server keeps the list, unless they must be `sent`."""
        lists = self._lists.get(server) or key_lists_of(self.spec.filters)
        if lists is None:
            return Keys(len(ids), b"", sent=True)
        self._lists[server] = lists
        name = digest(self.spec.name, server, ids)
        if not sent and lists.get(name) is not None:
            return Keys(len(ids), name, sent=False)
        lists.put(name, ids)
        return Keys(len(ids), name, sent=True)

    def forget_lists(self, server: int) -> None:
        """Send this server all ids from now on: of the frames that brought lists to it some may be lost."""
        self._lists.pop(server, None)

    def give_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        """Have every server told of hyperparameters with the next push that it gets, if these are any."""
        if hyper:
            self._hyper = hyper
            self._told.clear()

    def tell_again(self) -> None:
        """Note that a push was refused, which may have had the hyperparameters with it."""
        self._told.clear()

    def hyper_for(self, server: int) -> tuple[Hyper, ...]:
        """Return the hyperparameters to go with a push to this server; none if it was told."""
        if server in self._told:
            return ()
        self._told.add(server)
        return self._hyper

    @property
    def knows_change(self) -> bool:
        """Say whether `change` can tell, under the hyperparameters that were given last."""
        return all(is_plain(self.spec.rule.name, group) for group in self._hyper)

    def change(self, rows: Tensor) -> Tensor:
        """Return what a push of these rows adds to the values, for a rule that the worker can compute itself."""
        if self.spec.rule.name == "add":
            return rows
        lr = (self._hyper or self.spec.rule.groups)[0]["lr"]
        assert isinstance(lr, float | int)
        return rows * -lr

    def refuse_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        """Raise UsageError where a push that waits to be summed with others brings hyperparameters."""
        if hyper:
            raise UsageError(
                f"table '{self.spec.name}' sums pushes before it sends them, so none can bring hyperparameters of its "
                "own: scale the rows, or leave out communication=managed(...)."
            )

    def close(self) -> None:
        """Let go of all memory."""
        if self.cache is not None:
            self.cache.close()


def can_replay(spec: RowTableSpec, consistency: Consistency) -> bool:
    """Say whether a worker can compute the effect of its own pushes: adding, and SGD without more."""
    return consistency.visible == "on_arrival" and is_plain(spec.rule.name, spec.rule.groups[0])


def is_plain(rule: str, group: Hyper) -> bool:
    """Say whether a rule changes rows by what is pushed times a number."""
    more = ("momentum", "weight_decay", "nesterov", "maximize")
    return rule == "add" or (rule == "torch.optim.SGD" and not any(group.get(key) for key in more))
