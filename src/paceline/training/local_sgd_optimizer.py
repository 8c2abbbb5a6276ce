"""Optimizer that steps locally on its worker, and every few steps exchanges its progress with the others."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.training.buffers import floating_buffers
from paceline.training.downpour import refusal_of
from paceline.training.flat import FlatParameters, segments_of
from paceline.training.local_sgd_rounds import ExchangeRounds
from paceline.training.optimizer import Settings, TrainingJob, require_plain_step
from paceline.training.state import StateOf, check_state, checked_by_all, fetch_state, loaded_by_first, send_state
from paceline.training.strategy import Distributed
from paceline.training.weights import Weights
from paceline.update.rules import RuleSpec
from paceline.update.summing import num_nonfinite, zeroed
from paceline.update.table import Segment, TableSpec
from paceline.worker.cache import TableCache
from paceline.worker.pushes import PushOutcome
from paceline.worker.table import PulledLater, Table


@dataclass(slots=True)
class Fragment:
    """Tensors that are exchanged together, through a table of their own.

    Args:
        turn: which turn of a round is theirs.
        flat: the tensors.
        table: the servers' values of them.
    """

    turn: int
    flat: FlatParameters
    table: Table
    num_samples: float = 0.0  # behind what this worker has done since its last push
    weights: Weights = field(init=False)
    # (elements of all,): the servers' values as this worker took them last. What it has done is the way from there.
    _anchor: Tensor = field(init=False)
    _asked: PulledLater | None = None
    _is_owing: bool = False  # whether what was asked for is without this worker's steps, which it has yet to push

    def __post_init__(self) -> None:
        """Start from the servers' values."""
        self.weights = Weights(self.flat, self.table)
        self._anchor = self.flat.empty()
        self.start()

    def start(self) -> None:
        """Set the tensors to the servers' values, whatever was done; blocks until those are fresh."""
        self._asked = None
        self.table.read(self._note)
        self.flat.unpack(self._anchor)
        self.num_samples = 0.0

    def push(self) -> Future[PushOutcome]:
        """Send how far this worker has come, as a gradient; return how that will end.

        Raises:
            UsageError: it is not finite, under nonfinite="halt".
        """
        buffer = self.table.node.reserve(self.table.name)
        self.write_way(buffer.gradient)
        samples, self.num_samples = self.num_samples, 0.0
        return self.table.push_reserved(buffer, samples=samples, absent=(), hyper=())

    def write_way(self, out: Tensor) -> None:
        """Write the old values minus the new ones to (elements of all,): a gradient points uphill."""
        self.flat.pack_values(out)
        torch.sub(self._anchor, out, out=out)

    def ask(self, *, is_owing: bool) -> None:
        """Ask for the values of this round; `take` waits for them."""
        self._asked, self._is_owing = self.table.ask(), is_owing

    def take(self, merge: float) -> None:
        """Wait for the values that were asked for, if any, and go on from them.

        Args:
            merge: how far to go from the tensors as they are towards the values; 1 is all the way. A worker that owes
                its steps goes as far as the values went, so that it still has them to push.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            return
        before = self._anchor.clone() if self._is_owing else None
        self.table.take(asked, self._note)
        if before is not None:
            self._add(self._anchor - before)
        elif merge == 1.0:
            self.flat.unpack(self._anchor)
        else:
            self._move(merge)

    def load(self, state: Mapping[int, dict[str, Tensor]]) -> None:
        """Set the servers' values to the tensors as they are here, and the state of their rule to this one; blocks."""
        loaded: StateOf = dict(state)
        send_state(self.table, loaded, self.flat)

    def unsent(self) -> dict[str, Any] | None:
        """Return what this worker has that the servers' values lack; None if that is nothing. Blocks for these values.

        "common" are the values, "own" what the tensors hold where they are the start, both (elements of all,).
        """
        newest, own = self.flat.empty(), self.flat.empty()

        def take(cache: TableCache) -> None:
            newest.copy_(cache.readable().slice(0, self.flat.numel))

        self.table.read(take, exact=self.table.consistency.bound is not None)
        self.flat.pack_values(own)
        is_coming = self._asked is not None and not self._is_owing
        if not is_coming:
            own += newest - self._anchor  # what others have done meanwhile
        if not is_coming and not self.num_samples and torch.equal(own, newest):
            return None
        return {"common": newest, "own": own, "num_samples": self.num_samples, "is_coming": is_coming}

    def require_fitting(self, unsent: Mapping[str, Any] | None) -> None:
        """Raise UsageError unless this may have come from `unsent` of the same fragment of the same model."""
        shapes = [] if unsent is None else [tuple(unsent[name].shape) for name in ("common", "own")]
        if any(shape != (self.flat.numel,) for shape in shapes):
            raise UsageError(
                f"what is unsent of table '{self.table.name}' has shape {shapes[0]}, expected ({self.flat.numel},): it "
                "is of another model, or of other fragments."
            )

    def go_back(self, unsent: Mapping[str, Any]) -> None:
        """Set the tensors to the servers' values, if they hold what they held when these were unsent."""
        now = self.flat.empty()
        self.flat.pack_values(now)
        if torch.equal(now, unsent["own"]):
            self.flat.unpack(unsent["common"])

    def resume(self, unsent: Mapping[str, Any]) -> None:
        """Go on from what was unsent, after `start`, if the servers have the values that belong to it."""
        if not torch.equal(self._anchor, unsent["common"]):
            return
        self.flat.unpack(unsent["own"])
        self.num_samples = unsent["num_samples"]
        if unsent["is_coming"]:
            self.ask(is_owing=False)

    def _note(self, cache: TableCache) -> None:
        self._anchor.copy_(cache.readable().slice(0, self.flat.numel))

    @torch.no_grad()
    def _add(self, change: Tensor) -> None:
        for tensor, part in zip(self.flat.tensors, self.flat.parts(change), strict=True):
            tensor.add_(part.to(tensor.device))

    @torch.no_grad()
    def _move(self, merge: float) -> None:
        for tensor, part in zip(self.flat.tensors, self.flat.parts(self._anchor), strict=True):
            tensor.lerp_(part.to(tensor.device), merge)


