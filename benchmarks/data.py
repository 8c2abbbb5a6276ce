"""What data servers bring and cost: samples in memory, samples that have to be decoded, and workers of two speeds.

    python benchmarks/data.py [--rounds 5] [--json]

All on one host, over shared memory:

- In memory: one worker reads arrays epoch by epoch, in turns from a DataLoader of torch over the same arrays in its own
  memory and from one data server; samples a second, and their ratio.
- Decoding: records are unpacked and normalised where they are read; a step is a sleep, as if a device computed. In the
  loop, in processes of a DataLoader, and on one or two data servers, in turns.
- Two speeds: two workers, one of which takes twice as long for every sample (a sleep); what an epoch takes over what
  the sum of speeds allows, with fixed parts and with leases.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy
from data_worker import DECODE_BATCH, MEMORY_BATCH, PACED_BATCH, PACED_SLICES
from measuring import Sample, machine, print_json, progress

WORKER = Path(__file__).resolve().with_name("data_worker.py")
NUM_IMAGES = 20_000
NUM_PACKED = 1024
STEP_MS = 12.0
SAMPLE_MS = 8.0
NUM_CLOCKS = 6
SUM_OF_SPEEDS = 1.5
TIMEOUT_S = 600.0
FED = "on data servers"
LOCALLY = ("in the loop", "in 1 process of a DataLoader", "in 2 processes of a DataLoader")


def job(num_workers: int, num_data_servers: int, *told: str) -> list[dict[str, Any]]:
    """Run the worker's script as a job; return what its workers found."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(num_workers), "-m", "1", "--quiet", "--no-progress"]
    command += ["--data-servers", str(num_data_servers), str(WORKER), *told]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    found = [json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or not found:
        raise SystemExit(f"the run failed:\n{done.stdout}")
    return found


def in_memory(rounds: int) -> dict[str, Any]:
    """Compare arrays in the worker's memory with those of a data server, by samples a second."""
    with tempfile.TemporaryDirectory() as folder:
        generator = numpy.random.default_rng(0)
        numpy.save(f"{folder}/images.npy", generator.random((NUM_IMAGES, 784), dtype=numpy.float32))
        numpy.save(f"{folder}/labels.npy", generator.integers(0, 10, NUM_IMAGES))
        found = job(1, 1, "in-memory", "--rounds", str(rounds), "--folder", folder)
    speeds = {
        way: [one["samples_per_s"] for one in found if one["way"] == way] for way in ("DataLoader", "data server")
    }
    ratios = [fed / local for fed, local in zip(speeds["data server"], speeds["DataLoader"], strict=True)]
    print(f"in memory, batches of {MEMORY_BATCH} x 784 float32:")
    for way, each in speeds.items():
        print(f"  {way:12} {Sample.of(each).text(digits=0)} samples/s")
    print(f"  ratio        {Sample.of(ratios).text(digits=2)}")
    return {"ratio": median(ratios), **{f"{way} samples/s": median(each) for way, each in speeds.items()}}


def decoding(rounds: int) -> dict[str, dict[str, float]]:
    """Compare where records are decoded, by what a step takes and what the loop waits and works for its batch."""
    told = ("decoding", "--rounds", str(rounds), "--samples", str(NUM_PACKED), "--ms", str(STEP_MS), "--ways")
    found = {
        **{way: job(1, 0, *told, way) for way in LOCALLY},
        **{f"{FED}: {number}": job(1, number, *told, FED) for number in (1, 2)},
    }
    results = {
        way: {name: median(one[name] for one in runs) for name in ("step_ms", "wait_ms", "cpu_ms")}
        for way, runs in found.items()
    }
    print(f"decoding {DECODE_BATCH} records a step, of which {STEP_MS:g} ms are computing:")
    for way, one in results.items():
        print(
            f"  {way:32} {one['step_ms']:5.1f} ms a step, waits {one['wait_ms']:5.2f} ms for its batch, "
            f"{one['cpu_ms']:5.2f} ms of the loop's own CPU"
        )
    return results


def two_speeds(rounds: int) -> dict[str, dict[str, float]]:
    """Compare what an epoch takes of a worker and one at half its speed with what the sum of speeds allows."""
    told = ("paced", "--rounds", str(rounds), "--clocks", str(NUM_CLOCKS), "--ms", str(SAMPLE_MS))
    found = job(2, 1, *told)
    ideal_s = 2 * PACED_BATCH * NUM_CLOCKS * SAMPLE_MS / 1000 / SUM_OF_SPEEDS
    results: dict[str, dict[str, float]] = {}
    print(f"two workers, one at half speed, {PACED_SLICES} slices a batch; 1 is an epoch at the sum of speeds:")
    for way in ("fixed parts", "leases"):
        runs = [one for one in found if one["way"] == way]
        over = median(one["seconds"] for one in runs) / ideal_s
        of_slow = median(one["samples"] for one in runs if one["rank"] == 1) / (2 * PACED_BATCH * NUM_CLOCKS)
        results[way] = {"over_sum_of_speeds": over, "slow_share": of_slow}
        print(f"  {way:12} {over:.2f}, {of_slow:.0%} of the samples by the slow one")
    return results


def main() -> None:
    """Measure all three and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    progress(machine())
    memory = in_memory(options.rounds)
    decoded = decoding(options.rounds)
    speeds = two_speeds(options.rounds)
    if options.json:
        told = {"name": "data", "rounds": options.rounds, "machine": machine()}
        print_json({**told, **memory, "decoding": decoded, "two_speeds": speeds})


if __name__ == "__main__":
    main()
