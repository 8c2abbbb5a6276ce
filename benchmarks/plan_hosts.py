"""What `paceline plan` says of the seconds of a step over lines of limited rate, beside steps that take them.

    python benchmarks/plan_hosts.py [--megabytes 10] [--mbps 100] [--picture FILE] [--json]

Four workers, each on a host in a network namespace of its own: a ring over Gloo, one to four servers alone on hosts,
or a server beside every worker and up to three alone; the kernel limits what each line carries each way. Workers take
plain steps of momentum SGD in float32 with `paceline.distributed`; over the ring they only add up the gradients. A
planned step is what the plan's command says of communication, and the time in which a worker computes in these steps.
Needs root, and `ip` and `tc` (iproute2).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hosted_job import HostedJob, JobFailedError, hosted_spec
from measuring import machine, print_json, progress
from shaped_network import CannotShapeError, Line, ShapedNetwork

from paceline.tools.plan.estimate import server_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORKER: Final = Path(__file__).resolve().with_name("hosts_worker.py")
TIMEOUT_S: Final = 400.0
START_S: Final = 200.0
NUM_WORKERS: Final = 4
RING: Final = "all-reduce"
STRATEGIES: Final = (
    RING,
    *(f"parameter-server:{number}" for number in (1, 2, 3, 4)),
    *(f"colocated-server:{number}" for number in (0, 1, 2, 3)),
)


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of a step under one strategy, planned and measured."""

    strategy: str
    planned_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """By what share the plan is too slow (above 0) or too fast."""
        return self.planned_s / self.measured_s - 1


def communication_s(strategy: str, options: argparse.Namespace) -> float:
    """Return the seconds of a step in which workers communicate, as the plan says of a strategy."""
    command = [sys.executable, "-m", "paceline", "plan", "--json", "--parameters", f"{options.megabytes / 4}M"]
    command += ["--precision", "fp32", "--optimizer", "momentum", "--batch", str(NUM_WORKERS)]
    command += ["--device", "cpu:24GB", "--devices", str(NUM_WORKERS), "--devices-per-machine", "1"]
    command += ["--network", f"{options.mbps:g}mbit"]
    command += ["--strategies", strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise JobFailedError(f"paceline plan failed: {done.stderr}")
    (found,) = json.loads(done.stdout)["strategies"]
    return found["seconds"]["communicate"]


def measure(strategy: str, options: argparse.Namespace) -> tuple[float, float]:
    """Take steps under a strategy; return the seconds of one, and those of it in which a worker computes.

    Both are medians of several steps, of the slowest worker. Over the ring nothing is computed.
    """
    kind, _, number = strategy.partition(":")
    num_alone = int(number or 1)  # a ring has a server that its workers join
    alone = list(range(NUM_WORKERS, NUM_WORKERS + num_alone))
    shares: tuple[float, ...] = ()
    beside: list[int] = []
    if kind == "colocated-server":
        of_one_alone, of_one_beside = server_shares(NUM_WORKERS, num_alone)
        beside = list(range(NUM_WORKERS)) if of_one_beside else []
        shares = (of_one_alone,) * num_alone + (of_one_beside,) * len(beside)
    spec = hosted_spec(NUM_WORKERS, num_alone + len(beside), shares)
    command = [sys.executable, str(WORKER), "--mode", "ring" if kind == RING else "step", "--out", "{folder}"]
    command += ["--megabytes", str(options.megabytes), "--steps", str(options.steps)]
    lines = [Line(options.mbps, options.mbps)] * (NUM_WORKERS + num_alone)
    with (
        ShapedNetwork(lines, queue_ms=200.0, mtu=9000, congestion="reno") as network,
        HostedJob(network, spec, alone + beside, list(range(NUM_WORKERS)), command, START_S) as job,
    ):
        job.wait(TIMEOUT_S)
        written = [(job.folder / f"seconds-{rank}").read_text().split() for rank in range(NUM_WORKERS)]
    step_s = max(float(each[0]) for each in written)
    return step_s, 0.0 if kind == RING else max(float(each[1]) for each in written)


def draw(found: Sequence[Found], caption: str, path: Path) -> None:
    """Draw what was planned beside what was measured."""
    from matplotlib.figure import Figure

    from paceline.observe.plots import DPI, INK

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    pairs = {each.strategy.replace("-server:", "\nserver:"): (each.planned_s, each.measured_s) for each in found}
    draw_pairs(axes, pairs, "%.2f")
    axes.set_ylabel("seconds of a step", color=INK)
    axes.set_title(f"Steps over thin lines, planned and measured\n{caption}", loc="left", color=INK)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=DPI)


def draw_pairs(axes: "Axes", pairs: Mapping[str, tuple[float, float]], form: str) -> None:
    """Draw by name what was planned beside what was measured, with their numbers in this form."""
    from paceline.observe.plots import FAINT, GRID, INK, POLICY_COLOURS

    places = range(len(pairs))
    for which, (offset, colour, label) in enumerate(
        ((-0.2, FAINT, "planned"), (0.2, POLICY_COLOURS[0], "measured")),
    ):
        heights = [pair[which] for pair in pairs.values()]
        bars = axes.bar([place + offset for place in places], heights, width=0.38, color=colour, label=label)
        axes.bar_label(bars, fmt=form, color=INK, fontsize=8, padding=2)
    axes.set_xticks(list(places), list(pairs), color=INK, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def main() -> None:
    """Plan, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--picture", type=Path, help="draw them to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    caption = f"{NUM_WORKERS} workers, {options.megabytes:g} MB of float32, lines of {options.mbps:g} Mbit/s"
    print(f"{caption}; {machine()}")
    found: list[Found] = []
    try:
        for strategy in options.strategies:
            step_s, computing_s = measure(strategy, options)
            found.append(Found(strategy, communication_s(strategy, options) + computing_s, step_s))
            one = found[-1]
            print(f"{strategy:20} planned {one.planned_s:6.3f} s, measured {one.measured_s:6.3f} s, {one.error:+.1%}")
            progress(f"{strategy} is measured")
    except (CannotShapeError, JobFailedError) as problem:
        sys.exit(f"plan_hosts.py: {problem}")
    if options.picture:
        draw(found, caption, options.picture)
    if options.json:
        result: dict[str, object] = {f"{each.strategy}.measured_s": each.measured_s for each in found}
        result |= {f"{each.strategy}.planned_s": each.planned_s for each in found}
        print_json({"name": "plan_hosts", **result, "worst_error": max(abs(each.error) for each in found)})


if __name__ == "__main__":
    main()
