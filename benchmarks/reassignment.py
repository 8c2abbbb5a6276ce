"""What a worker at half speed costs for ever: bsp and ssp alone, and with slices of its clocks taken by the others.

    python benchmarks/reassignment.py [--rounds 3] [--sample-ms 5] [--picture docs/pictures/reassignment.png] [--json]

Four workers and a server; computing is a sleep for each sample, twice as long on worker 1, so that four workers fit on
few cores and their speeds are known: 3.5 of one worker together (a sleep that the machine makes too long shortens the
next). Policies take turns, alone and with slices.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from measuring import machine, print_json, progress
from reassignment_worker import BATCH_SIZE, STRAGGLER

HERE = Path(__file__).resolve().parent
NUM_WORKERS = 4
SUM_OF_SPEEDS = NUM_WORKERS - 0.5
SLICES = 6
NUM_LAST = 3
# Alone: a worker of twice the speed of another meets a bound of s when it has finished 2 s clocks. With slices nobody
# is ahead, so that fewer show the rate.
CLOCKS_ALONE = {"bsp": 4, "ssp:3": 6 + NUM_LAST, "ssp:10": 20 + NUM_LAST}
NUM_SLICED = 8
RUNS = [
    (policy, slices, CLOCKS_ALONE[policy] if slices == 1 else NUM_SLICED)
    for policy in CLOCKS_ALONE
    for slices in (1, SLICES)
]
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Ideal:
    """What a clock of all workers takes, in seconds."""

    of_straggler_s: float
    of_sum_s: float

    @staticmethod
    def of(sample_s: float) -> "Ideal":
        """Return it when a sample takes so long."""
        return Ideal(2 * BATCH_SIZE * sample_s, NUM_WORKERS * BATCH_SIZE * sample_s / SUM_OF_SPEEDS)


def measure(rounds: int, sample_ms: float) -> list[dict[str, Any]]:
    """Run the job; return what each worker found in each run."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(NUM_WORKERS), "-m", "1", "--quiet", "--no-progress"]
    command += [str(HERE / "reassignment_worker.py"), "--rounds", str(rounds), "--runs", json.dumps(RUNS)]
    command += ["--sample-ms", str(sample_ms)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    found = [json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or not found:
        raise SystemExit(f"the run failed:\n{done.stdout}")
    return found


def runs_of(found: list[dict[str, Any]], policy: str, slices: int) -> list[dict[str, Any]]:
    """Return what the workers found in the runs of a policy."""
    return [run for run in found if run["policy"] == policy and run["slices"] == slices]


def title(policy: str, slices: int) -> str:
    """Return what a run is called."""
    return f"{policy} alone" if slices == 1 else f"{policy} with slices"


def last_clock_s(run: dict[str, Any]) -> float:
    """Return what each of the last clocks took: by then every bound has been met."""
    ends = run["ends"]
    return (ends[-1] - ends[-1 - NUM_LAST]) / NUM_LAST


def median_clocks(runs: list[dict[str, Any]]) -> list[float]:
    """Return what each clock took of worker 0, the median over the rounds."""
    rounds = [[later - sooner for sooner, later in pairwise([0.0, *run["ends"]])] for run in runs if run["rank"] == 0]
    return [median(clocks) for clocks in zip(*rounds, strict=True)]


def summed_up(found: list[dict[str, Any]], ideal: Ideal) -> dict[str, dict[str, float]]:
    """Return the medians over the rounds, policy by policy, alone and with slices."""
    results: dict[str, dict[str, float]] = {}
    for policy, slices, clocks in RUNS:
        runs = runs_of(found, policy, slices)
        clock_s = median(run["seconds"] for run in runs if run["rank"] == 0) / clocks
        last_s = median(last_clock_s(run) for run in runs if run["rank"] == 0)
        of_straggler = median(run["samples"] for run in runs if run["rank"] == STRAGGLER)
        results[title(policy, slices)] = {
            "clock_ms": 1000 * clock_s,
            "over_sum_of_speeds": clock_s / ideal.of_sum_s,
            "last_clock_ms_of_a_fast_worker": 1000 * last_s,
            "last_over_straggler": last_s / ideal.of_straggler_s,
            "straggler_share": of_straggler / (BATCH_SIZE * NUM_WORKERS * clocks),
            "ask_ms": median(run["ask_ms"] for run in runs),
        }
    return results


def draw(found: list[dict[str, Any]], ideal: Ideal, path: Path) -> None:
    """Draw what the clocks of a fast worker took, one by one, and what a clock of all took in the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=140, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(CLOCKS_ALONE, ("#0072B2", "#009E73", "#D55E00"), strict=True))
    for policy, slices, _ in RUNS:
        lasted_ms = [1000 * clock_s for clock_s in median_clocks(runs_of(found, policy, slices))]
        style = "--" if slices == 1 else "-"
        left.plot(range(len(lasted_ms)), lasted_ms, style, color=colours[policy], label=title(policy, slices))
    left.set_title("What each clock took of a fast worker", loc="left")
    left.set_xlabel("clock")
    left.set_ylabel("ms")
    left.set_ylim(0, 1250 * ideal.of_straggler_s)
    left.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    results = summed_up(found, ideal)
    for name, one in results.items():
        paleness = 1.0 if name.endswith("slices") else 0.45
        right.barh(name, one["clock_ms"], color=colours[name.partition(" ")[0]], alpha=paleness, height=0.6)
    for value, text in ((ideal.of_sum_s, "sum of speeds"), (ideal.of_straggler_s, "straggler's own batch")):
        right.axvline(1000 * value, color="#222222", linewidth=0.8)
        right.text(1000 * value, -0.7, f"{text} ", ha="right", va="center", fontsize=8)
    right.set_ylim(len(results) - 0.4, -1.0)
    right.set_xlabel("ms a clock of all four workers")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sample-ms", type=float, default=5.0)
    parser.add_argument("--picture", type=Path, help="draw into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    progress(machine())
    ideal = Ideal.of(options.sample_ms / 1000)
    found = measure(options.rounds, options.sample_ms)
    results = summed_up(found, ideal)
    print(f"one clock of all: {1000 * ideal.of_sum_s:.0f} ms at the sum of speeds, ", end="")
    print(f"{1000 * ideal.of_straggler_s:.0f} ms at the speed of the straggler")
    for name, one in results.items():
        print(
            f"{name:20} {one['clock_ms']:6.1f} ms a clock, {one['over_sum_of_speeds']:.2f} x the sum of speeds; "
            f"at the end {one['last_clock_ms_of_a_fast_worker']:6.1f} ms; straggler {one['straggler_share']:.0%} of "
            f"samples; {one['ask_ms']:.2f} ms to ask"
        )
    if options.picture:
        draw(found, ideal, options.picture)
    if options.json:
        print_json({"name": "reassignment", "rounds": options.rounds, "machine": machine(), "runs": results})


if __name__ == "__main__":
    main()
