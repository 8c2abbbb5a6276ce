"""What a worker sends in a step when layers are split, or slices kept, beside what the formulas say.

    python benchmarks/split_bytes.py [--workers 2 4] [--json]

Four transformer blocks of width 256 under tensor:N, fsdp and all-reduce. The kernel counts the bytes of the connections
between workers. A sum over n workers as a ring sends 2 (n-1)/n times the tensor, gathering or scattering (n-1)/n times.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import machine, print_json, progress

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 120.0
SUMS_PER_BLOCK = 4  # two forward and two backward


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes that a worker sent in a step, and that it should have sent."""

    strategy: str
    num_workers: int
    sent_bytes: float
    expected_bytes: float


def expected_bytes(strategy: str, num_workers: int, found: dict[str, Any]) -> float:
    """Return what the formula of a strategy says."""
    share = (num_workers - 1) / num_workers
    match strategy:
        case "fsdp":
            return 3 * share * found["weights_bytes"]
        case "all-reduce":
            return 2 * share * found["weights_bytes"]
        case _:
            return 2 * share * SUMS_PER_BLOCK * found["num_blocks"] * found["activation_bytes"]


def measure(strategy: str, num_workers: int) -> Row:
    """Run one job."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(num_workers), "-m", "1", "--quiet", "--no-progress"]
    command += ["--strategy", strategy, str(HERE / "split_bytes_worker.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or not lines:
        raise SystemExit(f"the run failed:\n{done.stdout}")
    found = json.loads(lines[0])
    return Row(strategy, num_workers, found["sent_bytes"], expected_bytes(strategy, num_workers, found))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for num_workers in options.workers:
        for strategy in (f"tensor:{num_workers}", "fsdp", "all-reduce"):
            progress(f"{strategy} on {num_workers} workers")
            rows.append(measure(strategy, num_workers))
    if options.json:
        print_json(
            {"machine": machine(), "rows": [{name: getattr(row, name) for name in Row.__slots__} for row in rows]}
        )
        return
    print("| strategy | workers | sent a step | formula | sent / formula |\n|---|---|---|---|---|")
    for row in rows:
        sent, expected = row.sent_bytes / 1e6, row.expected_bytes / 1e6
        print(f"| {row.strategy} | {row.num_workers} | {sent:.2f} MB | {expected:.2f} MB | {sent / expected:.3f} |")


if __name__ == "__main__":
    main()
