"""How near the simulator comes to real runs: seconds of a clock, and ages of what is read, for every policy.

    python benchmarks/simulate.py [--workers 2 4 8] [--seeds 0 1 2] [--clocks 100] [--picture FILE] [--json]

Workers sleep for as long as the simulator's workers compute: 50 ms within a tenth, and four times as long in a tenth of
the clocks, drawn by the same seeds. A sleep on a busy machine takes longer than asked, and so does a message: what a
worker computes and a message takes is therefore rehearsed as it was recorded (`paceline.tools.advise.recorded`).
Printed: seconds of a clock, real and rehearsed, and the total variation between the ages of what was read: half the sum
of the differences of all bars of the two histograms. And what each run says of the others of its seed: what a clock
takes under another policy, as `paceline advise` finds it, beside the real run under that.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from measuring import machine, print_json, progress

from paceline.core.consistency import Consistency
from paceline.observe.runs import read_run
from paceline.tools.advise.command import advise_on
from paceline.tools.advise.recorded import RecordedRun, read_recorded

WORKER = Path(__file__).with_name("simulate_worker.py")
POLICIES = ("bsp", "ssp:3", "ssp:3 lazy", "essp:3", "asynchronous", "backup:1")
TIMEOUT_S = 600.0


def run_job(policy: str, num_workers: int, seed: int, options: argparse.Namespace, folder: Path) -> RecordedRun:
    """Run one job, and read its trace."""
    name, _, lazy = policy.partition(" ")
    command = [sys.executable, "-m", "paceline", "run", "-n", str(num_workers), "-m", "1", "--consistency", name]
    command += ["--quiet", "--no-progress", "--run-dir", str(folder), str(WORKER), "--clocks", str(options.clocks)]
    command += ["--seed", str(seed), "--stragglers", options.stragglers, "--compute-ms", str(options.compute_ms)]
    command += ["--fetch-every", "0"] if lazy else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the run under {policy} failed:\n{done.stdout}{done.stderr}")
    return read_recorded(folder)


def ages(folder: Path) -> Counter[int]:
    """Count the reads of a run by clock differential, without the first clock, which is not rehearsed."""
    return Counter(min(-1, read.differential) for read in read_run(folder).reads if read.clock > 0)


def total_variation(one: Counter[int], other: Counter[int]) -> float:
    """Return half the sum of the differences between the shares of two histograms."""
    return sum(abs(one[age] / one.total() - other[age] / other.total()) for age in one | other) / 2


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Run and rehearse every policy with every number of workers and seed."""
    rows: list[dict[str, object]] = []
    for num_workers in options.workers:
        for seed in options.seeds:
            recorded: dict[str, RecordedRun] = {}
            for policy in options.policies:
                with TemporaryDirectory() as folder:
                    run = Path(folder) / "run"
                    found = recorded[policy] = run_job(policy, num_workers, seed, options, run)
                    real = ages(run)
                rehearsed = Counter(found.rehearsed.differentials)
                row: dict[str, object] = {
                    "workers": num_workers,
                    "seed": seed,
                    "policy": policy,
                    "clock_ms": found.clock_s * 1e3,
                    "rehearsed_ms": found.rehearsed_clock_s * 1e3,
                    "error": found.error,
                    "total_variation": total_variation(real, rehearsed),
                    "ages": dict(sorted(real.items())),
                    "rehearsed_ages": dict(sorted(rehearsed.items())),
                }
                rows.append(row)
                progress(
                    f"{num_workers} workers, seed {seed}, {policy}: {found.error:+.1%}, {row['total_variation']:.2f}"
                )
            rows += advised(num_workers, seed, recorded)
    return rows


