"""Claim 23: a pipeline that never drains has no bubble, and its gradients are right only if weights are stashed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from paceline.tools.plan.estimate import bubble_share
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot

_STAGES: Final = (2, 4, 8)
_WIDTH: Final = 16
_BATCH: Final = 8
_NUM_BATCHES: Final = 40
_RATE: Final = 0.2


@dataclass(slots=True)
class _Stage:
    """One stage: its weights now, and those that batches under way were forwarded with."""

    weight: Tensor
    stashed: dict[int, tuple[Tensor, Tensor]]  # batch -> its inputs, and the weights of its forward

    def forward(self, batch: int, inputs: Tensor) -> Tensor:
        self.stashed[batch] = inputs, self.weight.clone()
        return torch.tanh(inputs @ self.weight)

    def backward(self, batch: int, gradient: Tensor, *, is_stashing: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of the inputs and of the weights; the weights of now, if they are not stashed."""
        inputs, then = self.stashed.pop(batch)
        weight = then if is_stashing else self.weight
        inner = gradient * (1 - torch.tanh(inputs @ weight) ** 2)
        return inner @ weight.t(), inputs.t() @ inner


def _order(num_stages: int, num_batches: int) -> list[list[tuple[str, int]]]:
    """Return the work of each stage under 1F1B without a flush: some forwards first, then one backward after each."""
    plans: list[list[tuple[str, int]]] = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_batches)
        plan = [("forward", batch) for batch in range(ahead)]
        for batch in range(num_batches):
            plan.append(("backward", batch))
            if batch + ahead < num_batches:
                plan.append(("forward", batch + ahead))
        plans.append(plan)
    return plans


def _schedule(plans: list[list[tuple[str, int]]]) -> tuple[list[tuple[float, int, str, int]], float]:
    """Run plans on virtual time, forward 1 and backward 2 long; return the work in order, and the idle share.

    The idle share is that of the steady state: from when the last stage begins to when the first stage forwards last.
    """
    num_stages, ends, free = len(plans), dict[tuple[str, int, int], float](), [0.0] * len(plans)
    done, work = [0] * num_stages, list[tuple[float, int, str, int]]()
    while any(done[stage] < len(plans[stage]) for stage in range(num_stages)):
        for stage in range(num_stages):
            while done[stage] < len(plans[stage]):
                kind, batch = plans[stage][done[stage]]
                other = stage - 1 if kind == "forward" else stage + 1
                needs = (kind, other, batch) if 0 <= other < num_stages else ("forward", stage, batch)
                if kind == "forward" and other < 0:
                    ready_s = 0.0
                elif needs in ends:
                    ready_s = ends[needs]
                else:
                    break
                began_s = max(free[stage], ready_s)
                free[stage] = ends[kind, stage, batch] = began_s + (1 if kind == "forward" else 2)
                work.append((began_s, stage, kind, batch))
                done[stage] += 1
    work.sort()
    first, last = 3.0 * num_stages, max(began for began, stage, kind, _ in work if stage == 0 and kind == "forward")
    inside = [(began, 1.0 if kind == "forward" else 2.0) for began, _, kind, _ in work if first <= began < last]
    return work, max(0.0, 1 - sum(took for _, took in inside) / (num_stages * (last - first)))


class _Training(msgspec.Struct, frozen=True):
    """What came of a training: the loss by batch, the largest relative error of a gradient, and versions kept."""

    losses: tuple[float, ...]
    error: float
    versions: int
    idle: float


