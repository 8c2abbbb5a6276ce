"""Local SGD and DiLoCo: workers step locally and exchange their progress every few steps, for slow links."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from paceline.core.calls import checked
from paceline.core.consistency import Consistency, asynchronous, bsp
from paceline.errors import UsageError
from paceline.training.buffers import floating_buffers
from paceline.training.downpour import refusal_of
from paceline.training.flat import FlatParameters, Weights, segments_of
from paceline.training.state import (
    StateOf,
    check_state,
    checked_by_all,
    fetch_state,
    laid_out_for,
    loaded_by_first,
    send_state,
)
from paceline.training.strategy import (
    CountedSteps,
    Distributed,
    Settings,
    TrainingJob,
    open_flat,
    require_plain_step,
)
from paceline.update.named_rules import SGD, DelayedNesterov, Merging
from paceline.update.rules import RuleSpec
from paceline.update.summing import num_nonfinite, zeroed
from paceline.update.table import Segment, TableSpec
from paceline.worker.cache import TableCache
from paceline.worker.pushes import PendingPush
from paceline.worker.table import PendingRead, Table


class ExchangeRounds(msgspec.Struct, frozen=True):
    """Rounds of inner steps with an exchange each; see `paceline.strategies.diloco`.

    Raises:
        UsageError: a number is out of its range, or has no effect together with the others.

    Example:
        >>> rounds = ExchangeRounds(steps=10, outer_lr=0.7, outer_momentum=0.9, fragments=2, overlap_steps=3)
        >>> [step for step in range(1, 21) if rounds.is_pushed(0, step)]
        [5, 15]
        >>> [step for step in range(1, 21) if rounds.is_taken(1, step)]
        [3, 13]
    """

    steps: int
    outer_lr: float
    outer_momentum: float
    fragments: int = 1
    overlap_steps: int = 0
    merge: float = 1.0
    asynchronous: bool = False
    quorum: int | None = None
    grace_s: float = 0.0
    delayed: int | None = None

    def __post_init__(self) -> None:
        """Validate the numbers and their combination."""
        for problem in self._problems():
            raise UsageError(problem)

    @property
    def consistency(self) -> Consistency:
        """Consistency of the tables of the exchange."""
        return asynchronous() if self.asynchronous else bsp()

    def is_pushed(self, turn: int, step: int) -> bool:
        """Return whether the fragments of this turn are pushed in a step, counted from 1."""
        return step % self.steps == self._phase(turn)

    def is_taken(self, turn: int, step: int) -> bool:
        """Return whether the values requested for the fragments of this turn are merged after a step."""
        return self.is_pushed(turn, step - self.overlap_steps)

    def rule(self, num_workers: int) -> RuleSpec:
        """Return the update rule of the servers for a push, or for the mean of several."""
        if self.delayed is not None:
            rule = DelayedNesterov(self.outer_lr, self.outer_momentum, every=self.delayed)
        else:
            rule = SGD(self.outer_lr, self.outer_momentum, nesterov=self.outer_momentum > 0)
        if self.quorum is None:
            return rule
        return Merging(rule, quorum=self.quorum, num_workers=num_workers, grace_s=self.grace_s)

    def buffers_rule(self, num_workers: int) -> RuleSpec:
        """Return the update rule of the servers for buffers: the workers' mean.

        Asynchronous, each push moves the values by one worker's share.
        """
        return SGD(1 / num_workers if self.asynchronous else 1.0)

    def _phase(self, turn: int) -> int:
        """Return the step of a round for a turn; turns are evenly spaced, and the last one ends the round."""
        return (turn + 1) * self.steps // self.fragments % self.steps

    def _problems(self) -> Iterator[str]:
        if self.steps < 1:
            yield f"a round has {self.steps} steps, expected 1 or more."
        if not 1 <= self.fragments <= self.steps:
            yield f"{self.fragments} fragments cannot take turns in {self.steps} steps, expected 1 to {self.steps}."
        if not 0 <= self.overlap_steps < self.steps:
            yield (
                f"overlap_steps is {self.overlap_steps}: values have to be taken before the next exchange of the same "
                f"parameters, so expected 0 to {self.steps - 1}."
            )
        if not 0 < self.merge <= 1:
            yield f"merge is {self.merge}, expected more than 0, up to 1 for the servers' values as they are."
        if not 0 < self.outer_lr < math.inf or not 0 <= self.outer_momentum < 1:
            yield (
                f"outer_lr is {self.outer_lr} and outer_momentum {self.outer_momentum}, expected a rate above 0, and "
                "0 or more but less than 1."
            )
        yield from self._asynchronous_problems()

    def _asynchronous_problems(self) -> Iterator[str]:
        given = [name for name, number in (("quorum", self.quorum), ("delayed", self.delayed)) if number is not None]
        if given and not self.asynchronous:
            yield f"{' and '.join(given)} are for workers out of step: add asynchronous=True."
        if self.grace_s and self.quorum is None:
            yield f"grace_s={self.grace_s:g} is the time after a quorum: add quorum=..., how many pushes that takes."
        if self.delayed is not None and not self.outer_momentum:
            yield f"delayed={self.delayed} delays momentum, and outer_momentum is 0: leave one of them out."
        counts = [number for number in (self.quorum, self.delayed) if number is not None]
        if not 0 <= self.grace_s < math.inf or any(number < 1 for number in counts):
            yield (
                f"quorum is {self.quorum}, grace_s {self.grace_s:g} and delayed {self.delayed}; expected 1 or more, "
                "0 or more, and 1 or more."
            )


@dataclass(slots=True)
class Fragment:
    """Tensors that are exchanged together, through a table of their own.

    Args:
        turn: index of the step within a round in which they are exchanged.
        flat: the tensors.
        table: the servers' values of them.
    """

    turn: int
    flat: FlatParameters
    table: Table
    num_samples: float = 0.0  # of this worker's steps since its last push
    weights: Weights = field(init=False)
    # (elements of all,): the servers' values that this worker took last; its progress is the difference from them.
    _anchor: Tensor = field(init=False)
    _asked: PendingRead | None = None
    _is_owing: bool = False  # whether the requested values lack this worker's steps, which it has yet to push

    def __post_init__(self) -> None:
        """Start from the servers' values."""
        self.weights = Weights(self.flat, self.table)
        self._anchor = self.flat.empty()
        self.start()

    def start(self) -> None:
        """Set the tensors to the servers' values, and drop local progress; blocks until the values are fresh."""
        self._asked = None
        self.table.read(self._note)
        self.flat.unpack(self._anchor)
        self.num_samples = 0.0

    def push(self) -> PendingPush:
        """Send this worker's progress as a gradient.

        Raises:
            UsageError: it is not finite, under nonfinite="halt".
        """
        buffer = self.table.client.reserve()
        self.write_way(buffer.gradient)
        samples, self.num_samples = self.num_samples, 0.0
        return self.table.push_reserved(buffer, samples=samples, absent=(), hyper=())

    def write_way(self, out: Tensor) -> None:
        """Write the old values minus the new ones to (elements of all,): a gradient points uphill."""
        self.flat.pack_values(out)
        torch.sub(self._anchor, out, out=out)

    def request_values(self, *, is_owing: bool) -> None:
        """Request the values of this round; `merge_values` waits for them."""
        self._asked, self._is_owing = self.table.start_read(), is_owing

    def merge_values(self, merge: float) -> None:
        """Wait for the requested values, if any, and continue from them.

        Args:
            merge: fraction of the way from the current tensors to the values; 1 takes the values. A worker whose steps
                are not pushed yet moves by the change of the values instead, so that its progress is kept.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return
        before = self._anchor.clone() if self._is_owing else None
        self.table.finish_read(asked, self._note)
        if before is not None:
            self._add(self._anchor - before)
        elif merge == 1.0:
            self.flat.unpack(self._anchor)
        else:
            self._move(merge)

    def load(self, state: Mapping[int, dict[str, Tensor]]) -> None:
        """Set the servers' values to these tensors, and the state of their rule to `state`; blocks."""
        loaded: StateOf = dict(state)
        send_state(self.table, loaded, self.flat)

    def unsent(self) -> dict[str, Any] | None:
        """Return this worker's progress that the servers' values lack; None if there is none. Blocks for these values.

        "common" are the servers' values, "own" the tensors if they start from these, both (elements of all,).
        """
        newest, own = self.flat.empty(), self.flat.empty()

        def take(cache: TableCache) -> None:
            newest.copy_(cache.readable().slice(0, self.flat.numel))

        self.table.read(take, exact=self.table.consistency.bound is not None)
        self.weights.pack_own(own)
        is_coming = self._asked is not None and not self._is_owing
        if not is_coming:
            own += newest - self._anchor  # progress of other workers meanwhile
        if not is_coming and not self.num_samples and torch.equal(own, newest):
            return None
        return {"common": newest, "own": own, "num_samples": self.num_samples, "is_coming": is_coming}

    def require_fitting(self, unsent: Mapping[str, Any] | None) -> None:
        """Raise UsageError unless this may be a result of `unsent` of the same fragment of the same model."""
        shapes = [] if unsent is None else [tuple(unsent[name].shape) for name in ("common", "own")]
        if any(shape != (self.flat.numel,) for shape in shapes):
            raise UsageError(
                f"what is unsent of table '{self.table.name}' has shape {shapes[0]}, expected ({self.flat.numel},): it "
                "is of another model, or of other fragments."
            )

    def go_back(self, unsent: Mapping[str, Any]) -> None:
        """Set the tensors to the servers' values, if they equal those in an `unsent` state."""
        now = self.flat.empty()
        self.flat.pack_values(now)
        if torch.equal(now, unsent["own"]):
            self.flat.unpack(unsent["common"])

    def resume(self, unsent: Mapping[str, Any]) -> None:
        """Restore unsent progress, after `start`, if the servers have the values that belong to it."""
        if not torch.equal(self._anchor, unsent["common"]):
            return
        self.flat.unpack(unsent["own"])
        self.num_samples = unsent["num_samples"]
        if unsent["is_coming"]:
            self.request_values(is_owing=False)

    def _note(self, cache: TableCache) -> None:
        self._anchor.copy_(cache.readable().slice(0, self.flat.numel))

    @torch.no_grad()
    def _add(self, change: Tensor) -> None:
        for tensor, part in zip(self.flat.tensors, self.flat.parts(change), strict=True):
            tensor.add_(part.to(tensor.device))

    @torch.no_grad()
    def _move(self, merge: float) -> None:
        for tensor, part in zip(self.flat.tensors, self.flat.parts(self._anchor), strict=True):
            tensor.lerp_(part.to(tensor), merge)  # buffers of several dtypes share a table of a wider one


