"""Rounds of local SGD: in which steps workers exchange updates, and how servers combine them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.consistency import Consistency, asynchronous, bsp
from paceline.errors import UsageError
from paceline.update.named_rules import SGD, DelayedNesterov, Merging
from paceline.update.rules import RuleSpec


@dataclass(frozen=True, slots=True)
class ExchangeRounds:
    """Rounds of inner steps with an exchange each; see `paceline.diloco`.

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
