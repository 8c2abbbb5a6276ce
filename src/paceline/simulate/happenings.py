"""What happens in a rehearsal, one value each; times are virtual seconds, and clocks count as in the trace of a run."""

from __future__ import annotations

import msgspec


class ReadValues(msgspec.Struct, frozen=True):
    """A worker at `clock` has values that are complete up to `value_clock`."""

    t: float
    worker: int
    clock: int
    value_clock: int
    waited_s: float
    source: str


class FinishedClock(msgspec.Struct, frozen=True):
    """A worker finished a clock, `step_s` after the one before; it waited for values and for a batch in this time."""

    t: float
    worker: int
    clock: int
    loss: float | None
    wait_s: float
    step_s: float
    load_s: float


class ReachedClock(msgspec.Struct, frozen=True):
    """On this server every clock below `clock` is complete."""

    t: float
    server: int
    clock: int


class Updated(msgspec.Struct, frozen=True):
    """A server applied the pushes of these workers as one update, in `took_s` until `t`."""

    t: float
    server: int
    workers: tuple[int, ...]
    clock: int
    took_s: float


class ChangedMember(msgspec.Struct, frozen=True):
    """A server saw a worker join, leave or die."""

    t: float
    server: int
    worker: int
    incarnation: int
    change: str


class MovedBound(msgspec.Struct, frozen=True):
    """A server moved the adaptive bound, as `BoundMoved` of its core says."""

    t: float
    server: int
    before: int
    bound: int
    waiting: float
    staleness: float


class RefusedPush(msgspec.Struct, frozen=True):
    """A worker heard that a push of its came too late, and was not applied."""

    t: float
    worker: int
    reason: str


Happening = ReadValues | FinishedClock | ReachedClock | Updated | ChangedMember | MovedBound | RefusedPush
