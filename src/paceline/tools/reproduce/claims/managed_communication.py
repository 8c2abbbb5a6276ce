"""Claim 15: communication managed within a budget reaches the target sooner than all at the end of each clock."""

from __future__ import annotations

from math import inf
from statistics import median
from typing import Any, Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

_PROGRAM: Final = "benchmarks/managed.py"
_POLICIES: Final = ("clock_only", "random", "relative_magnitude")


def _run(options: ClaimOptions) -> Finding:
    arguments = ("--seeds", "1" if options.is_quick else "3")  # the anchor asks for three
    found = options.programs.numbers(_PROGRAM, arguments, timeout_s=1500.0)
    seconds = {policy: _seconds(found[policy]) for policy in _POLICIES}
    plain, chance, magnitude = (seconds[policy] for policy in _POLICIES)
    over = float(found["highest_rate_over_budget"])
    names = tuple(f"seed {number}" for number in range(len(plain)))
    curves = tuple(Curve(policy.replace("_", " "), names, _drawn(seconds[policy])) for policy in _POLICIES)
    return Finding(
        (
            Check(
                "managed before clock-only, in every seed",
                "seconds to the target",
                _told(seconds),
                all(max(a, b) < c for a, b, c in zip(chance, magnitude, plain, strict=True)),
            ),
            Check(
                "by magnitude before by chance, in every seed",
                "earlier",
                _told(seconds, _POLICIES[1:]),
                all(a < b for a, b in zip(magnitude, chance, strict=True)),
            ),
            Check("measured rate beside the budget", "at most 1.02", f"{over:.2f}", over <= 1.02),
        ),
        (
            Plot("Seconds until the loss is 0.5", "", "seconds", curves, "bars", y_range=(0, None)),
            _clocks_plot(found, names),
        ),
        "Matrix factorization by four workers and a server in network namespaces of their own, whose lines the "
        f"kernel limits to 1.35 Mbit/s up. {_why(found)} "
        "Without management a step of 0.05 diverges, so it has 0.04.",
        (command_line(_PROGRAM, arguments),),
    )


def _clocks_plot(found: dict[str, Any], names: tuple[str, ...]) -> Plot:
    """Return how many clocks each policy has finished until the target."""
    curves = tuple(
        Curve(policy.replace("_", " "), names, tuple(float(each or 0) for each in found[policy]["clock"]))
        for policy in _POLICIES
    )
    return Plot("Clocks until then", "", "clocks of the slowest worker", curves, "bars", y_range=(0, None))


def _why(found: dict[str, Any]) -> str:
    """Return where the gain comes from: clocks to the target, and what a clock sends, as medians over the seeds."""
    told = [
        f"{policy.replace('_', ' ')} takes {clocks:.0f} clocks of {1e3 * megabytes / clocks:.0f} kB in {seconds:.1f} s"
        for policy in _POLICIES
        for clocks, megabytes, seconds in [[_median(found[policy][key]) for key in ("clock", "megabytes", "seconds")]]
        if clocks
    ]
    return f"Until the target, in the median of the seeds, {'; '.join(told)}."


def _median(numbers: list[float | None]) -> float:
    """Return the median of the seeds that reached the target; 0 if none did."""
    return median([each for each in numbers if each is not None] or [0.0])


def _seconds(policy: dict[str, Any]) -> list[float]:
    return [inf if each is None else float(each) for each in policy["seconds"]]


def _drawn(seconds: list[float]) -> tuple[float, ...]:
    return tuple(0.0 if each == inf else each for each in seconds)


def _told(seconds: dict[str, list[float]], policies: tuple[str, ...] = _POLICIES) -> str:
    return "; ".join(
        ", ".join("never" if each == inf else f"{each:.1f}" for each in seconds[policy]) for policy in policies
    )


CLAIM: Final = Claim(
    "15",
    "Managed, prioritized communication beats clock-only at the same budget",
    "Wei et al. 2015 (Bösen)",
    "2 to 3 times less time",
    "real",
    (2.2, 6.0),
    _run,
    ("A9",),
)
