"""Claim 2: without stragglers bounded staleness gains nothing, which is the control of claim 1."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.virtual import scenario, simulate_run

_BOUNDS: Final = (0, 1, 2, 4, 8, 16)
_KINDS: Final = {"one clock in ten takes four times as long": ("transient:0.1:4", 0.1), "equal workers": ("none", 0.02)}


def _run(options: ClaimOptions) -> Finding:
    clocks = 100 if options.is_quick else 400
    speeds: dict[str, list[float]] = {}
    for kind, (stragglers, spread) in _KINDS.items():
        seconds = [
            simulate_run(
                scenario(
                    f"ssp:{bound}", seed=options.seed, clocks=clocks, stragglers=stragglers, spread=spread, is_lazy=True
                )
            ).seconds
            for bound in _BOUNDS
        ]
        speeds[kind] = [seconds[0] / each for each in seconds]
    slow, equal = (max(speeds[kind]) for kind in _KINDS)
    bounds = tuple(map(float, _BOUNDS))
    curves = tuple(Curve(kind, bounds, tuple(values)) for kind, values in speeds.items())
    return Finding(
        (
            Check("gain in clocks a second, equal workers", "at most 5 %", f"{equal - 1:.1%}", equal <= 1.05),
            Check("the same with slow clocks", "more than 5 %", f"{slow - 1:.0%}", slow > 1.05),
        ),
        (Plot("Clocks a second beside s = 0", "bound s", "ratio", curves, is_log_x=True, y_range=(0.9, None)),),
        "8 workers. Equal ones take 0.98 to 1.02 s for a clock, so even they wait a little for the slowest of each "
        "clock.",
    )


CLAIM: Final = Claim(
    "2",
    "Without stragglers SSP is no faster than BSP",
    "Cui et al. 2014",
    "similar",
    "virtual",
    (0.2, 0.6),
    _run,
    ("A4",),
)
