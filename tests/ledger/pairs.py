"""Of all combinations of several choices, a few in which every two values stand together somewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

Value = str | int | bool
Choice = dict[str, Value]
Pair = tuple[tuple[str, Value], tuple[str, Value]]

_NUM_DRAWN = 40  # the best of so many is taken next


def all_of(axes: Mapping[str, Sequence[Value]]) -> list[Choice]:
    """Every combination."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pairwise(axes: Mapping[str, Sequence[Value]], seed: int = 0) -> list[Choice]:
    """A few combinations; the same for the same seed."""
    dice, found = random.Random(seed), list[Choice]()
    missing = {pair for one, other in combinations(axes, 2) for pair in _pairs_of_axes(axes, one, other)}
    while missing:
        (one, first), (other, second) = min(missing, key=repr)
        drawn = [
            {axis: dice.choice(values) for axis, values in axes.items()} | {one: first, other: second}
            for _ in range(_NUM_DRAWN)
        ]
        best = max(drawn, key=lambda choice: len(missing.intersection(pairs_in(choice))))
        missing.difference_update(pairs_in(best))
        found.append(best)
    return found


def pairs_in(choice: Choice) -> Iterator[Pair]:
    """Every two values of a combination."""
    return combinations(choice.items(), 2)


def _pairs_of_axes(axes: Mapping[str, Sequence[Value]], one: str, other: str) -> Iterator[Pair]:
    return product(((one, value) for value in axes[one]), ((other, value) for value in axes[other]))


def name_of(choice: Choice) -> str:
    """How a test of this combination is called."""
    return "-".join(str(value) for value in choice.values())
