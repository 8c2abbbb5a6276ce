"""What a worker at half speed costs for ever: bsp and ssp alone, and with slices of its clocks taken by the others.

    python benchmarks/reassignment.py [--rounds 3] [--sample-ms 10] [--picture docs/pictures/reassignment.png] [--json]

Four workers and a server; computing is a sleep for each sample, twice as long on worker 1, so that four workers fit on
few cores and their speeds are known: 3.5 of one worker together (a sleep that the machine makes too long shortens the
next). Policies take turns, alone (samples then take 0.4 of the time) and with slices.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from measuring import machine, print_json, progress
from reassignment_worker import BATCH_SIZE, STRAGGLER

HERE = Path(__file__).resolve().parent
NUM_WORKERS = 4
SUM_OF_SPEEDS = NUM_WORKERS - 0.5
STRAGGLER_OVER_SUM = 2 * SUM_OF_SPEEDS / NUM_WORKERS  # what a clock takes at its pace, over what it could take
SLICES = 6
NUM_LAST = 3
# Alone: a worker of twice the speed of another meets a bound of s when it has finished 2 s clocks. With slices no
# worker is ahead, so that fewer show the rate.
CLOCKS_ALONE = {"bsp": 4, "ssp:3": 6 + NUM_LAST, "ssp:10": 20 + NUM_LAST}
CLOCKS_SLICED = 6
ALONE_FASTER = 2.5  # samples of those runs, where nearly all that is measured is waiting for the straggler
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, as the workers are told."""

    policy: str
    slices: int
    num_clocks: int
    sample_ms: float

    @staticmethod
    def all(sample_ms: float) -> "list[Plan]":
        """Return each policy alone, then with slices."""
        alone = [Plan(policy, 1, clocks, sample_ms / ALONE_FASTER) for policy, clocks in CLOCKS_ALONE.items()]
        sliced = [Plan(policy, SLICES, CLOCKS_SLICED, sample_ms) for policy in CLOCKS_ALONE]
        return [plan for pair in zip(alone, sliced, strict=True) for plan in pair]

    @property
    def title(self) -> str:
        """What it is called."""
        return f"{self.policy} with slices" if self.slices > 1 else f"{self.policy} alone"

    @property
    def ideal_s(self) -> float:
        """What a clock of all workers takes at the sum of their speeds."""
        return NUM_WORKERS * BATCH_SIZE * self.sample_ms / 1000 / SUM_OF_SPEEDS

    def of(self, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what the workers found in it, in all rounds."""
        return [run for run in found if (run["policy"], run["slices"]) == (self.policy, self.slices)]

    def clocks(self, found: list[dict[str, Any]]) -> list[float]:
        """Return what each clock took of worker 0, over the ideal; the median over the rounds."""
        ends = [run["ends"] for run in self.of(found) if run["rank"] == 0]
        rounds = [[(later - sooner) / self.ideal_s for sooner, later in pairwise([0.0, *own])] for own in ends]
        return [median(clocks) for clocks in zip(*rounds, strict=True)]


def measure(rounds: int, plans: list[Plan]) -> list[dict[str, Any]]:
    """Run the job; return what each worker found in each run."""
    runs = [[plan.policy, plan.slices, plan.num_clocks, plan.sample_ms] for plan in plans]
    command = [sys.executable, "-m", "paceline", "run", "-n", str(NUM_WORKERS), "-m", "1", "--quiet", "--no-progress"]
    command += [str(HERE / "reassignment_worker.py"), "--rounds", str(rounds), "--runs", json.dumps(runs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    found = [json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or not found:
        raise SystemExit(f"the run failed:\n{done.stdout}")
    return found


def summed_up(found: list[dict[str, Any]], plans: list[Plan]) -> dict[str, dict[str, float]]:
    """Return the medians over the rounds, run by run."""
    results: dict[str, dict[str, float]] = {}
    for plan in plans:
        runs = plan.of(found)
        clock_s = median(run["seconds"] for run in runs if run["rank"] == 0) / plan.num_clocks
        of_straggler = median(run["samples"] for run in runs if run["rank"] == STRAGGLER)
        results[plan.title] = {
            "clock_ms": 1000 * clock_s,
            "over_sum_of_speeds": clock_s / plan.ideal_s,
            "last_over_sum_of_speeds": mean(plan.clocks(found)[-NUM_LAST:]),
            "straggler_share": of_straggler / (BATCH_SIZE * NUM_WORKERS * plan.num_clocks),
            "ask_ms": median(run["ask_ms"] for run in runs),
        }
    return results


def draw(found: list[dict[str, Any]], plans: list[Plan], path: Path) -> None:
    """Draw what the clocks of a fast worker took, one by one, and what a clock of all took in the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=140, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = dict(zip(CLOCKS_ALONE, ("#0072B2", "#009E73", "#D55E00"), strict=True))
    results = summed_up(found, plans)
    for plan in plans:
        style, paleness = ("-", 1.0) if plan.slices > 1 else ("--", 0.45)
        clocks = plan.clocks(found)
        left.plot(range(len(clocks)), clocks, style, color=colours[plan.policy], label=plan.title)
        over = results[plan.title]["over_sum_of_speeds"]
        right.barh(plan.title, over, color=colours[plan.policy], alpha=paleness, height=0.6)
        right.text(0.03, plan.title, f"{over:.2f}", ha="left", va="center", fontsize=9, color="white")
    left.set_title("A clock of a fast worker, over a clock at the sum of speeds", loc="left", fontsize=10)
    left.set_xlabel("clock")
    left.set_ylim(0, 1.1 * STRAGGLER_OVER_SUM)
    left.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    right.set_title("A clock of all, in the mean", loc="left", fontsize=10)
    right.set_ylim(len(results) - 0.4, -1.0)
    for value, text in ((1.0, "sum of speeds"), (STRAGGLER_OVER_SUM, "the straggler's pace")):
        left.axhline(value, color="#222222", linewidth=0.8)
        right.axvline(value, color="#222222", linewidth=0.8)
        right.text(value - 0.02, -0.7, text, ha="right", va="center", fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample-ms", type=float, default=10.0)
    parser.add_argument("--picture", type=Path, help="draw into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    progress(machine())
    plans = Plan.all(options.sample_ms)
    found = measure(options.rounds, plans)
    results = summed_up(found, plans)
    print(f"1 is a clock of all at the sum of speeds; {STRAGGLER_OVER_SUM:.2f} is one at the pace of the straggler")
    for name, one in results.items():
        print(
            f"{name:20} {one['over_sum_of_speeds']:.2f} in the mean, {one['last_over_sum_of_speeds']:.2f} at the end; "
            f"{one['clock_ms']:.0f} ms a clock, straggler {one['straggler_share']:.1%} of the samples, "
            f"{one['ask_ms']:.2f} ms to ask"
        )
    if options.picture:
        draw(found, plans, options.picture)
    if options.json:
        print_json({"name": "reassignment", "rounds": options.rounds, "machine": machine(), "runs": results})


if __name__ == "__main__":
    main()