OUTER = "outer"  # what of a state_dict is of the servers
ROUND = "round"  # what of it says how far this worker is in a round


class LocalOptimizer(Distributed):
    """Used like the optimizer it wraps, which steps on this worker and keeps its state from round to round.

    At the end of a round the way from the last common values to this worker's goes to the servers as a gradient, which
    their outer optimizer takes; the worker goes on from what that makes. Every step is a clock, so losses compare with
    those of other strategies clock by clock. Workers may join late and leave early.

    Attributes:
        num_refused: steps of this worker that were not taken, and pushes that were not applied, as they were not
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
        super().__init__(optimizer, settings.name, f"exchanged every {rounds.steps} steps", job)
        self.state = optimizer.state
        self._optimizer = optimizer
        self._settings, self._rounds = settings, rounds
        self._num_samples = job.num_samples  # as of the last step
        self._fragments = self._open_fragments(named, model)
        # As the others count: who joins late, with a clock that is theirs, exchanges when they do.
        self._num_steps = self._fragments[0].table.node.clock

    # -- the loop ----------------------------------------------------------------------------------------------------

    def send(self, samples: float | None) -> float:
        """Take a step here, and push the fragments whose turn it is.

        Args:
            samples: how many samples (or tokens) the gradients stand for. Their sum since a fragment's last exchange
                is the weight of its push under scale="samples".

        Raises:
            UsageError: gradients, or what came of them, are not finite under nonfinite="halt".
        """
        weight = samples if samples is not None else self._job.num_samples - self._num_samples or 1
        self._num_samples = self._job.num_samples
        self._num_steps += 1
        if self._may_step():
            self._optimizer.step()
        for fragment in self._fragments:
            fragment.num_samples += weight
            if self._rounds.is_pushed(fragment.turn, self._num_steps):
                with self._job.communicating():
                    fragment.push().add_done_callback(self._count_refusal)
        return weight

    def receive(self) -> None:
        """Ask for the values of the fragments that were pushed, and take those that are due."""
        self._exchange(was_pushed=True)

    def follow(self) -> None:
        """Exchange with the others in a step for which this worker has no batch.

        What it has done since the last exchange goes with the next one, and is not lost until then.
        """
        self._num_steps += 1
        self._exchange(was_pushed=False)

    def arrive(self) -> None:
        """Take all values that are under way, also those that overlap with steps to come."""
        with self._job.communicating():
            for fragment in self._fragments:
                fragment.take(self._rounds.merge)

    def accumulate(self) -> AbstractContextManager[None]:
        """Do nothing: gradients stay here until the step."""
        return nullcontext()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Hold the servers' values in the model for the length of a `with` block, for evaluation or saving.

        They contain every exchange of all clocks below this worker's own (asynchronous: all that was merged by now);
        blocks until they are in. Embeddings read as much. Gradients are off meanwhile. Training continues from where
        it was.
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

        Under "round" is how far this worker is in a round, and what of its steps the servers do not have yet, with the
        servers' values. Blocks; take it at a barrier, where no pushes are under way. Pushes that wait for a quorum are
        merged by it. The values that belong to it are those in a `snapshot`, or this worker's own.
        """
        outer = {fragment.table.name: fetch_state(fragment.table) for fragment in self._fragments}
        unsent = [fragment.unsent() for fragment in self._fragments]
        return {
            **self._optimizer.state_dict(),
            OUTER: outer,
            ROUND: {"num_steps": self._num_steps, "unsent": unsent},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state here and on the servers, and parameters and buffers everywhere to what they are on worker 0.

        Every worker must call it, each with a state of its own or all with the same; "outer" counts on worker 0, and
        where it is left out the outer optimizer starts anew. Where worker 0 has the values that belong to its state,
        each worker then goes on from its own, in the same step of the round, for which it finishes clocks without a
        step; else, and without "round", all go on from those of worker 0. Blocks until all have called.

        Raises:
            UsageError: the state is of another optimizer or model; nothing is changed on the servers then.
            Refused: the same on another worker, or worker 0 could not send it, or is gone.
        """
        with checked_by_all(self._job):
            outer = self._outer_of(state_dict)
            unsent = self._unsent_of(state_dict)
            self.arrive()
            inner = {key: value for key, value in state_dict.items() if key not in (OUTER, ROUND)}
            self._optimizer.load_state_dict(inner)
            self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state
        with loaded_by_first(self._job):
            if self._job.rank == 0:
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
        """Finish clocks until it is the same step of a round: who joins late counts rounds by the clock."""
        while (self._num_steps - step) % self._rounds.steps:
            self._job.clock(samples=None)
            self._num_steps += 1

    def _unsent_of(self, state_dict: dict[str, Any]) -> list[dict[str, Any] | None]:
        """Return what each fragment had unsent, once it is known to fit."""
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
        """Return the servers' part of a state, once it is known to fit."""
        outer = cast("dict[str, StateOf]", state_dict.get(OUTER, {}))
        specs = {fragment.table.name: fragment.table.spec for fragment in self._fragments}
        foreign = sorted(outer.keys() - specs.keys())
        if foreign:
            raise UsageError(
                f"the state has the tables {', '.join(foreign)}, and '{self._settings.name}' {', '.join(specs)}: it is "
                "of another model, or of other fragments."
            )
        for name, state in outer.items():
            params = list(range(len(specs[name].segments)))
            check_state(specs[name], {"state": state, "param_groups": [{"params": params}]})
        return outer

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _open_fragments(self, named: dict[str, Tensor], model: nn.Module | None) -> list[Fragment]:
        """Make the tables: of parameters that lie apart by the number of fragments, and of buffers."""
        rounds, name, num_workers = self._rounds, self._settings.name, self._job.size
        fragments: list[Fragment] = []
        for turn in range(rounds.fragments):
            own = dict(list(named.items())[turn :: rounds.fragments])
            table = name if rounds.fragments == 1 else f"{name}.{turn}"
            fragments.append(self._open(turn, table, own, rounds.rule(num_workers)))
        buffers = floating_buffers(model) if model is not None and self._settings.average_buffers else {}
        if buffers:
            rule = rounds.buffers_rule(num_workers)
            fragments.append(self._open(rounds.fragments - 1, f"{name}.buffers", buffers, rule))
        return fragments

    def _open(self, turn: int, table: str, named: dict[str, Tensor], rule: RuleSpec) -> Fragment:
        flat, settings = FlatParameters.over(named), self._settings
        segments = tuple(Segment(own, tuple(tensor.shape)) for own, tensor in named.items())
        policy = str(self._rounds.consistency)
        spec = TableSpec(table, segments, flat.dtype, rule, policy, settings.scale, settings.nonfinite)
        opened = self._job.open_table(spec, (flat.numel,), flat.pack_values, read_my_writes=False, live=False)
        return Fragment(turn, flat, opened)

    def _exchange(self, *, was_pushed: bool) -> None:
        rounds, step = self._rounds, self._num_steps
        with self._job.communicating():
            for fragment in self._fragments:
                if rounds.is_pushed(fragment.turn, step):
                    fragment.ask(is_owing=not was_pushed)
            for fragment in self._fragments:
                if rounds.is_taken(fragment.turn, step):
                    fragment.take(rounds.merge)

    def _may_step(self) -> bool:
        """Say whether the gradients can be stepped with, after what the settings have done to those that cannot."""
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
        named = {name: tensor for fragment in self._fragments for name, tensor in fragment.flat.named.items()}
        self._note_refused(refusal_of(named))
        return False

    def _count_refusal(self, pushed: Future[PushOutcome]) -> None:
        if pushed.exception() is None:  # else the worker has failed, which the next call tells
            self.num_refused += not pushed.result().applied


def _require_fit(named: dict[str, Tensor], settings: Settings, rounds: ExchangeRounds) -> None:
    """Refuse more fragments than there are parameters, and what only pushed gradients can do."""
    if len(named) < rounds.fragments:
        raise UsageError(
            f"'{settings.name}' has {len(named)} parameters, which do not make {rounds.fragments} fragments: take "
            f"{len(named)} or fewer."
        )
    if settings.overlap:
        raise UsageError(
            f"'{settings.name}' exchanges every {rounds.steps} steps, so backward has nothing to send: leave out "
            "overlap=True, and take overlap_steps=... of paceline.diloco to compute while values are under way."
        )
