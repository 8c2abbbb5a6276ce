"""Follow the regularized leader: the rule of sparse linear models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch

from paceline.tensors.rows.rule import Numbers, StateColumn, fresh_rows, soft_threshold

if TYPE_CHECKING:
    from torch import Tensor


@final
class FTRLRows:
    """FTRL-proximal with per-coordinate rates (McMahan et al. 2013, "Ad Click Prediction", algorithm 1).

    σ = (√(n + g²) - √n) / alpha; z += g - σ w; n += g²;
    w = 0 where |z| <= l1, else -(z - sign(z) l1) / ((beta + √n) / alpha + l2).

    State: z and n, `width` numbers a row each; w follows from them. A row whose first values are not 0 starts with the
    z that has these values at n = 0, so they are where it begins and not forgotten. Lazy: nothing is lost by it, as a
    row of zeros changes neither z nor n.
    """

    columns = (StateColumn("z", fill=math.nan), StateColumn("n"))
    echo = ""

    def __init__(self, hyper: Numbers) -> None:
        del hyper

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Take one step."""
        del echo
        alpha, beta, l1, l2 = hyper["alpha"], hyper["beta"], hyper["l1"], hyper["l2"]
        z, squares = state["z"], state["n"]
        fresh = fresh_rows(z)
        first = values[fresh]
        z[fresh] = first.mul(-(beta / alpha + l2)).sub_(first.sign(), alpha=l1)
        root_before = squares.sqrt()
        root = squares.addcmul_(gradient, gradient).sqrt()
        z.add_(gradient).addcmul_(root - root_before, values, value=-1 / alpha)
        torch.div(soft_threshold(-z, l1), root.add_(beta).div_(alpha).add_(l2), out=values)
