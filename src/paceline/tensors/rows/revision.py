"""Adagrad that repairs what delay did to its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch

from paceline.tensors.rows.rule import Numbers, StateColumn

if TYPE_CHECKING:
    from torch import Tensor


@final
class AdaptiveRevisionRows:
    """Adaptive Revision (McMahan & Streeter 2014, "Delay-Tolerant Algorithms", algorithm 3).

    b = G - (G as the reader saw it), what was applied between read and push; z += g (g + 2b); p' = max(p, z);
    η = lr / √p and η' = lr / √p'; w += (η - η') b - η' g; G += g; p = p'.

    The last step but one takes back what steps between read and push went too far, seen with what is known now. A
    gradient that is not stale has b = 0, and then this is Adagrad.

    State: G, z and p, `width` numbers a row each. G is sent with the values and comes back with the gradient, so that
    nothing is kept for readers; a row that a worker pushes without having read counts as read just now. Lazy: nothing
    is lost by it, as a row of zeros changes nothing but what it revises.
    """

    echo = "gradient_sum"

    def __init__(self, hyper: Numbers) -> None:
        start = hyper["initial_accumulator_value"]
        self.columns = (StateColumn(self.echo), StateColumn("z", fill=start), StateColumn("z_max", fill=start))

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Take one step."""
        total, z, peak = state["gradient_sum"], state["z"], state["z_max"]
        since = _since(total, echo)
        rate_before = peak.rsqrt().mul_(hyper["lr"])
        z.addcmul_(gradient, gradient + 2 * since)
        rate = torch.maximum(peak, z, out=peak).rsqrt().mul_(hyper["lr"])
        values.addcmul_(rate, gradient, value=-1).addcmul_(rate_before.sub_(rate), since)
        total.add_(gradient)


def _since(total: Tensor, echo: Tensor | None) -> Tensor:
    """Return the sum of the gradients since the reader's; 0 where nobody read."""
    return torch.zeros_like(total) if echo is None else torch.where(echo.isnan(), 0.0, total - echo)
