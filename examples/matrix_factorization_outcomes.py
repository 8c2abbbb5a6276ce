"""What a run of matrix factorization comes to, and a table of several."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: the square loss as [clock, seconds, loss], and how many rows were read at each clock differential.

    At -1 a row has every update of all earlier clocks; each step further down it lacks one clock more.
    """

    policy: str
    seed: int
    curve: list[tuple[int, float, float]]
    reads: dict[int, int]

    @property
    def loss(self) -> float:
        """The last loss; infinite for a run that ended worse than it began."""
        first, last = self.curve[0][2], self.curve[-1][2]
        return last if last < first else math.inf

    @property
    def is_stable(self) -> bool:
        """Whether the loss never rose above the first."""
        return all(loss <= self.curve[0][2] for _, _, loss in self.curve)


def differentials(traces: Path) -> dict[int, int]:
    """Count the rows that workers read in a run by their clock differential; reads for judging are not recorded."""
    counts: Counter[int] = Counter()
    for path in traces.glob("worker-*.jsonl"):
        for record in map(json.loads, path.read_bytes().splitlines()):
            if record["kind"] == "row_read":
                for value_clock, num_rows in record["num_rows"].items():
                    counts[int(value_clock) - 1 - record["clock"]] += num_rows
    return dict(sorted(counts.items()))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the comparison in few numbers: medians of the seeds, and of the losses all."""
    bsp = {one.seed: one.loss for one in outcomes if one.policy == "bsp"}
    lines = ["policy    loss / bsp's      of each seed           rows at -1   mean  variance   seconds"]
    for policy in dict.fromkeys(one.policy for one in outcomes):
        runs = [one for one in outcomes if one.policy == policy]
        ratios = [one.loss / bsp[one.seed] for one in runs]
        fresh, mean, variance = (median(values) for values in zip(*(ages(one.reads) for one in runs), strict=True))
        lines.append(
            f"{policy:8}{ratio_text(median(ratios)):>12}      {' '.join(map(ratio_text, ratios)):28}{fresh:6.0%}"
            f"{mean:9.2f}{variance:9.2f}{median(one.curve[-1][1] for one in runs):10.1f}"
        )
    return "\n".join(lines)


def ratio_text(ratio: float) -> str:
    """Say how many times bsp's a loss is."""
    return f"{ratio:.3f}" if math.isfinite(ratio) else "diverges"


def ages(reads: dict[int, int]) -> tuple[float, float, float]:
    """Return the share of rows at differential -1, and the mean and variance of the differential."""
    num_rows = sum(reads.values())
    mean = sum(differential * count for differential, count in reads.items()) / num_rows
    variance = sum((differential - mean) ** 2 * count for differential, count in reads.items()) / num_rows
    return reads.get(-1, 0) / num_rows, mean, variance