OUTER = "outer"  # key of the servers' part in a state_dict
ROUND = "round"  # key of this worker's progress within a round


class LocalOptimizer(Distributed):
    """Optimizer used like the one it wraps, which steps on this worker and keeps its state from round to round.

    At the end of a round, the difference between the last common values and this worker's is pushed as a gradient,
    which the servers' outer optimizer applies; the worker continues from the result. Every step is a clock, so losses
    compare with those of other strategies clock by clock. Workers may join late and leave early.

    Attributes:
        num_refused: steps of this worker that were not taken, and pushes that were not applied, because they were not
            finite.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None,
        settings: Settings,
        rounds: ExchangeRounds,
        job: TrainingJob,
    ) -> None:
        require_plain_step(optimizer)
        named, _ = segments_of(optimizer, model)
        _require_fit(named, settings, rounds)
        super().__init__(optimizer, f"exchanged every {rounds.steps} steps", settings, job)
        self.state = optimizer.state
        self._optimizer = optimizer
        self._rounds = rounds
        self._counted = CountedSteps(
            rounds.steps, f"every {rounds.steps} clocks, if it has a batch in the last of them"
        )
        job.counted_steps[settings.name] = self._counted
        self._fragments = self._open_fragments(named, model)
        # By the clock, so that a worker that joins late exchanges in the same steps as the others.
        self._num_steps = self._fragments[0].table.node.clock

    # -- the loop ----------------------------------------------------------------------------------------------------

    def send(self, samples: float | None) -> float:
        """Step locally, and push the fragments whose turn it is.

        Args:
            samples: how many samples (or tokens) the gradients stand for. Their sum since a fragment's last exchange
                is the weight of its push under scale="samples".

        Raises:
            UsageError: gradients or values are not finite under nonfinite="halt".
        """
        weight = self._weight_of_step(samples)
        self._num_steps += 1
        if self._may_step():
            self._optimizer.step()
        self._counted.num_made += 1
        self._counted.num_unpushed += 1
        if self._rounds.is_pushed(self._rounds.fragments - 1, self._num_steps):  # the last fragments, and buffers
            self._counted.num_unpushed = 0
        for fragment in self._fragments:
            fragment.num_samples += weight
            if self._rounds.is_pushed(fragment.turn, self._num_steps):
                with self._job.metrics.communicating():
                    fragment.push().when_refused(self._count_refusal)
        return weight

    def receive(self) -> None:
        """Request the values of the fragments that were pushed, and merge those that are due."""
        self._exchange(was_pushed=True)

    def step_without_batch(self) -> None:
        """Exchange with the others in a step for which this worker has no batch.

        Its progress since the last exchange is part of the next one.
        """
        self._num_steps += 1
        self._counted.num_without_batch += 1
        self._exchange(was_pushed=False)

    def wait_for_values(self) -> None:
        """Merge all values under way, including those that overlap with further steps."""
        with self._job.metrics.communicating():
            for fragment in self._fragments:
                fragment.merge_values(self._rounds.merge)

    def accumulate(self) -> AbstractContextManager[None]:
        """Do nothing: gradients stay on this worker until the step."""
        return nullcontext()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Put the servers' values into the model for the length of a `with` block, for evaluation or saving.

        They contain every exchange of all clocks below this worker's own (asynchronous: all that have been merged);
        blocks until they are in. Embeddings read the same state. Gradients are off inside the block. Training continues
        afterwards from the values before it.
        """
        with ExitStack() as held:
            held.enter_context(torch.no_grad())
            held.enter_context(self._job.lookups.exactly())
            for fragment in self._fragments:
                held.enter_context(fragment.weights.newest())
            yield

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer on this worker, and under "outer" that of the servers, by table.

        "round" has this worker's position within a round, and its steps that the servers do not have yet, with the
        servers' values. Blocks. Call it at a barrier, while no pushes are under way; it merges pushes that wait for a
        quorum. The values that belong to it are those in a `snapshot`, or this worker's own; it is the same inside and
        outside of a snapshot.
        """
        outer = {fragment.table.name: fetch_state(fragment.table, fragment.flat) for fragment in self._fragments}
        unsent = [fragment.unsent() for fragment in self._fragments]
        return {
            **self._optimizer.state_dict(),
            OUTER: outer,
            ROUND: {"num_steps": self._num_steps, "unsent": unsent},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state here and on the servers, with the parameters and buffers of worker 0 on all workers.

        Every worker must call it, each with a state of its own or all with the same; "outer" counts on worker 0, and
        without it the outer optimizer starts anew. Where worker 0 has the values that belong to its state, each worker
        then continues from its own, in the same step of the round, for which it finishes clocks without a step; else,
        and without "round", all continue from those of worker 0. Blocks until all have called.

        Raises:
            UsageError: the state belongs to another optimizer or model; nothing is changed on the servers then.
            Refused: another worker raised UsageError, or worker 0 failed to send the state or is gone.
        """
        with checked_by_all(self._job):
            numbered = laid_out_for(self, state_dict, self._settings.name, self._named())
            outer = self._outer_of(state_dict)
            unsent = self._unsent_of(state_dict)
            self.wait_for_values()
            inner = {key: value for key, value in numbered.items() if key not in (OUTER, ROUND)}
            self._optimizer.load_state_dict(inner)
            self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state
        with loaded_by_first(self._job, self._settings.first):
            if self._job.rank == self._settings.first:
                for fragment, own in zip(self._fragments, unsent, strict=True):
                    if own is not None:
                        fragment.go_back(own)
                    fragment.load(outer.get(fragment.table.name, {}))
        self._go_to_step(state_dict.get(ROUND, {}).get("num_steps", self._num_steps))
        for fragment, own in zip(self._fragments, unsent, strict=True):
            fragment.start()
            if own is not None:
                fragment.resume(own)

    def _go_to_step(self, step: int) -> None:
        """Finish clocks until the same step of a round: workers that join late count rounds by the clock."""
        while (self._num_steps - step) % self._rounds.steps:
            self._job.clock(samples=None)
            self._num_steps += 1

    def _unsent_of(self, state_dict: dict[str, Any]) -> list[dict[str, Any] | None]:
        """Return the unsent progress of each fragment, after validation."""
        unsent: list[dict[str, Any] | None] = state_dict.get(ROUND, {}).get("unsent", [None] * len(self._fragments))
        if len(unsent) != len(self._fragments):
            raise UsageError(
                f"the state is of {len(unsent)} tables, and '{self._settings.name}' has {len(self._fragments)}: it is "
                "of another model, or of other fragments."
            )
        for fragment, own in zip(self._fragments, unsent, strict=True):
            fragment.require_fitting(own)
        return unsent

    def _outer_of(self, state_dict: dict[str, Any]) -> dict[str, StateOf]:
        """Return the servers' part of a state, after validation."""
        outer = cast("dict[str, StateOf]", state_dict.get(OUTER, {}))
        specs = {fragment.table.name: fragment.table.spec for fragment in self._fragments}
        foreign = sorted(outer.keys() - specs.keys())
        if foreign:
            raise UsageError(
                f"the state has the tables {', '.join(foreign)}, and '{self._settings.name}' {', '.join(specs)}: it is "
                "of another model, or of other fragments."
            )
        return {name: _numbered_outer(specs[name], state) for name, state in outer.items()}

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _open_fragments(self, named: dict[str, Tensor], model: nn.Module | None) -> list[Fragment]:
        """Open the tables: of parameters, every n-th in one of n fragments, and of buffers."""
        rounds, name, num_workers = self._rounds, self._settings.name, self._settings.num_replicas(self._job)
        fragments: list[Fragment] = []
        for turn in range(rounds.fragments):
            own = dict(list(named.items())[turn :: rounds.fragments])
            table = name if rounds.fragments == 1 else f"{name}.{turn}"
            fragments.append(self._open(turn, table, FlatParameters.over(own), rounds.rule(num_workers)))
        buffers = floating_buffers(model) if model is not None and self._settings.average_buffers else {}
        if buffers:
            rule = rounds.buffers_rule(num_workers)
            flat = FlatParameters.widened(buffers)
            fragments.append(self._open(rounds.fragments - 1, f"{name}.buffers", flat, rule))
        return fragments

    def _open(self, turn: int, table: str, flat: FlatParameters, rule: RuleSpec) -> Fragment:
        settings = self._settings
        segments = tuple(Segment(own, tuple(tensor.shape)) for own, tensor in flat.named.items())
        policy = str(self._rounds.consistency)
        spec = TableSpec(table, segments, flat.dtype, rule, policy, settings.scale, settings.nonfinite)
        return Fragment(turn, flat, open_flat(self._job, settings, spec, flat))

    def _exchange(self, *, was_pushed: bool) -> None:
        rounds, step = self._rounds, self._num_steps
        with self._job.metrics.communicating():
            for fragment in self._fragments:
                if rounds.is_pushed(fragment.turn, step):
                    fragment.request_values(is_owing=not was_pushed)
            for fragment in self._fragments:
                if rounds.is_taken(fragment.turn, step):
                    fragment.merge_values(rounds.merge)

    def _may_step(self) -> bool:
        """Return whether the step can use the gradients, after `nonfinite` has been applied to them."""
        if self.overflowed:
            self.num_refused += 1
            return False
        if self._settings.nonfinite == "ignore":
            return True
        found = [parameter.grad for group in self.param_groups for parameter in cast("list[Tensor]", group["params"])]
        dense = [gradient for gradient in found if gradient is not None and gradient.layout == torch.strided]
        bad = [gradient for gradient in dense if num_nonfinite(gradient)]
        if not bad:
            return True
        if self._settings.nonfinite == "halt":
            raise UsageError(
                f"worker {self._job.rank}, step {self._num_steps} of '{self._settings.name}': {len(bad)} of "
                f"{len(dense)} gradients are not finite. Lower the learning rate, or clip gradients."
            )
        if self._settings.nonfinite == "zero":
            for gradient in bad:
                gradient.copy_(zeroed(gradient))
            return True
        self._note_refused(refusal_of(self._named()))
        return False

    def _named(self) -> dict[str, Tensor]:
        """Return the tensors of all fragments, by name."""
        return {name: tensor for fragment in self._fragments for name, tensor in fragment.flat.named.items()}


