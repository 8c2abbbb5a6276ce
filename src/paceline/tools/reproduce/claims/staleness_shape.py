"""Claim 4: under SSP reads are of all ages up to the bound, under ESSP nearly all are of the latest clock."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.virtual import scenario, simulate_run

_BOUND: Final = 10
_THIN_LATENCY_S: Final = 0.35  # of a clock of one second


def _run(options: ClaimOptions) -> Finding:
    clocks = 120 if options.is_quick else 400

    def ages(policy: str, latency_s: float = 0.01) -> dict[int, float]:
        of = scenario(
            policy, seed=options.seed, clocks=clocks, spread=0.02, latency_s=latency_s, is_lazy=policy.startswith("ssp")
        )
        return simulate_run(of).ages()

    lazy, eager, thin = ages(f"ssp:{_BOUND}"), ages(f"essp:{_BOUND}"), ages(f"essp:{_BOUND}", _THIN_LATENCY_S)
    names = tuple(str(each) for each in range(-_BOUND - 1, 0))

    def curve(label: str, found: dict[int, float]) -> Curve:
        return Curve(label, names, tuple(found.get(int(name), 0.0) for name in names))

    inner = [lazy.get(each, 0.0) for each in range(-_BOUND, -1)]
    oldest = min(*lazy, *eager, *thin)
    mean = {
        name: sum(each * share for each, share in found.items()) for name, found in (("ssp", lazy), ("essp", eager))
    }
    return Finding(
        (
            Check(
                "ESSP, ample network: share at -1", "at least 80 %", f"{eager.get(-1, 0):.0%}", eager.get(-1, 0) >= 0.8
            ),
            Check(
                "SSP: share of each age between",
                "flat: 4 % to 16 %",
                f"{min(inner):.0%} to {max(inner):.0%}",
                min(inner) >= 0.04 and max(inner) <= 0.16,
            ),
            Check(
                "mean differential, SSP and ESSP",
                "ESSP at least 3 clocks fresher",
                f"{mean['ssp']:.1f}, {mean['essp']:.1f}",
                mean["essp"] - mean["ssp"] >= 3,
            ),
            Check("oldest read under a bound of 10", "-11 or newer", f"{oldest}", oldest >= -_BOUND - 1),
        ),
        (
            Plot(
                "How old the values were, all through the clock",
                "clock differential (-1: nothing is missing)",
                "share of reads",
                (curve("ssp:10", lazy), curve("essp:10", eager)),
                "bars",
            ),
            Plot(
                "ESSP, and what a slow network does to it",
                "clock differential",
                "share of reads",
                (curve("ample network", eager), curve("a message takes a third of a clock", thin)),
                "bars",
            ),
        ),
        "8 workers, no straggler: a clock takes 0.98 to 1.02 s. A worker reads all through its clock. Under ssp a "
        "kept copy is "
        "fetched again only when the bound demands it, so its age runs through all values; under essp servers send "
        "every clock's values.",
    )


CLAIM: Final = Claim(
    "4",
    "ESSP concentrates staleness at -1, SSP spreads it over the bound",
    "Dai et al. 2015",
    "a figure: a spike at -1 beside a flat histogram",
    "virtual",
    (0.2, 0.5),
    _run,
    ("A3",),
)
