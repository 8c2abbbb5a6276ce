"""Claim 28: exchanging a part of the parameters at a time cuts the peak of bytes, and learns as well."""

from __future__ import annotations

from statistics import mean
from typing import Final

import numpy as np

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.problems import Perceptron
from paceline.tools.reproduce.virtual import Floats
from paceline.training.local_sgd import ExchangeRounds

_WORKERS: Final = 4
_ROUND: Final = 40
_STEPS: Final = 400
_FRAGMENTS: Final = (1, 2, 4, 8)
_INNER_RATE: Final = 0.1
_NUMBER: Final = 4  # bytes


def _run(options: ClaimOptions) -> Finding:
    seeds = range(options.seed, options.seed + (3 if options.is_quick else 8))
    found = {num: [_train(num, seed) for seed in seeds] for num in _FRAGMENTS}
    losses = {num: mean(loss for loss, _ in runs) for num, runs in found.items()}
    traffic = {num: runs[0][1] for num, runs in found.items()}
    peaks = {num: max(each) / 1e3 for num, each in traffic.items()}
    whole = [loss for loss, _ in found[1]]
    noise = max(0.01, max(whole) - min(whole))
    worst = max(abs(peaks[num] * num / peaks[1] - 1) for num in _FRAGMENTS)
    gap = max(losses[num] - losses[1] for num in _FRAGMENTS)
    totals = {sum(each) for each in traffic.values()}
    steps = tuple(float(step) for step in range(1, 2 * _ROUND + 1))
    return Finding(
        (
            Check(
                "peak of bytes in a step, 2, 4, 8 fragments",
                "1 / fragments, within 10 %",
                ", ".join(f"1/{peaks[1] / peaks[num]:.2f}" for num in _FRAGMENTS[1:]),
                worst <= 0.1,
            ),
            Check("all bytes of a round", "the same", "the same" if len(totals) == 1 else "others", len(totals) == 1),
            Check(
                "loss above that without fragments",
                f"within the noise of {len(whole)} seeds, {noise:.3f}",
                f"{gap:+.4f}",
                gap <= noise,
            ),
        ),
        (
            Plot(
                "Bytes of a worker by step",
                "step",
                "kB sent",
                tuple(
                    Curve(f"{num} fragments", steps, tuple(each / 1e3 for each in traffic[num][: 2 * _ROUND]))
                    for num in (1, 4)
                ),
                y_range=(0, None),
            ),
            Plot(
                "Loss after all steps",
                "fragments",
                "mean cross-entropy",
                (Curve("loss", tuple(map(float, _FRAGMENTS)), tuple(losses.values())),),
                is_log_x=True,
                y_range=(0, None),
            ),
        ),
        f"{_WORKERS} workers, rounds of {_ROUND} inner steps, outer rate 0.7 with Nesterov momentum 0.9, on virtual "
        "time: which fragment is pushed when is the schedule of paceline.strategies.diloco(fragments=F), "
        "and bytes are those of its parameters. No quantization to 4 bits, so the paper's factor of 100 is not shown.",
    )


def _train(num_fragments: int, seed: int) -> tuple[float, list[int]]:
    """Return the last loss, and the bytes that a worker sends in each step."""
    rounds = ExchangeRounds(steps=_ROUND, outer_lr=0.7, outer_momentum=0.9, fragments=num_fragments)
    problem = Perceptron.make(seed)
    shared = problem.start()
    momentum, own = np.zeros_like(shared), [shared.copy() for _ in range(_WORKERS)]
    sent: list[int] = []
    for step in range(1, _STEPS + 1):
        for worker, values in enumerate(own):
            values -= _INNER_RATE * problem.gradient(values, worker, step)
        pushed = [turn for turn in range(num_fragments) if rounds.is_pushed(turn, step)]
        for turn in pushed:
            _exchange(
                shared[turn::num_fragments],
                momentum[turn::num_fragments],
                [each[turn::num_fragments] for each in own],
                rounds,
            )
        sent.append(sum(shared[turn::num_fragments].size * _NUMBER for turn in pushed))
    return problem.loss(shared), sent


def _exchange(shared: Floats, momentum: Floats, own: list[Floats], rounds: ExchangeRounds) -> None:
    """Take an outer step with the mean of what the workers have changed, and give all of them its values."""
    change = shared - np.mean(own, axis=0)
    momentum *= rounds.outer_momentum
    momentum += change
    shared -= rounds.outer_lr * (change + rounds.outer_momentum * momentum)
    for each in own:
        each[:] = shared


CLAIM: Final = Claim(
    "28",
    "Exchanging fragments in turn cuts the peak of the bandwidth",
    "Douillard et al. 2025 (Streaming DiLoCo)",
    "two orders of magnitude with 4 bits",
    "virtual",
    (0.2, 0.5),
    _run,
)
