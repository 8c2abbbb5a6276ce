"""What `paceline plan` says of the seconds of a whole training step on this machine, beside steps that take them.

    python benchmarks/plan_seconds.py [--rounds 7] [--picture FILE] [--json]

Three small models with momentum SGD in float32 and two workers: under a parameter server over shared memory,
all-reduce, fsdp, a pipeline of two stages and layers split over two ranks. The plan is told the seconds of a step of
two processes that train each for itself, with a thread each, which take turns with the workers; for a pipeline, of a
step in its micro-batches. And it is told the rate of memory: how fast these two copy.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Final

from cyclopts import App, Parameter
from measuring import machine, print_json, progress
from plan import planned
from plan_hosts import draw_pairs
from plan_models import WORK
from plan_worker import ALONE, COPIED_BYTES, MICRO_BATCHES
from turns import BENCHMARKS, PlayFailed, Side, Stage

from paceline.tools.plan.strategy import parse_strategy

NUM_WORKERS: Final = 2
NUM_WARM_UP: Final = 2
STRATEGIES: Final = ("parameter-server:1", "all-reduce", "fsdp", "pipeline:2", "tensor:2")
NUM_COPIES: Final = 8  # in a round
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}

app = App(name="plan_seconds.py", help="Compare planned with measured seconds of a step.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds of a step of one model under one strategy, planned and measured."""

    model: str
    strategy: str
    planned_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """By what share the plan is too slow (above 0) or too fast."""
        return self.planned_s / self.measured_s - 1


@app.default
def seconds(
    *,
    models: Annotated[tuple[str, ...], Parameter(negative="")] = tuple(WORK),
    strategies: Annotated[tuple[str, ...], Parameter(negative="")] = STRATEGIES,
    rounds: int = 7,
    steps: int = 3,
    picture: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Train each model under each strategy; print planned and measured seconds of a step.

    Parameters
    ----------
    models
        Which ones: perceptron, transformer, convolution.
    strategies
        Which ones, as `paceline plan` writes them.
    rounds
        Number of measured rounds, after a few to warm up.
    steps
        Number of steps in a round.
    picture
        Draw them to this file.
    json
        Print only one line of JSON on stdout.
    """
    found: list[Found] = []
    try:
        for name in models:
            for strategy in strategies:
                if strategy.startswith("tensor") and not hasattr(WORK[name].make(), "tensor_plan"):
                    continue
                progress(f"Measuring the {name} under {strategy}")
                found.append(compare(name, strategy, rounds, steps))
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    caption = f"momentum SGD in float32, {NUM_WORKERS} workers; {machine()}"
    if not json:
        print(caption)
        for one in found:
            print(
                f"  {one.model:12} {one.strategy:20} planned {one.planned_s * 1000:6.1f} ms, measured "
                f"{one.measured_s * 1000:6.1f} ms, {one.error:+.1%}"
            )
    if picture:
        draw(found, caption, picture)
    errors = {f"{one.model}.{one.strategy}_error": one.error for one in found}
    print_json({"name": "plan_seconds", **errors, "worst": max(map(abs, errors.values()))})
    return 0


def compare(name: str, strategy: str, num_rounds: int, num_steps: int) -> Found:
    """Take steps of both sides in turn; return medians of the rounds."""
    chosen = parse_strategy(strategy, NUM_WORKERS)
    with Stage() as stage:
        pieces = MICRO_BATCHES if chosen.pipeline > 1 else 1
        alone = start(stage, name, f"{ALONE}:{NUM_WORKERS}:{pieces}")
        together = start(stage, name, strategy)
        computing_s, copying_s, measured_s = list[float](), list[float](), list[float]()
        turns = (alone, "step", num_steps, computing_s), (alone, "copy", NUM_COPIES, copying_s)
        for number in range(-NUM_WARM_UP, num_rounds):
            for side, act, times, into in (*turns, (together, "step", num_steps, measured_s)):
                took_s = side.ask(act, times).seconds / times
                if number >= 0:
                    into.append(took_s)
    rate = 2 * COPIED_BYTES / median(copying_s)  # read and written
    step = planned(name, WORK[name], chosen, NUM_WORKERS, "shm", median(computing_s), rate).step
    return Found(name, strategy, step.total, median(measured_s))


def start(stage: Stage, name: str, strategy: str) -> Side:
    """Start the workers of a strategy, or those that train each for itself."""
    script = [str(BENCHMARKS / "plan_worker.py"), "{stage}", "whole", name, strategy]
    if strategy.startswith(ALONE):
        return stage.start("alone", [sys.executable, *script], NUM_WORKERS, ONE_THREAD)
    how = [] if strategy.startswith("parameter-server") else ["--strategy", strategy]
    options = ["-m", "paceline", "run", "-n", str(NUM_WORKERS), *how, "--quiet"]
    return stage.start("together", [sys.executable, *options, *script], NUM_WORKERS, ONE_THREAD)


def draw(found: list[Found], caption: str, path: Path) -> None:
    """Draw what was planned beside what was measured, a chart for each model."""
    from matplotlib.figure import Figure

    from paceline.observe.plots import DPI, INK

    models = list(dict.fromkeys(one.model for one in found))
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        of_model = [one for one in found if one.model == model]
        pairs = {one.strategy.replace("-", "-\n"): (one.planned_s * 1000, one.measured_s * 1000) for one in of_model}
        draw_pairs(axes, pairs, "%.0f")
        axes.set_title(model, loc="left", color=INK)
    figure.axes[0].set_ylabel("milliseconds of a step", color=INK)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"Whole training steps, planned and measured: {caption}", x=0.01, ha="left", fontsize=9, color=INK)
    figure.savefig(path, dpi=DPI)


if __name__ == "__main__":
    sys.exit(app())
