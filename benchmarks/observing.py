"""What being seen costs a step: `python benchmarks/observing.py [--pairs 10] [--steps 300] [--json]`.

Two jobs take turns, which differ in nothing else: one reports three values a step, has a tracker (TensorBoard) and is
scraped by Prometheus; the other one does nothing of that. Told is what a step takes of a worker's processor and of
time, and the difference in percent: the median of the pairs, and between which numbers the middle half of them lies.
The exporter is a process of its own, whose processor time is not a worker's: on a machine with as many workers as cores
it shows in the wall time.
"""

import json as json_text
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress

WORKER: Final = Path(__file__).with_name("observing_worker.py")
NUM_WORKERS: Final = 2
TIMEOUT_S: Final = 1800.0

app = App(help_format="plaintext")


def run_job(num_steps: int, seen: Literal["on", "off"]) -> dict[str, float]:
    """Run one job; return the mean over its workers of what a step takes, in seconds."""
    with tempfile.TemporaryDirectory(prefix="paceline-observing-") as folder:
        asked = ("--log", f"tensorboard:{folder}/curves", "--metrics", "0") if seen == "on" else ()
        command = [sys.executable, "-m", "paceline", "run", "--quiet", "--no-progress", "-n", str(NUM_WORKERS), *asked]
        subprocess.run([*command, str(WORKER), str(num_steps), seen, folder], check=True, timeout=TIMEOUT_S)
        took = [json_text.loads(path.read_text()) for path in sorted(Path(folder).glob("worker-*.json"))]
    return {name: fmean(each[name] for each in took) for name in ("cpu_s", "wall_s")}


@app.default
def main(*, pairs: int = 10, steps: int = 300, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Compare jobs that are seen with jobs that are not, in turns.

    Parameters
    ----------
    pairs
        How many of each.
    steps
        How many steps a job takes after its first twenty.
    json
        The numbers as one line of JSON.
    """
    excess: dict[str, list[float]] = {"cpu_s": [], "wall_s": []}
    for number in range(pairs):
        order: list[Literal["on", "off"]] = ["on", "off"] if number % 2 else ["off", "on"]
        took = {seen: run_job(steps, seen) for seen in order}
        for name, percents in excess.items():
            percents.append(100 * (took["on"][name] / took["off"][name] - 1))
        progress(f"pair {number + 1} of {pairs}: {excess['cpu_s'][-1]:+.2f} % of processor time")
    found = {name: Sample.of(percents) for name, percents in excess.items()}
    print(machine())
    print(f"processor time of a step: {found['cpu_s'].text(' %', 2)} more with all of it on")
    print(f"wall time of a step: {found['wall_s'].text(' %', 2)} more")
    if json:
        print_json({f"{name.removesuffix('_s')}_percent": sample.median for name, sample in found.items()})


if __name__ == "__main__":
    app()