def advised(num_workers: int, seed: int, recorded: dict[str, RecordedRun]) -> list[dict[str, object]]:
    """Return what each run says of the others, beside what these took."""
    strict = {policy: found for policy, found in recorded.items() if "lazy" not in policy and "backup" not in policy}
    return [
        {
            "workers": num_workers,
            "seed": seed,
            "policy": other,
            "advised_from": policy,
            "clock_ms": real.clock_s * 1e3,
            "rehearsed_ms": (said := advise_on(found, Consistency.parse(other)).clock_s) * 1e3,
            "error": said / real.clock_s - 1,
        }
        for policy, found in strict.items()
        for other, real in strict.items()
        if other != policy
    ]


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Draw the histograms of the first seed, real beside rehearsed, a row for each number of workers."""
    from paceline.observe.plots import INK, POLICY_COLOURS, new_figure, quiet

    runs = [row for row in rows if "ages" in row and row["seed"] == rows[0]["seed"]]
    counts = sorted({int(str(row["workers"])) for row in runs})
    policies = list(dict.fromkeys(str(row["policy"]) for row in runs))
    figure = new_figure(2.6 * len(policies), 2.7 * len(counts))
    grid = figure.subplots(len(counts), len(policies), squeeze=False, sharey=True)
    for row in runs:
        axes = grid[counts.index(int(str(row["workers"])))][policies.index(str(row["policy"]))]
        colour = POLICY_COLOURS[policies.index(str(row["policy"])) % len(POLICY_COLOURS)]
        for shift, key, shade in ((-0.2, "ages", colour), (0.2, "rehearsed_ages", "#bbbbbb")):
            found = Counter({max(-9, int(age)): 0 for age in row[key]})  # type: ignore[union-attr, attr-defined]
            for age, number in row[key].items():  # type: ignore[union-attr, attr-defined]
                found[max(-9, int(age))] += number
            axes.bar(
                [age + shift for age in found], [each / found.total() for each in found.values()], 0.4, color=shade
            )
        axes.set_title(f"{row['policy']}, P = {row['workers']}", fontsize=9, color=INK)
        axes.text(
            0.03, 0.96,
            f"{row['clock_ms']:.0f} ms, rehearsed {row['rehearsed_ms']:.0f}\nTV {row['total_variation']:.2f}",
            transform=axes.transAxes, va="top", fontsize=7.5, color=INK,
        )  # fmt: skip
        axes.set_ylim(0, 1.25)
        axes.set_xlim(-9.6, -0.4)
        axes.set_xticks([-9, -7, -5, -3, -1], ["≤-9", "-7", "-5", "-3", "-1"])
        quiet(axes, grid="y")
    for axes in grid[-1]:
        axes.set_xlabel("clock differential", fontsize=8, color=INK)
    for line in grid:
        line[0].set_ylabel("share of reads", fontsize=8, color=INK)
    figure.suptitle("Coloured: real runs. Grey: rehearsed on their delays.", fontsize=11, color=INK)
    figure.savefig(path, format="png", dpi=110, facecolor="white")


def summary(rows: list[dict[str, object]]) -> dict[str, float]:
    """Return the worst and the median errors."""
    own = [row for row in rows if "ages" in row]
    others = [row for row in rows if "advised_from" in row]
    errors, distances = (
        [abs(float(str(row["error"]))) for row in own],
        [float(str(row["total_variation"])) for row in own],
    )
    found = {
        "worst_error": max(errors),
        "median_error": median(errors),
        "worst_total_variation": max(distances),
        "median_total_variation": median(distances),
    }
    if others:
        wrong = [abs(float(str(row["error"]))) for row in others]
        found |= {
            "worst_advice_error": max(wrong),
            "median_advice_error": median(wrong),
            "advice_within_15_percent": fmean(error <= 0.15 for error in wrong),
        }
    return found


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--clocks", type=int, default=100)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--stragglers", default="transient:0.1:4")
    parser.add_argument("--picture", type=Path, help="draw the histograms to this file")
    parser.add_argument("--rows", type=Path, help="write all numbers to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    rows = measure(options)
    print(f"{machine()}; {options.clocks} clocks of {options.compute_ms:g} ms, {options.stragglers}")
    print("workers  policy           ms a clock  rehearsed   error  total variation   (medians over seeds)")
    for num_workers in options.workers:
        for policy in options.policies:
            own = [row for row in rows if "ages" in row and (row["workers"], row["policy"]) == (num_workers, policy)]
            middle = {
                key: median(float(str(row[key])) for row in own)
                for key in ("clock_ms", "rehearsed_ms", "error", "total_variation")
            }
            print(
                f"{num_workers:7}  {policy:15} {middle['clock_ms']:11.1f} {middle['rehearsed_ms']:10.1f} "
                f"{middle['error']:+7.1%} {middle['total_variation']:16.3f}"
            )
    found = summary(rows)
    print(", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in found.items()))
    if options.picture:
        draw(rows, options.picture)
    if options.rows:
        options.rows.write_text(json.dumps(rows))
    if options.json:
        print_json({"name": "simulate", **found})


if __name__ == "__main__":
    main()
