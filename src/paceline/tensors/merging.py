"""Pushes that a server keeps until a quorum has come, and then takes to the update rule together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from paceline.tensors.contribution import Contribution
from paceline.tensors.rules import Quorum


@final
@dataclass(slots=True)
class Merger:
    """Keeps contributions until they are due; each is given out once. Used by one thread at a time.

    Args:
        quorum: what makes them due.
        now: the time in seconds, from any start.

    Example:
        >>> import torch
        >>> kept = Merger(Quorum(num_pushes=2, grace_s=0.0, num_workers=4), now=lambda: 0.0)
        >>> kept.keep([Contribution(torch.ones(1), worker=0)])
        >>> len(kept.take_due())
        0
        >>> kept.keep([Contribution(torch.ones(1), worker=3)])
        >>> len(kept.take_due())
        2
    """

    quorum: Quorum
    now: Callable[[], float]
    _kept: list[Contribution] = field(default_factory=list[Contribution])
    _reached_at: float | None = None  # when the last of the quorum came, of those that are kept

    def keep(self, contributions: Sequence[Contribution]) -> None:
        """Keep copies of contributions: their memory is used for others soon."""
        self._kept += [replace(each, gradient=each.gradient.clone()) for each in contributions]
        if self._reached_at is None and len(self._kept) >= self.quorum.num_pushes:
            self._reached_at = self.now()

    def take_due(self) -> list[Contribution]:
        """Give out what is due, in the order in which it came; nothing if that is to wait for more."""
        if self._reached_at is None:
            return []
        is_complete = len({each.worker for each in self._kept}) >= self.quorum.num_workers
        is_over = self.now() >= self._reached_at + self.quorum.grace_s
        return self.take_all() if is_complete or is_over else []

    def take_all(self) -> list[Contribution]:
        """Give out all that is kept, due or not."""
        kept, self._kept, self._reached_at = self._kept, [], None
        return kept