def _numbered_outer(spec: TableSpec, state: StateOf) -> StateOf:
    """Return the state of a table's outer optimizer, after validation, by the numbers of its tensors."""
    params = list(range(len(spec.segments)))
    return check_state(spec, {"state": state, "param_groups": [{"params": params}]})["state"]


def _require_fit(named: dict[str, Tensor], settings: Settings, rounds: ExchangeRounds) -> None:
    """Refuse more fragments than parameters, and settings that only pushed gradients support."""
    if len(named) < rounds.fragments:
        raise UsageError(
            f"'{settings.name}' has {len(named)} parameters, which do not make {rounds.fragments} fragments: take "
            f"{len(named)} or fewer."
        )
    if settings.overlap:
        raise UsageError(
            f"'{settings.name}' exchanges every {rounds.steps} steps, so backward has nothing to send: leave out "
            "overlap=True, and take overlap_steps=... of diloco to compute while values are under way."
        )


_OUTER_LR = 0.7
_CAUTIOUS_LR = 0.07  # where momentum acts on each stale push


class LocalSGD(msgspec.Struct, frozen=True):
    """Strategy in which every worker steps its own model and servers merge them; see `paceline.strategies.diloco`."""

    rounds: ExchangeRounds

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> LocalOptimizer:
        """Make an optimizer that steps on its worker, and exchanges."""
        return LocalOptimizer(optimizer, model, settings, self.rounds, job)


