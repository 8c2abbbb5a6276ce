"""Partition of a sequence of costs into consecutive pieces whose largest sum is smallest; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_ends(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return behind which layers to cut, the last one included."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # worst[end]: the dearest stage when the layers before `end` are cut in the best way; choices say where.
    worst = [sum_ if end else float("inf") for end, sum_ in enumerate(sums)]
    choices: list[list[int]] = []
    for stage in range(1, num_stages):
        cuts = [0] * len(sums)
        found = [float("inf")] * len(sums)
        for end in range(stage + 1, len(sums)):
            cuts[end] = min(range(stage, end), key=lambda cut: max(worst[cut], sums[end] - sums[cut]))
            found[end] = max(worst[cuts[end]], sums[end] - sums[cuts[end]])
        worst = found
        choices.append(cuts)
    ends = [len(costs)]
    for cuts in reversed(choices):
        ends.insert(0, cuts[ends[0]])
    return ends
