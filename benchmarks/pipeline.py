"""How long the stages of a pipeline stand idle, and what they keep for backward: GPipe and 1F1B at two stages.

    python benchmarks/pipeline.py [--steps 2] [--sample-ms 6] [--json]

Each stage is a process whose layer sleeps for each sample, forward and twice as long backward, so that two stages fit
on few cores beside others. The bubble is the share of the time in which a stage is not at work, of K stages with M
micro-batches (K - 1) / (M + K - 1). What is kept is the memory of all tensors that the graph saves for backward at
once, without parameters.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from measuring import machine, print_json, progress

HERE = Path(__file__).resolve().parent
NUM_STAGES = 2
MICRO_BATCHES = (1, 2, 4, 8)
TIMEOUT_S = 300.0


def measure(steps: int, sample_ms: float) -> list[dict[str, Any]]:
    """Run the stages; return what each found for each schedule and number of micro-batches."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(NUM_STAGES), "--quiet", "--no-progress"]
    command += [str(HERE / "pipeline_worker.py"), "--micro-batches", json.dumps(MICRO_BATCHES)]
    command += ["--steps", str(steps), "--sample-ms", str(sample_ms)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    found = [json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or not found:
        raise SystemExit(f"the run failed:\n{done.stdout}")
    return found


def predicted(num: int) -> float:
    """Return the share of idle time that the schedule makes unavoidable."""
    return (NUM_STAGES - 1) / (num + NUM_STAGES - 1)


def summed_up(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the bubble and what the first stage keeps, for each schedule and number of micro-batches."""
    results: dict[str, dict[str, float]] = {}
    for schedule in ("gpipe", "1f1b"):
        for num in MICRO_BATCHES:
            runs = [run for run in found if run["schedule"] == schedule and run["micro_batches"] == num]
            if not runs:
                continue
            step_s = max(run["step_s"] for run in runs)
            results[f"{schedule}, {num} micro-batches"] = {
                "predicted_bubble_percent": 100 * predicted(num),
                "bubble_percent": 100 * (1 - mean(run["busy_s"] for run in runs) / step_s),
                "step_ms": 1000 * step_s,
                "kept_kib_first_stage": max(run["kept_bytes"] for run in runs if run["rank"] == 0) / 1024,
                "kept_kib_last_stage": max(run["kept_bytes"] for run in runs if run["rank"] == NUM_STAGES - 1) / 1024,
            }
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--sample-ms", type=float, default=6.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    progress(machine())
    results = summed_up(measure(options.steps, options.sample_ms))
    for name, one in results.items():
        print(
            f"{name:24} bubble {one['bubble_percent']:4.1f} % ({one['predicted_bubble_percent']:4.1f} % predicted), "
            f"{one['step_ms']:6.1f} ms a step, keeps {one['kept_kib_first_stage']:5.1f} KiB on the first stage, "
            f"{one['kept_kib_last_stage']:5.1f} KiB on the last"
        )
    if options.json:
        print_json({"name": "pipeline", "machine": machine(), "sleeps": True, "runs": results})


if __name__ == "__main__":
    main()
