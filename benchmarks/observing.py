"""What being seen costs a step: `python benchmarks/observing.py [--pauses-ms 0,5,20] [--pairs 40] [--json]`.

One job takes blocks of steps by turns with all of it on and with all of it off: records of workers and servers, three
values that a script reports, and a process beside it that gives them to TensorBoard and Prometheus. Two workers and a
server are threads of one process, so that nothing of either is left out, and the two blocks of a pair see the same
machine. A step costs the processor little and pauses for a while: what is added shows in microseconds, and a part of
it, writing to files every 20 ms, depends on how long a step is.

Told is what a step of a worker takes more of processor time, with its share of the server: the median of the pairs,
and between which numbers the middle half of them lies; what percentage of the step's duration that is; and what the
exporter's process takes of a core while it follows (it has a low priority, and is not in a step).
"""

import json as json_text
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Final

from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress

WORKER: Final = Path(__file__).with_name("observing_worker.py")
NUM_WORKERS: Final = 2
TIMEOUT_S: Final = 1800.0
BLOCK_S: Final = 0.4  # about, of pauses
MOST_STEPS: Final = 200  # of a block

app = App(help_format="plaintext")


def run_job(pause_s: float, num_pairs: int) -> dict[str, object]:
    """Run a job whose steps pause for so long; return what recording adds."""
    num_steps = min(MOST_STEPS, max(1, int(BLOCK_S / pause_s))) if pause_s else MOST_STEPS
    with tempfile.TemporaryDirectory(prefix="paceline-observing-") as folder:
        command = [sys.executable, "-m", "paceline", "run", "--quiet", "--no-progress", "-n", str(NUM_WORKERS)]
        command += ["--transport", "memory", "--log", f"tensorboard:{folder}/curves", "--metrics", "0"]
        command += [str(WORKER), str(pause_s), str(num_steps), str(num_pairs), folder]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        found = json_text.loads((Path(folder) / "took.json").read_text())
    blocks = [(is_on, *took) for is_on, took in zip(found["orders"], found["took"], strict=True)]
    each_us = [
        1e6 * sum(cpu_s if is_on else -cpu_s for is_on, cpu_s, _ in pair) / num_steps / NUM_WORKERS
        for pair in zip(blocks[::2], blocks[1::2], strict=True)
    ]
    added = Sample.of(each_us)
    step_us = median(1e6 * wall_s / num_steps for is_on, _, wall_s in blocks if not is_on)
    cpu_us = median(1e6 * cpu_s / num_steps / NUM_WORKERS for is_on, cpu_s, _ in blocks if not is_on)
    exporter_share = found["exporter_s"] / sum(wall_s for _, _, wall_s in blocks)
    print(
        f"a step of {step_us / 1000:.1f} ms: {added.text(' us', 1)} more of processor time, "
        f"{100 * added.median / step_us:.2f} % ({100 * added.low / step_us:.2f} to {100 * added.high / step_us:.2f}); "
        f"the exporter {100 * exporter_share:.1f} % of a core",
        flush=True,
    )
    return {
        "step_ms": step_us / 1000,
        "cpu_us": cpu_us,
        "added_us": added.median,
        "added_us_spread": [added.low, added.high],
        "percent_of_step": 100 * added.median / step_us,
        "exporter_percent_of_core": 100 * exporter_share,
    }


@app.default
def main(*, pauses_ms: str = "0,5,20", pairs: int = 40, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Compare steps that are recorded with steps that are not, in turns, in one job.

    Parameters
    ----------
    pauses_ms
        For how long steps pause, by commas; each is a job.
    pairs
        Of blocks, one with recording and one without.
    json
        The numbers as one line of JSON.
    """
    progress(machine())
    results = {f"pause_{pause_ms}_ms": run_job(float(pause_ms) / 1000, pairs) for pause_ms in pauses_ms.split(",")}
    if json:
        print_json({"name": "observing", **results})


if __name__ == "__main__":
    app()
