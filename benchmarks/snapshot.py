"""What a snapshot costs while training goes on: `python benchmarks/snapshot.py [--million 16] [--json]`.

One worker and one server (`paceline run`) alternate quiet rounds with rounds in which a snapshot is written; then the
same model under plain torch, with `async_save` of torch.distributed.checkpoint in the place of the snapshot. The pause
is how much longer than the median of the quiet steps the slowest of 1000 steps is, the call that begins it included;
slowdown compares means; memory is what all processes of the job have more at most, as part of values and state; the
disk is what `dd oflag=direct` writes in the same folder.

`--rows MILLION` measures a table of so many rows of 16 numbers under Adagrad instead: bytes and seconds of a snapshot
after `--percent` of them have changed, beside those of one with all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from measuring import machine, print_json

WORKER: Final = Path(__file__).with_name("snapshot_worker.py")
ROWS_WORKER: Final = Path(__file__).with_name("snapshot_rows_worker.py")
DISK_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """What snapshots have cost."""

    pause_p999_ms: float
    slowdown: float
    memory_ratio: float
    bytes_per_s: float


def cost_of(found: dict[str, Any]) -> Cost:
    """Compare the steps with and without a snapshot."""
    usual, busy = statistics.median(found["quiet"]), sorted(found["busy"])
    worst = busy[min(len(busy) - 1, int(0.999 * len(busy)))]
    return Cost(
        1e3 * max(0.0, worst - usual),
        statistics.mean(busy) / statistics.mean(found["quiet"]) - 1,
        max(found["extra"]) / found["state_bytes"],
        found["state_bytes"] / statistics.median(found["took"]),
    )


def run(side: str, folder: Path, asked: argparse.Namespace) -> Cost:
    """Run one side to its end."""
    out = folder / f"{side}.json"
    words = [str(WORKER), side, str(folder), str(out), str(asked.million), str(asked.steps), str(asked.rounds)]
    launcher = ["-m", "paceline", "run", "--workers", "1", "--quiet", "--no-progress"] if side == "ours" else []
    variables = {name: value for name, value in os.environ.items() if name != "PACELINE_LAUNCHER_PID"}
    subprocess.run([sys.executable, *launcher, *words], check=True, env=variables, stdout=sys.stderr)
    return cost_of(json.loads(out.read_text()))


def measure_rows(folder: Path, asked: argparse.Namespace) -> dict[str, object]:
    """Measure snapshots of a table of rows of which few change."""
    out = folder / "rows.json"
    words = [str(ROWS_WORKER), str(out), str(asked.rows), str(asked.percent), str(asked.rounds)]
    options = ["--workers", "1", "--quiet", "--no-progress", "--snapshots", str(folder / "rows")]
    command = [sys.executable, "-m", "paceline", "run", *options, "--snapshot-every", "1h", *words]
    variables = {name: value for name, value in os.environ.items() if name != "PACELINE_LAUNCHER_PID"}
    subprocess.run(command, check=True, env=variables, stdout=sys.stderr)
    found = json.loads(out.read_text())
    whole, *changed = found["snapshots"]
    median_bytes = statistics.median(each["bytes"] for each in changed)
    return {
        "name": f"snapshot of {asked.rows:g} M rows of which {asked.percent:g} % have changed",
        "whole_mb": whole["bytes"] / 1e6,
        "changed_mb": median_bytes / 1e6,
        "of_touched": median_bytes / found["touched_bytes"],
        "of_whole": median_bytes / whole["bytes"],
        "whole_s": whole["seconds"],
        "changed_s": statistics.median(each["seconds"] for each in changed),
        "all_are_changes": float(not any(each["is_whole"] for each in changed)),
    }


def disk_bytes_per_s(folder: Path) -> float:
    """Return what the disk takes."""
    target = folder / "dd"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=4M", f"count={DISK_BYTES >> 22}", "oflag=direct", "conv=fsync"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stderr
    target.unlink()
    return DISK_BYTES / float(said.rpartition("copied, ")[2].partition(" s")[0])


def main() -> None:
    """Measure both sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", type=int, default=16, help="parameters")
    parser.add_argument("--steps", type=int, default=40, help="of a quiet round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--rows", type=float, default=0.0, help="million rows of a table, in the place of parameters")
    parser.add_argument("--percent", type=float, default=1.0, help="of the rows, which change between two snapshots")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    if asked.rows:
        try:
            print_found(measure_rows(folder, asked), asked)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        disk = disk_bytes_per_s(folder)
        ours, theirs = run("ours", folder, asked), run("dcp", folder, asked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, object] = {
        "name": f"snapshot of {asked.million} M parameters with Adam",
        "pause_p999_ms": ours.pause_p999_ms,
        "slowdown": ours.slowdown,
        "memory_ratio": ours.memory_ratio,
        "disk_fraction": ours.bytes_per_s / disk,
        "dcp_pause_ms": theirs.pause_p999_ms,
        "dcp_slowdown": theirs.slowdown,
    }
    if not asked.json:
        found |= {"dcp_memory_ratio": theirs.memory_ratio, "dcp_disk_fraction": theirs.bytes_per_s / disk}
    print_found(found, asked)


def print_found(found: dict[str, object], asked: argparse.Namespace) -> None:
    """Print what was measured."""
    if asked.json:
        print_json(found)
        return
    print(machine())
    for name, value in found.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
