"""Claim 10: a killed server is back within a second, and no push is lost or counted twice."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

_PROGRAM: Final = "benchmarks/kills.py"


def _run(options: ClaimOptions) -> Finding:
    kills = "3" if options.is_quick else "20"
    arguments = ("--kills", kills, "--parameters", "1000000", "--rounds", "1", "--seed", str(options.seed + 1))
    found = options.programs.numbers(_PROGRAM, arguments, timeout_s=1500.0)
    stalls = sorted(float(each) / 1000 for each in found["stalls_ms"])
    names = tuple(f"kill {number}" for number in range(1, len(stalls) + 1))
    return Finding(
        (
            Check(
                "longest step of any worker around a kill -9 of its server",
                "less than 1 s (paper: 0.8 s)",
                f"{stalls[-1]:.2f} s",
                stalls[-1] < 1,
            ),
            Check("pushes lost", "0", str(found["lost"]), found["lost"] == 0),
            Check("pushes counted twice", "0", str(found["doubled"]), found["doubled"] == 0),
            Check(
                "bytes of the parameters at the end",
                "those of a run without kills",
                "the same" if found["same_bytes"] else "others",
                bool(found["same_bytes"]),
            ),
        ),
        (
            Plot(
                "How long workers stood still",
                "kills, from the shortest stall",
                "seconds",
                (Curve("stall", names, tuple(stalls)),),
                "bars",
                y_range=(0, None),
            ),
        ),
        f"Two worker processes train a million parameters under bsp; the server is killed by SIGKILL {kills} times "
        "at random moments, "
        "and its successor takes over memory that outlives it.",
        (command_line(_PROGRAM, arguments),),
    )


CLAIM: Final = Claim(
    "10",
    "A server that dies is back within a second, without loss",
    "Li et al. 2014 (OSDI)",
    "0.8 s",
    "real",
    (0.5, 2.0),
    _run,
    ("A8",),
)
