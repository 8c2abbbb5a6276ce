"""Claim 31: updates of shared memory without locks lose next to nothing where they are sparse, and much where dense."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from paceline.errors import PacelineError
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.lock_free import SIZE

_KINDS: Final = ("sparse", "dense")
_MODULE: Final = "paceline.tools.reproduce.lock_free"
_TIMEOUT_S: Final = 300.0


class _Outcome(msgspec.Struct, frozen=True):
    """The part of all additions that was lost, and million additions a second of a core, summed over the processes."""

    lost: float
    rate: float


def _run(options: ClaimOptions) -> Finding:
    updates = 40_000 if options.is_quick else 200_000
    found = {(kind, num): _add(kind, num, updates, options.seed) for kind in _KINDS for num in (1, 2)}
    speedups = {kind: found[kind, 2].rate / found[kind, 1].rate for kind in _KINDS}
    lost = {kind: found[kind, 2].lost for kind in _KINDS}
    names = ("sparse", "dense")
    return Finding(
        (
            Check(
                "sparse: part of the additions lost, 2 processes",
                "at most 0.1 %",
                f"{lost['sparse']:.4%}",
                lost["sparse"] <= 0.001,
            ),
            Check(
                "dense: the same",
                "more than ten times as much",
                f"{lost['dense']:.2%}",
                lost["dense"] > 10 * max(lost["sparse"], 1e-6),
            ),
            Check(
                "one process alone loses",
                "nothing",
                f"{max(found[kind, 1].lost for kind in _KINDS):.0%}",
                all(not found[kind, 1].lost for kind in _KINDS),
            ),
            Check(
                "sparse: speed of 2 cores over 1",
                "at least 1.6",
                f"{speedups['sparse']:.2f}",
                speedups["sparse"] >= 1.6,
            ),
        ),
        (
            Plot(
                "Additions that were lost, 2 processes",
                "",
                "part of all",
                (Curve("lost", names, tuple(lost[kind] for kind in names)),),
                "bars",
                y_range=(0, None),
            ),
            Plot(
                "Speed of 2 cores over 1",
                "",
                "ratio",
                (Curve("speed", names, tuple(speedups[kind] for kind in names)),),
                "bars",
                y_range=(0, 2.3),
            ),
        ),
        f"Two processes add to {SIZE:,} numbers in shared memory without any lock, 2048 drawn numbers an update: "
        "from all of them (sparse), or "
        "the same 2048 (dense). Speed is per second of a core, so that other work does not count. Paceline's own "
        "servers apply every "
        "push exactly once, also where workers share their memory: this is what it would lose without them.",
    )


def _add(kind: str, num_processes: int, num_updates: int, seed: int) -> _Outcome:
    with tempfile.TemporaryDirectory(prefix="paceline-hogwild-") as folder:
        path = Path(folder) / "numbers"
        np.zeros(SIZE, np.int64).tofile(path)
        shared = [str(num_processes), str(num_updates), str(seed)]
        commands = [
            [sys.executable, "-m", _MODULE, str(path), kind, str(rank), *shared] for rank in range(num_processes)
        ]
        told = [json.loads(line) for line in _outputs(commands)]
        total = int(np.fromfile(path, np.int64).sum())
    added = sum(each["added"] for each in told)
    return _Outcome(1 - total / added, sum(each["added"] / each["core_s"] for each in told) / 1e6)


def _outputs(commands: list[list[str]]) -> list[str]:
    """Run processes at the same time and return what each printed; none outlives this call."""
    processes = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        told = [process.communicate(timeout=_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    failed = [err for process, (_, err) in zip(processes, told, strict=True) if process.returncode]
    if failed:
        raise PacelineError(f"a process that adds without locks failed:\n{failed[0]}")
    return [out for out, _ in told]


CLAIM: Final = Claim(
    "31",
    "Updates without locks are fine when they are sparse",
    "Niu et al. 2011 (Hogwild!)",
    "near-linear on 10 cores",
    "real",
    (0.3, 0.8),
    _run,
)
