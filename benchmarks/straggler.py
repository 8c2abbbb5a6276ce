"""What one transiently slow worker costs bsp, ssp(3) and asynchronous: seconds for the same number of clocks.

    python benchmarks/straggler.py [--rounds 5] [--clocks 100] [--json]

Four workers, two servers; computing is a sleep of 20 ms a clock, and worker 1 takes 60 ms in a quarter of its clocks
and 10 ms in the others. The policies take turns, round by round.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

WORKER = Path(__file__).with_name("paced_worker.py")
POLICIES = ("bsp", "ssp:3", "asynchronous")
TIMEOUT_S = 300.0


def seconds(policy: str, clocks: int) -> float:
    """Run one job and return the seconds between its first and its last clock."""
    command = [sys.executable, "-m", "paceline", "run", "-n", "4", "-m", "2", "--consistency", policy, "--quiet"]
    command += ["--no-progress", str(WORKER), "--clocks", str(clocks), "--compute-ms", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    found = re.search(r"seconds ([\d.]+)", done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"the run under {policy} failed:\n{done.stdout}{done.stderr}")
    return float(found[1])


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clocks", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for number in range(options.rounds):
        for policy, own in times.items():
            own.append(seconds(policy, options.clocks))
            print(f"round {number + 1}: {policy:12} {own[-1]:6.2f} s", file=sys.stderr)
    medians = {policy: median(own) for policy, own in times.items()}
    for policy, own in times.items():
        print(f"{policy:12} median {medians[policy]:.2f} s, {min(own):.2f} to {max(own):.2f} s of {len(own)} rounds")
    if options.json:
        result = {"name": "straggler", "clocks": options.clocks, "rounds": options.rounds}
        result |= {f"{policy.partition(':')[0]}_s": round(value, 3) for policy, value in medians.items()}
        print(json.dumps(result | {"bsp_over_ssp": round(medians["bsp"] / medians["ssp:3"], 3)}))


if __name__ == "__main__":
    main()
