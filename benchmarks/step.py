"""A whole training step beside the same step without communication and update, and beside DDP's.

    python benchmarks/step.py --model mlp --workers 2

All sides are alive all the time and take turns: Paceline, DDP over Gloo, and as many workers that only compute
gradients. The overhead is what a step takes longer than computing the gradients alone.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from cyclopts import App, Parameter
from measuring import Sample, machine, print_json, progress
from turns import BENCHMARKS, PlayFailed, Side, Stage

NUM_WARM_UP: Final = 2
TOLERANCE: Final = 1e-3  # of the parameters, of size 0.1: the sides add the gradients in different orders

app = App(name="step.py", help="Measure what communication adds to a training step.", help_format="plaintext")


@dataclass(frozen=True, slots=True)
class Sides:
    """The sides that take turns."""

    ours: Side
    ddp: Side
    alone: Side


@dataclass(slots=True)
class Times:
    """Seconds of one step, one number a round."""

    ours: list[float]
    ours_inside: list[float]  # of it, inside `optimizer.step()`, on the worker that waited longest
    ddp: list[float]
    alone: list[float]  # only the gradients
    local: list[float]  # the gradients, and an update by each worker itself

    def over(self, side: list[float], base: list[float]) -> Sample:
        """Return by which fraction one side's step is longer than another's, in the same round."""
        return Sample.of([a / b - 1 for a, b in zip(side, base, strict=True)])


@app.default
def step(
    *,
    model: Literal["mlp", "transformer"] = "mlp",
    workers: Annotated[int, Parameter(alias="-n")] = 2,
    rounds: int = 15,
    steps: int = 3,
    transport: Literal["shm", "tcp"] = "shm",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Take training steps on all sides in turn; print how much longer they are than the computation alone.

    Parameters
    ----------
    model
        Which model to train.
    workers
        Number of workers on each side.
    rounds
        Number of measured rounds, after a few to warm up.
    steps
        Number of steps of each side in a round.
    transport
        What Paceline's own processes talk over.
    json
        Print only one line of JSON on stdout.
    """
    try:
        with Stage() as stage:
            progress(f"Starting {workers} workers of each side")
            sides = start(stage, model, workers, transport)
            times = take_turns(sides, rounds, steps)
            difference = compare(stage.folder, sides)
    except PlayFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    tell(model, workers, times, difference, only_json=json)
    return 0 if difference <= TOLERANCE else 1


def start(stage: Stage, model: str, num_workers: int, transport: str) -> Sides:
    """Start all sides; those that learn alone compute with as many threads as Paceline's workers."""
    options = ["-n", str(num_workers), "--transport", transport, "--quiet"]
    script = [str(BENCHMARKS / "step_worker.py"), "{stage}", model]
    ours = stage.start("paceline", [sys.executable, "-m", "paceline", "run", *options, *script], num_workers)
    peer = [sys.executable, str(BENCHMARKS / "peers" / "ddp_step.py"), "{stage}", model, str(num_workers)]
    ddp = stage.start("ddp", peer, num_workers)
    threads = str(ours.ask("threads").answers[0])
    learner = [sys.executable, str(BENCHMARKS / "step_learner.py"), "{stage}", model, str(num_workers), threads]
    return Sides(ours, ddp, stage.start("alone", learner, num_workers))


def take_turns(sides: Sides, num_rounds: int, num_steps: int) -> Times:
    """Have all sides take steps, in another order every round; the warm-up is not counted."""
    times = Times([], [], [], [], [])
    turns = [
        (sides.ours, "step", times.ours),
        (sides.alone, "step", times.alone),
        (sides.ddp, "step", times.ddp),
        (sides.alone, "local", times.local),
    ]
    for number in range(-NUM_WARM_UP, num_rounds):
        for side, act, found in turns[number % len(turns) :] + turns[: number % len(turns)]:
            turn = side.ask(act, num_steps)
            if number < 0:
                continue
            found.append(turn.seconds / num_steps)
            if side is sides.ours:
                times.ours_inside.append(max(turn.answers) / num_steps)
    return times


def compare(folder: Path, sides: Sides) -> float:
    """Return the largest difference between any of our workers' parameters and DDP's after equal steps."""
    values: list[np.ndarray] = []
    for side in (sides.ours, sides.ddp):
        written = folder / f"{side.name}-values"
        written.mkdir()
        side.ask("write", str(written))
        values.extend(np.fromfile(path, dtype=np.float32) for path in sorted(written.iterdir()))
    return max(float(np.abs(each - values[-1]).max()) for each in values)


def tell(model: str, num_workers: int, times: Times, difference: float, *, only_json: bool) -> None:
    """Print what was measured."""
    overhead, ddp_overhead = times.over(times.ours, times.alone), times.over(times.ddp, times.alone)
    beside_local = times.over(times.ours, times.local)
    rows = {
        "gradients alone": (times.alone, None),
        "and a local update": (times.local, times.over(times.local, times.alone)),
        "Paceline": (times.ours, overhead),
        "DDP over Gloo": (times.ddp, ddp_overhead),
    }
    if not only_json:
        print(f"a training step of the {model}, {num_workers} workers; {machine()}")
        for name, (seconds, more) in rows.items():
            print(f"  {name:<19} {_ms(seconds).text(' ms'):<28} {_percent(more) if more else ''}")
        inside = _ms(times.ours_inside).text(" ms")
        print(f"  Paceline's optimizer.step() {inside}; beside a local update {_percent(beside_local)}")
        verdict = "equal" if difference <= TOLERANCE else "NOT EQUAL"
        print(f"  results {verdict} to DDP's: differ by at most {difference:.1e} (tolerance {TOLERANCE:.0e})")
    print_json(
        {
            "name": f"step-{model}",
            "workers": num_workers,
            "overhead": overhead.median,
            "overhead_spread": [overhead.low, overhead.high],
            "overhead_beside_local_update": beside_local.median,
            "ddp_overhead": ddp_overhead.median,
            "ddp_overhead_spread": [ddp_overhead.low, ddp_overhead.high],
            "ours_ms": _ms(times.ours).median,
            "inside_step_ms": _ms(times.ours_inside).median,
            "ddp_ms": _ms(times.ddp).median,
            "alone_ms": _ms(times.alone).median,
            "local_ms": _ms(times.local).median,
            "difference": difference,
            "tolerance": TOLERANCE,
        }
    )


def _ms(seconds: list[float]) -> Sample:
    return Sample.of([1e3 * each for each in seconds])


def _percent(fraction: Sample) -> str:
    return f"{fraction.median:+.1%} ({fraction.low:+.1%} to {fraction.high:+.1%})"


if __name__ == "__main__":
    sys.exit(app())
