"""Local SGD and DiLoCo strategies: workers step locally and exchange their progress every few steps, for slow links."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.training.local_sgd_optimizer import LocalOptimizer
from paceline.training.local_sgd_rounds import ExchangeRounds
from paceline.training.optimizer import Settings, TrainingJob

_OUTER_LR = 0.7
_CAUTIOUS_LR = 0.07  # where momentum acts on each stale push


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """Strategy in which every worker steps its own model and servers merge them; see `paceline.diloco`."""

    rounds: ExchangeRounds

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> LocalOptimizer:
        """Make an optimizer that steps on its worker, and exchanges."""
        return LocalOptimizer(optimizer, model, settings, self.rounds, job)


def local_sgd(
    steps: int = 10,
    *,
    outer_lr: float = 1.0,
    fragments: int = 1,
    overlap_steps: int = 0,
    merge: float = 1.0,
    asynchronous: bool = False,
    quorum: int | None = None,
    grace_s: float = 0.0,
) -> LocalSGD:
    """Return local SGD for `paceline.distributed(strategy=...)`: every `steps` steps all continue from their mean.

    The same as `paceline.diloco` with an outer optimizer that only takes the mean.

    Args:
        steps: between two exchanges; traffic falls by this factor. 1 exchanges after every step.
        outer_lr: fraction of the way to the mean; asynchronous, how far each push moves the values.
        fragments: as in `paceline.diloco`, like all that follow.
        overlap_steps: number of steps taken while values are under way.
        merge: weight of the servers' values when they arrive.
        asynchronous: never wait for another worker.
        quorum: number of pushes that make an update.
        grace_s: seconds to wait for more pushes after a quorum.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.Adam(model.parameters())
        >>> optimizer = paceline.distributed(inner, strategy=paceline.local_sgd(steps=2), model=model, name="local")
        >>> for _ in range(4):
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
    """
    return LocalSGD(
        ExchangeRounds(steps, outer_lr, 0.0, fragments, overlap_steps, merge, asynchronous, quorum, grace_s)
    )


def diloco(
    steps: int = 50,
    *,
    outer_lr: float | None = None,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    overlap_steps: int = 0,
    merge: float = 1.0,
    asynchronous: bool = False,
    quorum: int | None = None,
    grace_s: float = 0.0,
    delayed: int | None = None,
) -> LocalSGD:
    """Return DiLoCo for `paceline.distributed(strategy=...)`: workers step alone, servers step with their progress.

    The wrapped optimizer is the inner one: it steps on its worker, and its state stays there from round to round. Every
    `steps` steps, a worker's progress goes to the servers as a gradient (old values minus new), weighted by the samples
    behind it; these take a step of SGD with Nesterov momentum, and the worker continues from the new values. Buffers of
    the model are averaged.

    Args:
        steps: of each worker between two exchanges; traffic falls by this factor.
        outer_lr: step size of the outer optimizer, 0.7 by default. Asynchronous, where momentum would act on every
            stale push, it is 0.07; 0.7 again with `delayed`, or without momentum.
        outer_momentum: of the outer optimizer.
        fragments: exchange the parameters in this many parts, spread evenly over a round: the same traffic, in
            smaller bursts.
        overlap_steps: merge the servers' answer this many steps after the push, instead of waiting for it.
        merge: fraction of the way from the worker's own values to the servers'; 1 takes the servers'. With less, the
            steps taken while they were under way stay in part, and go with the worker's next push.
        asynchronous: each push is a step of the outer optimizer when it arrives, and no worker waits for another.
        quorum: asynchronous; number of pushes merged into one step.
        grace_s: seconds after a quorum in which more pushes may join its step; see `paceline.update.Merging`.
        delayed: asynchronous; number of pushes for each use of momentum, see `paceline.update.DelayedNesterov`.

    Raises:
        UsageError: a number is out of its range, or has no effect together with the others.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> inner = torch.optim.AdamW(model.parameters())
        >>> optimizer = paceline.distributed(inner, strategy=paceline.diloco(steps=2), model=model, name="diloco")
        >>> for _ in range(4):
        ...     model(torch.ones(2)).sum().backward()
        ...     optimizer.step()
    """
    if outer_lr is None:
        is_naive = asynchronous and outer_momentum > 0 and delayed is None
        outer_lr = _CAUTIOUS_LR if is_naive else _OUTER_LR
    return LocalSGD(
        ExchangeRounds(
            steps,
            outer_lr,
            outer_momentum,
            fragments,
            overlap_steps,
            merge,
            asynchronous,
            quorum,
            grace_s,
            delayed,
        )
    )
