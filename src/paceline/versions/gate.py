"""A gate for producers of samples: tickets with versions, so that no sample is used later than a bound allows."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, final

from paceline.core.calls import checked, checked_late, shown
from paceline.errors import DeadlineExceeded, UsageError
from paceline.transport.deadline import patience_s

ADMIT_TIMEOUT_S: Final = 600.0
_NAME_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to make one sample with the weights of `version`."""

    number: int
    version: int
    gate: str = field(repr=False)  # which gave it; tickets may pass through other processes


@final
class Gate:
    """Bounds how stale samples are when they are used: see `paceline.gate`. Thread-safe.

    It is ssp with producers as workers: a sample begun at version v is used at version v + bound at the latest.
    Producers wait at `admit` for samples that the versions within the bound do not use up. The trainer may not go on to
    a version that is too new for an open ticket: it takes in that sample first. So none is discarded, however slow its
    producer.

    Attributes:
        version: of the weights that producers are given now.
        num_admitted: tickets so far.
        num_consumed: samples that were used.
        num_cancelled: tickets that were given back.
    """

    def __init__(self, bound: int | None, per_version: int) -> None:
        """Begin at version 0. See `paceline.gate`."""
        if bound is not None and bound < 0:
            raise UsageError(f"gate: bound is {bound}, expected 0 or more versions, or None for no bound.")
        if per_version < 1:
            raise UsageError(f"gate: per_version is {per_version}, expected 1 sample or more.")
        self.bound: Final = bound
        self.per_version: Final = per_version
        self.version = 0
        self.num_admitted = self.num_consumed = self.num_cancelled = 0
        self._name = secrets.token_hex(_NAME_BYTES)
        self._open: dict[int, Ticket] = {}  # by number, and so by version
        self._staleness: Counter[int] = Counter()
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Gate(bound {self.bound}, version {self.version}, {len(self._open)} open tickets)"

    @checked
    def admit(self, num: int = 1, *, timeout_s: float = ADMIT_TIMEOUT_S) -> list[Ticket]:
        """Return tickets for so many samples; blocks while these could be used only beyond the bound.

        Raises:
            DeadlineExceeded: not enough samples were used in time.
            UsageError: so many can never be open at once.
        """
        most = None if self.bound is None else (self.bound + 1) * self.per_version
        if num < 1 or (most is not None and num > most):
            raise UsageError(
                f"gate: {num} tickets were asked for, expected 1 to {most or 'any number'}: take fewer at a time, or a "
                "larger bound."
            )
        timeout_s = patience_s(timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: most is None or self._used() + num <= most, timeout_s):
                raise DeadlineExceeded(
                    f"waited {timeout_s:g} s at the gate for {num} tickets: {len(self._open)} are open at version "
                    f"{self.version}, and those until now suffice for {self.bound} more"
                )
            made = [Ticket(self.num_admitted + index, self.version, self._name) for index in range(num)]
            self.num_admitted += num
            self._open.update({ticket.number: ticket for ticket in made})
            return made

    @checked_late
    def consume(self, ticket: Ticket) -> int:
        """Count the sample of this ticket as used, now; return how many versions it is stale. Does not block.

        Raises:
            UsageError: the ticket was used or given back before, or is none of this gate.
        """
        with self._changed:
            self._close(ticket)
            self.num_consumed += 1
            staleness = self.version - ticket.version
            self._staleness[staleness] += 1
            return staleness

    @checked_late
    def cancel(self, ticket: Ticket) -> None:
        """Give a ticket back, of a producer that has failed; raises as `consume` does."""
        with self._changed:
            self._close(ticket)
            self.num_cancelled += 1

    @property
    def can_advance(self) -> bool:
        """Whether no open ticket would be too stale at the next version."""
        with self._changed:
            return self._oldest() is None

    def advance(self) -> int:
        """Go on to the next version, and return it. Does not block.

        Raises:
            UsageError: a sample that is not used yet would be too stale then.
        """
        with self._changed:
            late = self._oldest()
            if late is not None:
                raise UsageError(
                    f"gate: ticket {late.number} of version {late.version} is open, and version {self.version + 1} "
                    f"would be more than {self.bound} newer: wait for its sample and consume it, or cancel the ticket."
                )
            self.version += 1
            self._changed.notify_all()
            return self.version

    def histogram(self) -> dict[int, int]:
        """Return how many samples were used at each staleness, in versions."""
        with self._changed:
            return dict(sorted(self._staleness.items()))

    def _used(self) -> int:
        """Return how many tickets there were beyond those that former versions used up."""
        return self.num_admitted - self.num_cancelled - self.version * self.per_version

    def _oldest(self) -> Ticket | None:
        """Return the oldest open ticket if it would be too stale at the next version."""
        oldest = next(iter(self._open.values()), None)
        if oldest is None or self.bound is None or self.version + 1 - oldest.version <= self.bound:
            return None
        return oldest

    def _close(self, ticket: Ticket) -> None:
        if not isinstance(ticket, Ticket):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(f"gate: {shown(ticket)} is not a ticket, expected one of the list that admit() returned.")
        if ticket.gate != self._name:
            raise UsageError(
                f"gate: ticket {ticket.number} of version {ticket.version} is of another gate: give each ticket to the "
                "gate whose admit() returned it."
            )
        if self._open.get(ticket.number) != ticket:
            raise UsageError(
                f"gate: ticket {ticket.number} of version {ticket.version} is not open: it was used or given back "
                "before. Use each ticket once."
            )
        del self._open[ticket.number]
        self._changed.notify_all()


@checked
def gate(bound: int | None, per_version: int) -> Gate:
    """Make a gate between producers of samples and the trainer that uses them, with a bound of staleness.

    Args:
        bound: how many versions newer than the weights it was made with the trainer may be when it uses a sample; 0 for
            none, None for any number.
        per_version: how many samples one version is trained with.

    Raises:
        UsageError: a number is out of range.

    Example:
        >>> import paceline
        >>> gate = paceline.gate(bound=1, per_version=2)
        >>> first = gate.admit(2)
        >>> [gate.consume(ticket) for ticket in first], gate.advance()
        ([0, 0], 1)
        >>> late = gate.admit(2)
        >>> gate.advance(), gate.can_advance
        (2, False)
        >>> [gate.consume(ticket) for ticket in late], gate.histogram()
        ([1, 1], {0: 2, 1: 2})
    """
    return Gate(bound, per_version)