@checked
def local_sgd(
    steps: int = 10,
    *,
    outer_lr: float = 1.0,
    fragments: int = 1,
    overlap_steps: int = 0,
    merge: float = 1.0,
    asynchronous: bool = False,
    quorum: int | None = None,
    grace_s: float = 0.0,
) -> LocalSGD:
    """Return local SGD for `paceline.distributed(strategy=...)`: every `steps` steps all continue from their mean.

    The same as `paceline.strategies.diloco` with an outer optimizer that only takes the mean.

    Args:
        steps: between two exchanges; traffic falls by this factor. 1 exchanges after every step.
        outer_lr: fraction of the way to the mean; asynchronous, how far each push moves the values.
        fragments: as in `paceline.strategies.diloco`, like all that follow.
        overlap_steps: number of steps taken while values are under way.
        merge: weight of the servers' values when they arrive.
        asynchronous: never wait for another worker.
        quorum: number of pushes that make an update.
        grace_s: seconds to wait for more pushes after a quorum.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.Adam(model.parameters())
        >>> strategy = paceline.strategies.local_sgd(steps=2)
        >>> optimizer = paceline.distributed(inner, strategy=strategy, model=model, name="local")
        >>> for _ in range(4):
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
    """
    return LocalSGD(
        ExchangeRounds(steps, outer_lr, 0.0, fragments, overlap_steps, merge, asynchronous, quorum, grace_s)
    )


