"""Runs that the demo compares: their titles, commands and captions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from paceline.launch.plan import LocalRun

RunName = Literal["bsp", "ssp", "essp", "asynchronous", "single"]
RUN_NAMES: Final[tuple[RunName, ...]] = get_args(RunName)
SCRIPT: Final = Path(__file__).with_name("digits.py")
STALENESS: Final = 3
BATCH: Final = 15  # examples that a worker takes in each clock
RATE: Final = 0.6  # first learning rate for the mean gradient of one clock of all workers; falls to 0
COMPUTE_S: Final = 0.02  # simulated computing of a steady worker in each clock


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs have in common."""

    data: Path
    num_workers: int
    num_servers: int
    epochs: int
    seed: int

    @property
    def rate_of_one_push(self) -> float:
        """The learning rate where every push is an update of its own: as many smaller steps come to the same."""
        return RATE / self.num_workers


@dataclass(frozen=True, slots=True)
class DemoRun:
    """One run of the demo: how it is called in the report, what is started, and the note beside its numbers."""

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
            note = _push_note(setting, "servers send new values at every clock")
            return _policy(setting, run_dir, f"essp({STALENESS})", f"essp:{STALENESS}", note)
        case "asynchronous":
            return _policy(
                setting,
                run_dir,
                "asynchronous",
                "asynchronous",
                _push_note(setting, "never waits, fetches in every clock"),
            )
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


def _single(setting: Setting, run_dir: Path) -> DemoRun:
    """One process takes in each clock the examples of all workers, which takes it as long as all of them together."""
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