def _train(num_stages: int, seed: int, *, is_stashing: bool) -> _Training:
    generator = torch.Generator().manual_seed(seed)
    stages = [
        _Stage(torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64) / _WIDTH**0.5 * 1.2, {})
        for _ in range(num_stages)
    ]
    teacher = torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64) / _WIDTH**0.5
    data = [torch.randn(_BATCH, _WIDTH, generator=generator, dtype=torch.float64) for _ in range(_NUM_BATCHES)]
    work, idle = _schedule(_order(num_stages, _NUM_BATCHES))
    passed: dict[tuple[str, int, int], Tensor] = {}
    used: dict[int, list[Tensor]] = {batch: [] for batch in range(_NUM_BATCHES)}
    found: dict[int, list[Tensor]] = {batch: [] for batch in range(_NUM_BATCHES)}
    losses, versions = dict[int, float](), 0
    for _, place, kind, batch in work:
        stage = stages[place]
        if kind == "forward":
            used[batch].append(stage.weight.clone())
            passed["forward", place, batch] = stage.forward(
                batch, passed["forward", place - 1, batch] if place else data[batch]
            )
            versions = max(versions, len(stage.stashed))
            continue
        if place == num_stages - 1:
            difference = passed["forward", place, batch] - torch.tanh(data[batch] @ teacher)
            losses[batch], gradient = float(difference.square().mean()), 2 * difference / difference.numel()
        else:
            gradient = passed["backward", place + 1, batch]
        passed["backward", place, batch], own = stage.backward(batch, gradient, is_stashing=is_stashing)
        found[batch].insert(0, own)
        stage.weight = stage.weight - _RATE * own
    error = max(_error(used[batch], found[batch], data[batch], teacher) for batch in range(_NUM_BATCHES))
    return _Training(tuple(losses[batch] for batch in range(_NUM_BATCHES)), error, versions, idle)


def _error(used: list[Tensor], found: list[Tensor], inputs: Tensor, teacher: Tensor) -> float:
    """Return how far gradients are from those of autograd through the weights that forward used."""
    weights = [weight.clone().requires_grad_() for weight in used]
    outputs = inputs
    for weight in weights:
        outputs = torch.tanh(outputs @ weight)
    (outputs - torch.tanh(inputs @ teacher)).square().mean().backward()
    exact = [weight.grad for weight in weights]
    return max(
        float((own - true).norm() / true.norm()) for own, true in zip(found, exact, strict=True) if true is not None
    )


def _run(options: ClaimOptions) -> Finding:
    stashed = {num: _train(num, options.seed, is_stashing=True) for num in _STAGES}
    plain = {num: _train(num, options.seed, is_stashing=False) for num in _STAGES}
    idle = tuple(stashed[num].idle for num in _STAGES)
    gpipe = tuple(bubble_share(num, num) for num in _STAGES)
    good, bad = max(each.error for each in stashed.values()), min(each.error for each in plain.values())
    names = tuple(f"{num} stages" for num in _STAGES)
    kept = [stashed[num].versions for num in _STAGES]
    batches = tuple(float(each) for each in range(_NUM_BATCHES))
    return Finding(
        (
            Check(
                "idle share of 1F1B without a flush, steady state", "at most 1 %", f"{max(idle):.1%}", max(idle) <= 0.01
            ),
            Check("gradients with stashed weights: relative error", "at most 1e-12", f"{good:.0e}", good <= 1e-12),
            Check("the same without stashing", "the check fails: above 1e-3", f"{bad:.0e}", bad > 1e-3),
            Check(
                "versions of the weights on the first stage",
                "as many as stages",
                ", ".join(map(str, kept)),
                kept == list(_STAGES),
            ),
        ),
        (
            Plot(
                "Idle share at as many micro-batches as stages",
                "",
                "share",
                (Curve("GPipe, filled and drained", names, gpipe), Curve("1F1B without a flush", names, idle)),
                "bars",
                y_range=(0, None),
            ),
            Plot(
                "Loss, 8 stages",
                "mini-batch",
                "square loss",
                (
                    Curve("stashed weights", batches, stashed[8].losses),
                    Curve("weights of now", batches, plain[8].losses),
                ),
                y_range=(0, None),
            ),
        ),
        "Schedules run on virtual time, forward 1 and backward 2 long, with real float64 layers; exact gradients "
        "are autograd's, through the weights that each "
        "batch's forward used. Paceline's pipelines (gpipe, 1f1b) flush in every step and need no stash: claim 22 "
        "measures those. A pipeline that "
        "never drains is shown here, and is not a schedule of a job.",
    )


CLAIM: Final = Claim(
    "23",
    "1F1B without a flush has no bubble; stashed weights keep gradients valid",
    "Narayanan et al. 2019 (PipeDream)",
    "up to 5.3 times data parallel",
    "virtual",
    (0.1, 0.1),
    _run,
    ("A11",),
)
