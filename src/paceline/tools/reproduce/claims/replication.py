"""Claim 9: replicas that get what was added up, instead of every push, save a factor of the number of workers."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.virtual import scenario, simulate_run

_REPLICAS: Final = 2
_WORKERS: Final = (2, 4, 8, 16)
_POLICIES: Final = ("bsp", "asynchronous")


def _run(options: ClaimOptions) -> Finding:
    clocks = 20 if options.is_quick else 100
    ratios = {
        policy: tuple(_ratio(policy, workers, clocks, options.seed) for workers in _WORKERS) for policy in _POLICIES
    }
    naive = float(_REPLICAS)
    added_up = _REPLICAS * ratios["bsp"][_WORKERS.index(8)]
    workers = tuple(map(float, _WORKERS))
    curves = (
        Curve("every push (any policy)", workers, (naive,) * len(workers)),
        *(
            Curve(f"every update, {policy}", workers, tuple(_REPLICAS * each for each in ratios[policy]))
            for policy in _POLICIES
        ),
        Curve("k / n", workers, tuple(_REPLICAS / each for each in workers), is_reference=True),
    )
    return Finding(
        (
            Check(
                "8 workers, 2 replicas: bytes of every push", "2.0 times all pushes", f"{naive:.2f} times", naive == 2.0
            ),
            Check(
                "bytes of every update, bsp",
                "k / n = 0.25 times, within 2 %",
                f"{added_up:.3f} times",
                abs(added_up / 0.25 - 1) <= 0.02,
            ),
            Check(
                "the same without clocks",
                "no gain: each push is an update",
                f"{_REPLICAS * ratios['asynchronous'][2]:.2f} times",
                ratios["asynchronous"][2] == 1,
            ),
        ),
        (
            Plot(
                "Bytes to 2 replicas, beside the bytes of all pushes",
                "workers",
                "times",
                curves,
                is_log_x=True,
                y_range=(0, None),
            ),
        ),
        "Updates are those that the real server cores make in a simulation: under bsp one a clock, of all workers' "
        "pushes. An update is as "
        "large as a push. Paceline's own replicas get every push, so that both machines compute at the same time "
        "and an answer leaves after one way "
        "(decision 58): what this claim saves is not what Paceline does.",
    )


def _ratio(policy: str, workers: int, clocks: int, seed: int) -> float:
    """Return the number of updates over that of pushes; pushes of one clock are one update where they show on clock."""
    of = scenario(policy, seed=seed, workers=workers, clocks=clocks)
    order = simulate_run(of).order
    is_summed = of.consistency.visible == "on_clock"
    return (len({clock for _, clock in order}) if is_summed else len(order)) / len(order)


CLAIM: Final = Claim(
    "9",
    "Replicate after aggregation: a factor of the workers fewer bytes",
    "Li et al. 2014 (OSDI)",
    "k/n extra bytes instead of k",
    "counted",
    (0.1, 0.2),
    _run,
    ("A5",),
)
