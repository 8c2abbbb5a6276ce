"""Runs that the demo compares: their titles, commands and captions, and the pace of their workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final, Literal, get_args

import msgspec

from paceline.launch.plan import LocalRun

SLOW_WORKER: Final = 1
SLOW_SHARE: Final = 0.25
SLOW_FACTOR: Final = 3.0
QUICK_FACTOR: Final = 0.5


class ComputePace(msgspec.Struct, frozen=True):
    """Simulated compute time of one worker: it sleeps, so that two cores show the pace of four machines.

    A steady worker computes for `compute_s` in every clock. A fitful one has a faster machine that other programs
    use too: it takes half of that in most clocks, and three times as long in a quarter of them, drawn by seed. Its
    average is about that of the others, which makes it a transient straggler; a worker that is always slow slows down
    all models with a bound alike.
    """

    compute_s: float
    fitful: bool
    seed: int

    def clocks(self) -> Iterator[float]:
        """Yield the seconds to compute in each clock, without end.

        >>> next(ComputePace(0.02, fitful=False, seed=0).clocks())
        0.02
        """
        random = Random(self.seed)
        while True:
            yield self.compute_s * (self._factor(random) if self.fitful else 1.0)

    def _factor(self, random: Random) -> float:
        return SLOW_FACTOR if random.random() < SLOW_SHARE else QUICK_FACTOR


def describe(compute_s: float) -> str:
    """Describe the slow worker in a sentence."""
    return (
        f"worker {SLOW_WORKER} needs {compute_s * SLOW_FACTOR * 1000:.0f} ms in {SLOW_SHARE:.0%} of its clocks "
        f"(drawn by seed) and {compute_s * QUICK_FACTOR * 1000:.0f} ms in the others"
    )


RunName = Literal["bsp", "ssp", "essp", "asynchronous", "all-reduce", "single"]
RUN_NAMES: Final[tuple[RunName, ...]] = get_args(RunName)
SCRIPT: Final = Path(__file__).with_name("digits.py")
STALENESS: Final = 3
BATCH: Final = 15  # examples that a worker takes in each clock
RATE: Final = 0.6  # first learning rate for the mean gradient of one clock of all workers; falls to 0
COMPUTE_S: Final = 0.02  # simulated computing of a steady worker in each clock


class Setting(msgspec.Struct, frozen=True):
    """Options that all runs share."""

    data: Path
    num_workers: int
    num_servers: int
    epochs: int
    seed: int

    @property
    def rate_of_one_push(self) -> float:
        """Learning rate where every push is an update of its own: smaller by the number of workers."""
        return RATE / self.num_workers


class DemoRun(msgspec.Struct, frozen=True):
    """One run of the demo: its label and note in the report, and its options for the launcher."""

    label: str
    note: str
    run_dir: Path
    launch: LocalRun


def plan(name: RunName, setting: Setting, run_dir: Path) -> DemoRun:
    """Return one run; all take the same examples in the same number of clocks, at the same rate for each example."""
    match name:
        case "bsp":
            return _policy(setting, run_dir, "bsp", "bsp", _mean_note())
        case "ssp":
            note = _push_note(setting, "fetches when the bound asks for it")
            return _policy(setting, run_dir, f"ssp({STALENESS})", f"ssp:{STALENESS}", note)
        case "essp":
            special = "servers send new values at every clock; a read right after a clock cannot have it yet (-2)"
            note = _push_note(setting, f"{special}, and lacks as many more as the slow worker is late by")
            return _policy(setting, run_dir, f"essp({STALENESS})", f"essp:{STALENESS}", note)
        case "asynchronous":
            return _policy(
                setting,
                run_dir,
                "asynchronous",
                "asynchronous",
                _push_note(setting, "never waits, fetches in every clock"),
            )
        case "all-reduce":
            return _all_reduce(setting, run_dir)
        case "single":
            return _single(setting, run_dir)


def _mean_note() -> str:
    return f"one update a clock, of the mean gradient, rate {RATE:g}"


def _push_note(setting: Setting, special: str) -> str:
    return f"{special}; one update a push, rate {RATE:g} / {setting.num_workers} = {setting.rate_of_one_push:g}"


def _policy(setting: Setting, run_dir: Path, label: str, consistency: str, note: str) -> DemoRun:
    on_clock = consistency == "bsp"
    rate = RATE if on_clock else setting.rate_of_one_push
    args = _script_args(setting, rate=rate, batch=BATCH, compute_s=COMPUTE_S)
    if consistency == "asynchronous":
        args = (*args, "--fetch-every", "1")
    launch = LocalRun(
        script=SCRIPT,
        args=args,
        num_workers=setting.num_workers,
        num_servers=setting.num_servers,
        consistency=consistency,
        run_dir=run_dir,
        progress=True,
        quiet=True,
    )
    return DemoRun(label, note, run_dir, launch)


def _all_reduce(setting: Setting, run_dir: Path) -> DemoRun:
    """Return a run without servers: every worker has all gradients of a clock, and updates its own replica."""
    launch = LocalRun(
        script=SCRIPT,
        args=_script_args(setting, rate=RATE, batch=BATCH, compute_s=COMPUTE_S),
        num_workers=setting.num_workers,
        num_servers=setting.num_servers,
        strategy="all-reduce",
        run_dir=run_dir,
        progress=True,
        quiet=True,
    )
    note = f"no server: workers exchange gradients and wait for each other in each clock, rate {RATE:g}"
    return DemoRun("all-reduce", note, run_dir, launch)


def _single(setting: Setting, run_dir: Path) -> DemoRun:
    """Return a run of one process that computes the examples of all workers in each clock, one after another."""
    args = _script_args(
        setting, rate=RATE, batch=BATCH * setting.num_workers, compute_s=COMPUTE_S * setting.num_workers
    )
    launch = LocalRun(
        script=SCRIPT,
        args=args,
        num_workers=1,
        num_servers=1,
        transport="memory",
        consistency="bsp",
        run_dir=run_dir,
        progress=True,
        quiet=True,
    )
    note = f"all the work of a clock one after another, rate {RATE:g}; no slow worker"
    return DemoRun("single process", note, run_dir, launch)


def _script_args(setting: Setting, *, rate: float, batch: int, compute_s: float) -> tuple[str, ...]:
    return (
        str(setting.data),
        f"--epochs={setting.epochs}",
        f"--batch={batch}",
        f"--lr={rate}",
        f"--seed={setting.seed}",
        f"--compute-ms={compute_s * 1000}",
    )
