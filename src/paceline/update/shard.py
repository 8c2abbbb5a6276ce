"""Shard of a dense table on one server: the values of its range and their update rule, without protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch
from msgspec.structs import replace

from paceline.errors import ProtocolBug, UsageError
from paceline.update.chunked import Chunked
from paceline.update.clipping import CLIP_NORM, clipping, combined_norm, without_clip
from paceline.update.cuts import ShardCut
from paceline.update.dtypes import torch_dtype
from paceline.update.kernels import Kernel
from paceline.update.lasting import ShardMemory, ShardSettings
from paceline.update.placement import as_tensor
from paceline.update.rules import Hyper, Quorum, UpdateRule
from paceline.update.summing import (
    CHUNK,
    Combining,
    Contribution,
    ThreadPool,
    combine_stretch,
    num_missing,
    num_nonfinite,
    runs,
    stretches,
)
from paceline.update.table import SegmentPiece, cut
from paceline.update.torch_rule import TorchRule
from paceline.update.user_code import own_code

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.partition import Range
    from paceline.update.table import TableSpec


@final
@dataclass(slots=True)
class Merger:
    """Collects contributions until a quorum is due, and returns each exactly once. For one thread at a time.

    Args:
        quorum: when contributions are due.
        now: the time in seconds, from any start.

    Example:
        >>> import torch
        >>> kept = Merger(Quorum(num_pushes=2, grace_s=0.0, num_workers=4), now=lambda: 0.0)
        >>> kept.keep([Contribution(torch.ones(1), worker=0)])
        >>> len(kept.pop_due())
        0
        >>> kept.keep([Contribution(torch.ones(1), worker=3)])
        >>> len(kept.pop_due())
        2
    """

    quorum: Quorum
    now: Callable[[], float]
    _kept: list[Contribution] = field(default_factory=list[Contribution])
    _reached_at: float | None = None  # when the kept contributions reached the quorum

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, contributions: Sequence[Contribution]) -> None:
        """Keep copies of contributions, because their memory is reused."""
        self._kept += [replace(each, gradient=each.gradient.clone()) for each in contributions]
        if self._reached_at is None and len(self._kept) >= self.quorum.num_pushes:
            self._reached_at = self.now()

    def pop_due(self) -> list[Contribution]:
        """Remove and return the contributions that are due, in order of arrival; none before the quorum is due."""
        if self._reached_at is None:
            return []
        is_complete = len({each.worker for each in self._kept}) >= self.quorum.num_workers
        is_over = self.now() >= self._reached_at + self.quorum.grace_s
        return self.pop_all() if is_complete or is_over else []

    def pop_all(self) -> list[Contribution]:
        """Remove and return all kept contributions, due or not."""
        kept, self._kept, self._reached_at = self._kept, [], None
        return kept


VALUES = "values"
_STATE = "state."  # before the names of a rule, in a copy


@final
class Shard:
    """The values of one range of a table and the rule that updates them; used by one thread at a time.

    Args:
        spec: the whole table.
        span: range of this shard; may be empty.
        rule: a new rule, for this shard alone.
        values: (elements of the range,), memory of the values, which is zeroed; allocated if omitted.
        num_threads: number of threads of an update; the shard starts those beyond 1, and `close` ends them.
        now: the time in seconds, for a rule that waits for a quorum.
        lasting: where the values and the state lie if they outlive this process (`outlasts` says which rules can); what
            a predecessor has left there is taken over, in the middle of an update, too.
        when_idle: is given, after each update, what saves a lasting shard ahead of the next one, and calls it once at
            most, on any thread; late calls do nothing.

    Raises:
        ProtocolBug: the range cuts a tensor that the rule needs whole, or `values` does not fit.

    Example:
        >>> from paceline.core.partition import Range
        >>> from paceline.update.table import Segment, TableSpec
        >>> from paceline.update.named_rules import SGD, resolve
        >>> spec = TableSpec("w", (Segment("w", (2,)),), "float32", SGD(lr=0.5), "bsp", "mean", "reject")
        >>> shard = Shard(spec, Range(0, 0, 2), rule=resolve(spec.rule, allowed=None))
        >>> shard.store(torch.tensor([1.0, 2.0]))
        >>> shard.apply([Contribution(torch.tensor([2.0, 4.0]))])
        {}
        >>> shard.values
        tensor([0., 0.])
    """

    def __init__(
        self,
        spec: TableSpec,
        span: Range,
        *,
        rule: UpdateRule | Kernel,
        values: Tensor | None = None,
        num_threads: int = 1,
        now: Callable[[], float] = time.monotonic,
        lasting: ShardMemory | None = None,
        when_idle: Callable[[Callable[[], object]], object] = lambda save: save(),
    ) -> None:
        self.spec = spec
        self.span = span
        self._shape = (span.length,)
        self.is_whole = span.length == spec.numel  # no other server has a part of the table
        self._dtype = torch_dtype(spec.dtype)
        self._lasting = lasting
        self.cold = ""  # why the shard does not last any more
        self._when_idle = when_idle
        if lasting is not None:
            values = as_tensor(lasting.memory, self._dtype)
        self.values: Tensor = torch.empty(span.length, dtype=self._dtype) if values is None else values
        self._require_fit(self.values, "memory for the values")
        if lasting is None:
            self.values.zero_()
        left = {} if lasting is None else lasting.record.numbers
        settings = None if lasting is None else lasting.settings
        self.initialised = bool(left.get("initialised"))
        self.version = left.get("version", 0)  # number of updates so far
        self.num_zeroed = left.get("num_zeroed", 0)  # non-finite gradient elements replaced by 0, in all updates
        # Of each group, from the last push with hyperparameters.
        self.hyper: tuple[Hyper, ...] = spec.rule.groups if settings is None else settings.hyper
        self._pieces = cut(spec, span)
        self._require_whole_tensors(rule)
        self._threads = ThreadPool(num_threads)
        self._cuts: list[ShardCut] = []  # that may still need what changes
        self._merger = Merger(spec.rule.quorum, now) if spec.rule.quorum else None
        self._combining = Combining(spec.scale, spec.nonfinite)
        self._updates = (
            Chunked(rule, self._pieces, self.values, self._combining, self._threads, lasting, self._cuts)
            if isinstance(rule, Kernel)
            else WholeTensors(rule, self._pieces, self.values, self._combining, self._threads, lasting)
        )

    def store(self, values: Tensor) -> None:
        """Overwrite the values with a copy of `values`: (elements of the range,), dtype of the table."""
        self._require_fit(values, "values")
        if self._lasting is not None:
            self._lasting.progress.note_change()
        self._keep_for_cuts()
        self.values.copy_(values)
        self.initialised = True
        self._commit()

    def copy_values(self, out: Tensor) -> None:
        """Copy the values to `out`: (elements of the range,)."""
        out.copy_(self.values)

    def screen(self, gradient: Tensor, absent: frozenset[int] = frozenset()) -> int:
        """Return the number of elements of a pushed gradient that are NaN or infinite, without absent segments."""
        self._require_fit(gradient, "gradient")
        if not absent:
            return num_nonfinite(gradient, self._threads)
        views = (piece.view(gradient).view(-1) for piece in self._pieces if piece.segment not in absent)
        return sum(num_nonfinite(view, self._threads) for view in views)

    def measure(self, contributions: Sequence[Contribution]) -> float:
        """Return the norm of the gradient that `apply` would make of these; raises ProtocolBug likewise."""
        self._require_contributions(contributions)
        return self._norm([*contributions, *self._missing(contributions)])

    def _norm(self, contributions: Sequence[Contribution]) -> float:
        return combined_norm(contributions, self._pieces, self._combining, self._threads)

    def apply(self, contributions: Sequence[Contribution], norm: float | None = None) -> dict[int, int]:
        """Update the values once: add the contributions in the order given, scale the sum, and apply the rule.

        Returns how many elements are NaN or infinite in each of the unchecked contributions with some, by its index:
        then nothing has changed.

        Missing samples that were expected count as zeros.
        The hyperparameters of the first contribution count, and stay until others arrive. A segment that is absent from
        all contributions does not change; where it is absent from some, zeros are added. With a quorum, contributions
        are kept until their update is due.

        An update that is to be clipped needs `norm`, that over the whole table, unless this shard is all of it;
        without, it is not clipped.

        Raises:
            ProtocolBug: no contribution, or one that does not fit this shard.
        """
        self._require_contributions(contributions)
        if self._merger is None:
            return self._update([*contributions, *self._missing(contributions)], norm)
        self.settle()  # an update that was due before these contributions does not include them
        self._merger.keep(contributions)
        self.settle()
        return {}

    @property
    def num_kept(self) -> int:
        """Number of contributions that wait for a quorum."""
        return 0 if self._merger is None else len(self._merger)

    def pass_over(self) -> None:
        """Count an update that changes nothing, as all its contributions were refused."""
        self._commit(is_update=True, steps=False)

    def settle(self, *, all_kept: bool = False) -> None:
        """Make the update whose quorum is due by now, if any; or one of all kept contributions.

        Every access to the values calls it first, so that an update is visible from the time when it is due.
        """
        if self._merger is not None:
            due = self._merger.pop_all() if all_kept else self._merger.pop_due()
            if due:
                self._update(due)

    def _missing(self, contributions: Sequence[Contribution]) -> list[Contribution]:
        """Return a contribution without gradients for the missing samples, if any."""
        counts, expected = [each.count for each in contributions], [each.expected for each in contributions]
        missing = num_missing(counts, expected, self.spec.scale)
        if not missing:
            return []
        everything = frozenset(range(len(self.spec.segments)))
        return [Contribution(contributions[0].gradient, missing, absent=everything)]

    def _update(self, contributions: Sequence[Contribution], norm: float | None = None) -> dict[int, int]:
        updates, told = self._updates, contributions[0].hyper or self.hyper
        hyper, max_norm = without_clip(told) if told and CLIP_NORM in told[0] else (told, None)
        if max_norm is not None and norm is None and self.is_whole:
            norm = self._norm(contributions)
        if max_norm is not None and norm is not None:
            contributions = [*contributions, clipping(contributions, self._pieces, norm, max_norm)]
        if self._cuts:
            self._cuts[:] = [each for each in self._cuts if not each.is_over]
            if isinstance(updates, WholeTensors):
                self._keep_for_cuts()
        unchecked = any(each.unchecked for each in contributions)
        is_tried = unchecked and isinstance(updates, Chunked) and updates.try_to_apply(contributions, hyper)
        if not is_tried:
            found = self._not_finite(contributions) if unchecked else {}
            if found:
                return found
            self.num_zeroed += updates.apply(contributions, hyper)
        self.hyper = hyper  # the limit is of this update alone
        self.version += 1
        self._commit(is_update=True)
        save = updates.saving(is_tried=unchecked) if isinstance(updates, Chunked) else None
        if save is not None:
            self._when_idle(save)
        return {}

    def _not_finite(self, contributions: Sequence[Contribution]) -> dict[int, int]:
        """Return how many elements of unchecked contributions are NaN or infinite, without those that have none."""
        found = {
            index: self.screen(each.gradient, each.absent) for index, each in enumerate(contributions) if each.unchecked
        }
        return {index: num for index, num in found.items() if num}

    @property
    def checks_in_updates(self) -> bool:
        """Whether updates look for NaN in unchecked contributions at little cost, mostly."""
        return self._lasting is not None and isinstance(self._updates, Chunked) and self.spec.nonfinite == "reject"

    @property
    def can_preview(self) -> bool:
        """Whether `preview` knows what updates make of a part of the range."""
        return isinstance(self._updates, Chunked) and self._merger is None

    @torch.no_grad()
    def preview(self, start: int, stop: int, contributions: Sequence[Contribution]) -> Tensor:
        """Return what `apply` of these contributions would make of the elements `start` to `stop`; changes nothing.

        Only these elements of the gradients are read. Raises ProtocolBug if `can_preview` is False, or
        the update is to be clipped.
        """
        if not isinstance(self._updates, Chunked):
            raise ProtocolBug(f"Table '{self.spec.name}': {self.spec.rule.name} updates whole tensors at once.")
        hyper, max_norm = without_clip(contributions[0].hyper or self.hyper)
        if max_norm is not None:
            raise ProtocolBug(f"Table '{self.spec.name}': an update is clipped once all of it is known.")
        all_contributions = [*contributions, *self._missing(contributions)]
        parts = [replace(each, gradient=each.gradient[start:stop]) for each in all_contributions]
        return self._updates.preview(start, stop, parts, hyper)

    @property
    def num_applied(self) -> int:
        """How many updates are done, in this process and its predecessors; 0 if the shard does not last."""
        return 0 if self._lasting is None else self._lasting.record.numbers["num_applied"]

    def restore_hyper(self, hyper: tuple[Hyper, ...]) -> None:
        """Set the hyperparameters, which come with a state."""
        self.hyper = hyper
        self._commit(has_settings=True)

    def _commit(self, *, is_update: bool = False, has_settings: bool = False, steps: bool = True) -> None:
        """Have a successor go on from here; `steps`: an update has counted a step of each piece that it changes."""
        lasting, updates = self._lasting, self._updates
        if lasting is None:
            return
        if isinstance(updates, WholeTensors):
            self.cold = updates.save(lasting)
            if self.cold:
                self._lasting = None
                return
        lasting.commit(
            updates.settings(self.hyper) if updates.is_changed or has_settings else None,
            advances_steps=is_update and steps and isinstance(updates, Chunked),
            num_applied=self.num_applied + is_update,
            num_saves=lasting.record.numbers["num_saves"] + isinstance(updates, WholeTensors),
            version=self.version,
            num_zeroed=self.num_zeroed,
            initialised=self.initialised,
        )

    def state(self) -> dict[str, Tensor]:
        """Return "values" and the rule's "<segment>.<state>" tensors: live, so copy them before the next update."""
        named = {VALUES: self.values}
        for key, value in self._updates.state().items():
            index, _, name = key.partition(".")
            if not (index.isdecimal() and int(index) < len(self._pieces) and name):
                raise ProtocolBug(
                    f"Table '{self.spec.name}': the rule {self.spec.rule.name} names a state '{key}', expected "
                    f"'<piece>.<name>' with a piece below {len(self._pieces)}. Name the states of the rule so."
                )
            named[f"{self._pieces[int(index)].segment}.{name}"] = value
        return named

    def load_state(self, state: Mapping[str, Tensor], *, version: int = 0) -> None:
        """Replace the state by a copy of the `state` of a shard with the same range after `version` updates."""
        index_of = {piece.segment: index for index, piece in enumerate(self._pieces)}
        named: dict[str, Tensor] = {}
        for key, value in state.items():
            if key == VALUES:
                continue
            segment, _, name = key.partition(".")
            if not (segment.isdecimal() and int(segment) in index_of):
                raise ProtocolBug(
                    f"Table '{self.spec.name}': state '{key}' belongs to no segment in elements "
                    f"{self.span.start} to {self.span.stop}. Load the state of this very range."
                )
            named[f"{index_of[int(segment)]}.{name}"] = value
        if VALUES not in state:
            raise ProtocolBug(f"Table '{self.spec.name}': a state without values. Load the state of this very range.")
        self._require_fit(state[VALUES], "values")
        self._keep_for_cuts()
        self._updates.load_state(named)
        if self._merger is not None:
            self._merger.pop_all()  # they belong to the earlier values
        self.version = version
        self.store(state[VALUES])

    def cut(self, has_room: Callable[[int], bool] = lambda _: True, *, values_only: bool = False) -> ShardCut:
        """Return the shard as it is now, to be read while updates go on.

        Its `fixed` tensors are named as those of `state`. With `values_only` it has no state.
        """
        parts: dict[str, Tensor] = {VALUES: self.values}
        fixed: dict[str, Tensor] = {}
        held: tuple[tuple[str, ...], ...] = ()
        if not values_only and isinstance(self._updates, Chunked):
            states, held = self._updates.element_states()
            parts.update(states)
        if not values_only:
            inside = {name for name in parts if name != VALUES}
            whole = {key: value for key, value in self.state().items() if key != VALUES}
            fixed = {key: value.clone() for key, value in whole.items() if key.partition(".")[2] not in inside}
        made = ShardCut(parts, fixed, held, has_room)
        self._cuts.append(made)
        return made

    def _keep_for_cuts(self) -> None:
        for each in self._cuts:
            each.keep_all()

    def close(self) -> None:
        """End the threads; the last call."""
        self._threads.close()

    def _require_whole_tensors(self, rule: UpdateRule | Kernel) -> None:
        for piece in self._pieces:
            if rule.granularity == "tensor" and not piece.whole:
                name = self.spec.segments[piece.segment].name
                raise ProtocolBug(
                    f"Table '{self.spec.name}': {self.spec.rule.name} needs whole tensors, but the range of server "
                    f"{self.span.server} cuts '{name}' to its elements {piece.start} to {piece.stop}."
                )

    def _require_contributions(self, contributions: Sequence[Contribution]) -> None:
        if not contributions:
            raise ProtocolBug(f"Table '{self.spec.name}': an update without contributions, expected at least one.")
        for contribution in contributions:
            self._require_fit(contribution.gradient, "gradient")
            if contribution.hyper and len(contribution.hyper) != len(self.spec.rule.groups):
                raise ProtocolBug(
                    f"Table '{self.spec.name}': a push carries hyperparameters of {len(contribution.hyper)} groups, "
                    f"expected {len(self.spec.rule.groups)}."
                )

    def _require_fit(self, tensor: Tensor, what: str) -> None:
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise ProtocolBug(
                f"Table '{self.spec.name}', server {self.span.server}: got {what} of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}, expected {self._shape} and {self._dtype}."
            )