@checked
def diloco(
    steps: int = 50,
    *,
    outer_lr: float | None = None,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    overlap_steps: int = 0,
    merge: float = 1.0,
    asynchronous: bool = False,
    quorum: int | None = None,
    grace_s: float = 0.0,
    delayed: int | None = None,
) -> LocalSGD:
    """Return DiLoCo for `paceline.distributed(strategy=...)`: workers step alone, servers step with their progress.

    The wrapped optimizer is the inner one: it steps on its worker, and its state stays there from round to round. Every
    `steps` steps, a worker's progress goes to the servers as a gradient (old values minus new), weighted by the samples
    behind it; these take a step of SGD with Nesterov momentum, and the worker continues from the new values. Buffers of
    the model are averaged.

    Args:
        steps: of each worker between two exchanges; traffic falls by this factor.
        outer_lr: step size of the outer optimizer, 0.7 by default. Asynchronous, where momentum would act on every
            stale push, it is 0.07; 0.7 again with `delayed`, or without momentum.
        outer_momentum: of the outer optimizer.
        fragments: exchange the parameters in this many parts, spread evenly over a round: the same traffic, in
            smaller bursts.
        overlap_steps: merge the servers' answer this many steps after the push, instead of waiting for it.
        merge: fraction of the way from the worker's own values to the servers'; 1 takes the servers'. With less, the
            steps taken while they were under way stay in part, and go with the worker's next push.
        asynchronous: each push is a step of the outer optimizer when it arrives, and no worker waits for another.
        quorum: asynchronous; number of pushes merged into one step.
        grace_s: seconds after a quorum in which more pushes may join its step; see `paceline.update.Merging`.
        delayed: asynchronous; number of pushes for each use of momentum, see `paceline.update.DelayedNesterov`.

    Raises:
        UsageError: a number is out of its range, or has no effect together with the others.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.AdamW(model.parameters())
        >>> strategy = paceline.strategies.diloco(steps=2)
        >>> optimizer = paceline.distributed(inner, strategy=strategy, model=model, name="diloco")
        >>> for _ in range(4):
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
    """
    if outer_lr is None:
        is_naive = asynchronous and outer_momentum > 0 and delayed is None
        outer_lr = _CAUTIOUS_LR if is_naive else _OUTER_LR
    return LocalSGD(
        ExchangeRounds(
            steps,
            outer_lr,
            outer_momentum,
            fragments,
            overlap_steps,
            merge,
            asynchronous,
            quorum,
            grace_s,
            delayed,
        )
    )
