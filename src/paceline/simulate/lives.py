"""What each server was told about each worker, to check that only workers with a reason are evicted (L6)."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.events import Died, Disconnected
from paceline.core.messages import Join

Life = tuple[int, int]  # worker, incarnation


class Violation(AssertionError):
    """A promise was broken; the message says which, where and when."""


@dataclass(slots=True)
class Lives:
    """Lives of all workers in one run, recorded independently of what servers believe."""

    lease_s: float
    join_timeout_s: float
    replaced: dict[int, int] = field(default_factory=dict[int, int])  # worker -> incarnation that has joined
    gone: set[Life] = field(default_factory=set[Life])  # evicted by some server
    disturbed: set[Life] = field(default_factory=set[Life])  # killed, stopped or cut off by the scenario
    # By (server, life): since when its connection is lost, as far as the server knows; and lives that have joined
    # there.
    _silent: dict[tuple[int, Life], float] = field(default_factory=dict[tuple[int, Life], float])
    _joined: set[tuple[int, Life]] = field(default_factory=set[tuple[int, Life]])
    _dead: set[tuple[int, Life]] = field(default_factory=set[tuple[int, Life]])

    def told(self, server: int, event: object, now: float) -> None:
        """Record an event that a server receives."""
        match event:
            case Join(sender=sender):
                life = (sender.worker, sender.incarnation)
                self._joined.add((server, life))
                self._silent.pop((server, life), None)
            case Disconnected():
                self._silent[server, (event.worker, event.incarnation)] = now
            case Died():
                self._dead.add((server, (event.worker, event.incarnation)))
            case _:
                pass

    def note_eviction(self, server: int, life: Life, now: float) -> None:
        """Check an eviction: the server knows of the death or of a successor, or the lease has expired."""
        self.gone.add(life)
        key = (server, life)
        if key in self._dead or any(s == server and w == life[0] and i > life[1] for s, (w, i) in self._joined):
            return
        if key not in self._joined and now >= self.join_timeout_s:
            return
        if now < self._silent.get(key, now) + self.lease_s:
            raise Violation(f"L6: at {now:g} s server {server} gives up worker {life[0]}.{life[1]} without a reason")