@final
class WholeTensors:
    """Combines the gradients of a range, then steps its whole tensors by a rule.

    Args:
        rule: a new rule, for this range alone.
        pieces: of the range.
        values: (elements of the range,), changed in place.
        combining: how contributions become one gradient.
        threads: pool that adds the gradients.
        lasting: where values and state are copied to, to outlive this process; a predecessor's copy is taken over.
    """

    def __init__(
        self,
        rule: UpdateRule,
        pieces: Sequence[SegmentPiece],
        values: Tensor,
        combining: Combining,
        threads: ThreadPool,
        lasting: ShardMemory | None = None,
    ) -> None:
        self._rule, self._pieces, self._combining, self._threads = rule, pieces, combining, threads
        self._values = values
        self._views = [piece.view(values) for piece in pieces]
        self._sum: Tensor | None = None  # allocated by the first update that adds; same shape as the values
        self._numbers: tuple[Hyper, ...] = ()  # all hyperparameters of each group, as of the last update
        self.is_changed = False  # the settings, since they were last committed
        if lasting is not None and lasting.record.numbers["num_saves"]:
            self._take_over(lasting)

    @torch.no_grad()
    def apply(self, contributions: Sequence[Contribution], hyper: tuple[Hyper, ...]) -> int:
        """Update the values once; return the number of gradient elements that were replaced by 0."""
        having = [
            tuple(index for index, c in enumerate(contributions) if piece.segment not in c.absent)
            for piece in self._pieces
        ]
        combined, num_zeroed = self._combine(contributions, having)
        gradients = [piece.view(combined) if there else None for piece, there in zip(self._pieces, having, strict=True)]
        numbers = tuple({**old, **new} for old, new in zip(self._numbers or hyper, hyper, strict=True))
        self.is_changed = self.is_changed or numbers != self._numbers
        self._numbers = numbers
        if self._pieces:
            # A class of torch keeps the numbers that a push leaves out, and so a successor has to be told of them.
            given = numbers if isinstance(self._rule, TorchRule) else hyper
            with own_code("The update rule"):
                self._rule.update(self._views, gradients, given, [piece.group for piece in self._pieces])
        return num_zeroed

    def save(self, lasting: ShardMemory) -> str:
        """Copy values and state to where they outlive this process; return why that failed, "" if it did not.

        The copy counts with its number, which is committed next.
        """
        try:
            state = {f"{_STATE}{key}": value for key, value in self.state().items()}
            lasting.saved.write(lasting.record.numbers["num_saves"] + 1, {VALUES: self._values, **state})
        except Exception as error:  # noqa: BLE001 - the user's class may return and raise anything
            why = error.strerror if isinstance(error, OSError) else error
            return f"values and state cannot be copied ({why})"
        return ""

    def settings(self, hyper: tuple[Hyper, ...]) -> ShardSettings:
        """Return what a successor has to know besides the tensors; note that it is committed."""
        self.is_changed = False
        return ShardSettings(hyper, self._numbers)

    def _take_over(self, lasting: ShardMemory) -> None:
        """Go on from the last copy of a predecessor, which may have been killed in the middle of the next update."""
        saved = lasting.saved.read(lasting.record.numbers["num_saves"])
        self._values.copy_(saved.pop(VALUES))
        state = {key.removeprefix(_STATE): value.clone() for key, value in saved.items()}
        if state:
            with own_code("The update rule"):
                self._rule.load_state(state)
        settings = lasting.settings
        self._numbers = () if settings is None else settings.numbers

    def state(self) -> Mapping[str, Tensor]:
        """Return the live state of every piece; see `UpdateRule.state`."""
        with own_code("The update rule"):
            return self._rule.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of `state`; see `UpdateRule.load_state`.

        Raises:
            UsageError: a state has another shape than that of the rule.
        """
        if isinstance(self._rule, TorchRule):
            self._rule.check_state(state, self._views)
        elif self._rule.granularity == "element":
            for key, value in state.items():
                expected = self._views[int(key.partition(".")[0])].shape
                if value.shape not in ((), expected):
                    raise UsageError(
                        f"State '{key}' has shape {tuple(value.shape)}, expected {tuple(expected)}, or () for one "
                        "number."
                    )
        self._numbers = ()
        with own_code("The update rule"):
            self._rule.load_state(state)

    def _combine(self, contributions: Sequence[Contribution], having: Sequence[tuple[int, ...]]) -> tuple[Tensor, int]:
        """Return the combined gradient of the range, uncopied if single, and the number of zeroed elements."""
        if len(contributions) == 1 and self._combining.nonfinite != "zero":
            return contributions[0].gradient, 0
        total = torch.empty_like(self._values) if self._sum is None else self._sum
        self._sum = total
        jobs = [
            ((first + start, first + stop), there)
            for first, length, there in runs(self._pieces, having)
            for start, stop in stretches(length, CHUNK)
        ]

        def add(job: tuple[tuple[int, int], tuple[int, ...]], thread: int) -> int:
            del thread
            span, there = job
            return combine_stretch(total[slice(*span)], span, there, contributions, self._combining, divide=True)

        return total, self._threads.total(jobs, add)
