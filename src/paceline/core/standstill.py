"""Deadlock detection: which waiting workers can never continue, and descriptions of waits for messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

_MOST_NAMES = 8
_PLURAL = {"waits": "wait", "is": "are", "has": "have"}


class Waiter(msgspec.Struct, frozen=True):
    """A wait of a worker: its description and the workers that it waits for.

    `says` begins with a verb ("waits for a batch") and may have a place for their names: "waits for clock 3 of {}".
    The wait ends once all of the workers have done something, or with `any_of` one of them.
    """

    says: str
    blockers: tuple[int, ...] = ()
    any_of: bool = False

    def ends_without(self, others: set[int]) -> bool:
        """Return whether the wait can end if none of the others does anything."""
        idle = others.intersection(self.blockers)
        return not idle or (self.any_of and len(idle) < len(self.blockers))


def stuck(waiters: Mapping[int, Waiter]) -> set[int]:
    """Return the workers in deadlock: each of them waits for another one of them.

    >>> sorted(stuck({0: Waiter("", (1,)), 1: Waiter("", (0,)), 2: Waiter("", (3,))}))
    [0, 1]
    >>> stuck({0: Waiter("", (1, 2), any_of=True), 1: Waiter("", (0,))})  # worker 2 may end it
    set()
    """
    left = set(waiters)
    while free := {worker for worker in left if waiters[worker].ends_without(left)}:
        left -= free
    return left


def describe(waiters: Mapping[int, Waiter], whereabouts: Callable[[int], str]) -> str:
    """Return a sentence about which workers wait for which, and what those are doing that do not wait.

    >>> waiters = {1: Waiter("waits for clock 4 of {}", (0,)), 2: Waiter("waits for clock 4 of {}", (0,))}
    >>> describe(waiters, lambda _: "is at clock 4")
    'workers 1, 2 wait for clock 4 of worker 0; worker 0 is at clock 4'
    """
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for worker, waiter in sorted(waiters.items()):
        alike.setdefault((waiter.says, waiter.blockers), []).append(worker)
    parts = [_clause(workers, says.replace("{}", names(blockers))) for (says, blockers), workers in alike.items()]
    others: dict[str, list[int]] = {}
    for worker in sorted({worker for waiter in waiters.values() for worker in waiter.blockers} - set(waiters)):
        others.setdefault(whereabouts(worker), []).append(worker)
    parts += [_clause(workers, says) for says, workers in others.items()]
    return "; ".join(parts)


def names(workers: Sequence[int]) -> str:
    """Return the names of workers; of more than 8, the first 8 and the number of the others.

    >>> names([2]), names([0, 3]), names([])
    ('worker 2', 'workers 0, 3', 'no worker')
    """
    if not workers:
        return "no worker"
    shown = ", ".join(map(str, workers[:_MOST_NAMES]))
    more = f" and {len(workers) - _MOST_NAMES} more" if len(workers) > _MOST_NAMES else ""
    return f"worker {shown}" if len(workers) == 1 else f"workers {shown}{more}"


def _clause(workers: Sequence[int], says: str) -> str:
    verb, _, rest = says.partition(" ")
    return f"{names(workers)} {verb if len(workers) == 1 else _PLURAL.get(verb, verb)} {rest}"
