"""Claim 26: workers that exchange every H steps send H times fewer bytes, and learn about as well."""

from __future__ import annotations

from typing import Any, Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

PROGRAM: Final = "benchmarks/diloco.py"
_NAMES: Final = ("bsp", "diloco:10", "diloco:50", "local-sgd:10", "local-sgd:50")
_GAP: Final = 0.05  # nats a letter


def arguments_of(options: ClaimOptions) -> tuple[str, ...]:
    """Return the arguments of the run that claims 26 and 27 share."""
    return ("--steps", "300", "--seeds", "1") if options.is_quick else ("--steps", "500", "--seeds", "3")


def numbers_of(options: ClaimOptions) -> dict[str, Any]:
    """Return what that run has found."""
    return options.programs.numbers(PROGRAM, arguments_of(options), timeout_s=1800.0)


def _run(options: ClaimOptions) -> Finding:
    real = numbers_of(options)["real"]
    ratios = {every: float(real[f"diloco:{every}"]["times_fewer_bytes"]) for every in (10, 50)}
    gaps = {every: float(real[f"diloco:{every}"]["gap"]) for every in (10, 50)}
    worst = max(abs(ratio / every - 1) for every, ratio in ratios.items())
    return Finding(
        (
            Check(
                "bytes of bsp over those of DiLoCo, H = 10 and 50",
                "H, within 2 %",
                ", ".join(f"{each:.2f}" for each in ratios.values()),
                worst <= 0.02,
            ),
            Check(
                "loss above bsp after equally many samples, H = 10 and 50",
                f"at most {_GAP}",
                ", ".join(f"{each:+.3f}" for each in gaps.values()),
                max(gaps.values()) <= _GAP,
            ),
        ),
        (
            Plot(
                "Bytes of a worker, both ways",
                "",
                "MB",
                (Curve("bytes", _NAMES, tuple(float(real[name]["mb"]) for name in _NAMES)),),
                "bars",
                is_log_y=True,
            ),
            Plot(
                "Loss on held-out text",
                "",
                "nats a letter",
                (Curve("loss", _NAMES, tuple(float(real[name]["loss"]) for name in _NAMES)),),
                "bars",
                y_range=(0, None),
            ),
        ),
        "Four worker processes and a server over TCP, a perceptron that learns the next letter of Python's language "
        "reference, AdamW inside. A short run: the gap "
        "closes with more steps (docs/local_sgd.md). H = 500 and 8 workers on a language model are beyond this "
        "machine.",
        (command_line(PROGRAM, arguments_of(options)),),
    )


CLAIM: Final = Claim(
    "26",
    "Exchange every H steps: the same quality with H times fewer bytes",
    "Douillard et al. 2023 (DiLoCo)",
    "H = 500, 8 workers: 500 times less",
    "real",
    (1.5, 3.0),
    _run,
    ("A5",),
)
