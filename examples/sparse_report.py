"""What `sparse_logistic.py` prints at its end: how good the weights are, and what the filters saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sparse_picture import PARTS, Point
from sparse_samples import Floats, Ids

NUM_WORDS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one training: looks along the way, the last one exact, and what all workers counted together."""

    name: str
    looks: list[Point]
    weights: Floats
    counts: dict[str, float]

    @property
    def sent_bytes(self) -> dict[str, float]:
        """The bytes of all workers, by what they were."""
        return {part: self.counts[part] for part in PARTS}


def report(runs: Sequence[Run], violation: float) -> None:
    """Print a line for each run, and what the filters changed."""
    print(f"\n{'':22}  objective  test AUC  weights  rows filtered  MB sent   saved")
    for run in runs:
        last, counts = run.looks[-1], run.counts
        filtered, sent = counts["rows filtered"] / counts["rows pushed"], sum(run.sent_bytes.values())
        print(
            f"{run.name:22}   {last.objective:.6f}    {last.auc:.4f}   {last.num_weights:6,}  "
            f"{filtered:13.1%}  {sent / 1e6:7.2f}  {1 - sent / counts['plain']:6.1%}"
        )
    print()
    for run in runs[1:]:
        difference = run.looks[-1].objective - runs[0].looks[-1].objective
        print(f"{run.name}: objective {difference:+.1e} beside no filters")
    print(f"at weights of 0, gradients exceed the penalty by {violation:.1e} at most")
    report_key_caching(runs[1].counts)


def report_key_caching(counts: Mapping[str, float]) -> None:
    """Print what is saved once the servers know all lists of ids."""
    plain, ids, numbers = (counts[f"later {what}"] for what in ("plain", "ids", "numbers"))
    print(
        f"key caching, after every list was sent once: of {plain:,.0f} bytes of ids and numbers, 8 each, {ids:,.0f} of "
        f"ids and {numbers:,.0f} of numbers were sent: {1 - (ids + numbers) / plain:.4%} saved; and "
        f"{counts['later digests']:,.0f} bytes of digests, 16 a list"
    )


def say_words(weights: Floats, ids: Ids, words: Mapping[int, str]) -> None:
    """Print the words that speak most for and against, where ids stand for words."""
    order = [place for place in np.argsort(weights) if words.get(int(ids[place]))]
    for side, places in (("for", order[: -NUM_WORDS - 1 : -1]), ("against", order[:NUM_WORDS])):
        if places:
            print(f"{side} it speak {', '.join(words[int(ids[place])] for place in places)}")
