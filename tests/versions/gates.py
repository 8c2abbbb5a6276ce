"""A gate under drawn calls of producers and a trainer, checked against counts that are kept beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from paceline.errors import DeadlineExceeded, UsageError
from paceline.versions.gate import Gate, Ticket

NUM_CALLS = 2000


class WrongGateError(AssertionError):
    """A gate has broken a promise; the message says which."""


@dataclass
class GateHistory:
    """What a gate has let through and counted, kept independently of it."""

    bound: int | None
    per_version: int
    version: int = 0
    open: dict[int, Ticket] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    num_returned: int = 0
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def num_waiting(self) -> int:
        """Samples that are used or may still be, beyond those that the versions until now were trained with."""
        return len(self.used) + len(self.open) - self.version * self.per_version

    def may_admit(self, num: int) -> bool:
        return self.bound is None or self.num_waiting + num <= (self.bound + 1) * self.per_version

    def may_advance(self) -> bool:
        if self.bound is None:
            return True
        return all(self.version + 1 - ticket.version <= self.bound for ticket in self.open.values())

    def admitted(self, tickets: list[Ticket] | None, num: int) -> None:
        """G1: tickets come exactly where all of them can be used within the bound, each of another number."""
        if (tickets is not None) != self.may_admit(num):
            how = "admits" if tickets is not None else "refuses"
            raise WrongGateError(f"G1: {how} {num} with {self.num_waiting} waiting at version {self.version}")
        for ticket in tickets or ():
            if ticket.number in self.open or ticket.number in self.used or ticket.version != self.version:
                raise WrongGateError(f"G1: {ticket} is given at version {self.version}, or twice")
            self.open[ticket.number] = ticket

    def consumed(self, ticket: Ticket, staleness: int | None) -> None:
        """G2, G3: each ticket counts once, and no sample is used beyond the bound."""
        if (staleness is not None) != (self.open.get(ticket.number) == ticket):
            raise WrongGateError(f"G2: {ticket} is {'counted' if staleness is not None else 'refused'}")
        if staleness is None:
            return
        if staleness != self.version - ticket.version or (self.bound is not None and staleness > self.bound):
            raise WrongGateError(f"G3: {ticket} is used at version {self.version}, with a staleness of {staleness}")
        del self.open[ticket.number]
        self.used.add(ticket.number)
        self.staleness[staleness] += 1

    def cancelled(self, ticket: Ticket, *, is_taken: bool) -> None:
        """G2: a ticket that was used or given back cannot be given back."""
        if is_taken != (self.open.get(ticket.number) == ticket):
            raise WrongGateError(f"G2: {ticket} is {'taken' if is_taken else 'not taken'} back")
        if is_taken:
            del self.open[ticket.number]

    def advanced(self, version: int | None) -> None:
        """G4: the next version comes exactly where no open ticket is too old for it."""
        if (version is not None) != self.may_advance() or version not in (None, self.version + 1):
            raise WrongGateError(f"G4: version {version} after {self.version}, with {len(self.open)} open tickets")
        self.version += version is not None

    def counted(self, gate: Gate) -> None:
        """G5: the histogram has each used sample once."""
        if gate.histogram() != dict(sorted(self.staleness.items())) or gate.num_consumed != len(self.used):
            raise WrongGateError(f"G5: counts {gate.histogram()}, expected {dict(self.staleness)}")


def rehearse_gate(seed: int) -> int:
    """Make drawn calls; return how many samples were used. Raises WrongGateError."""
    rng = Random(seed)
    gate = Gate(rng.choice((None, 0, 1, 2, 5)), rng.randint(1, 6))
    history, known = GateHistory(gate.bound, gate.per_version), list[Ticket]()
    for _ in range(NUM_CALLS):
        what = rng.choices(("admit", "consume", "cancel", "advance", "check"), (4, 8, 0.5, 3, 0.1))[0]
        if what == "admit":
            num = rng.randint(1, gate.per_version)
            tickets = _admit(gate, num)
            history.admitted(tickets, num)
            known = [*known, *(tickets or ())][-50:]
        elif what == "advance":
            history.advanced(_advance(gate))
        elif what == "check":
            history.counted(gate)
        elif known:
            ticket = rng.choice(known)  # which may have been used or given back
            if what == "consume":
                history.consumed(ticket, _consume(gate, ticket))
            else:
                history.cancelled(ticket, is_taken=_cancel(gate, ticket))
    history.counted(gate)
    return len(history.used)


def _admit(gate: Gate, num: int) -> list[Ticket] | None:
    try:
        return gate.admit(num, timeout_s=0.0)
    except DeadlineExceeded:
        return None


def _advance(gate: Gate) -> int | None:
    try:
        return gate.advance()
    except UsageError:
        return None


def _consume(gate: Gate, ticket: Ticket) -> int | None:
    try:
        return gate.consume(ticket)
    except UsageError:
        return None


def _cancel(gate: Gate, ticket: Ticket) -> bool:
    try:
        gate.cancel(ticket)
    except UsageError:
        return False
    return True
