"""Rules whose steps adapt to the gradients seen so far: Adagrad, Adagrad with one number a row, and Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch

from paceline.tensors.rows.rule import Numbers, StateColumn, ascent, declared

if TYPE_CHECKING:
    from torch import Tensor

_STEP = StateColumn("step", 2)
_BASE = 256


def count_step(digits: Tensor) -> Tensor:
    """Count one more update of each row, and return how many it has had: [n, 1], float64.

    The count has two digits to the base 256, the low one first: bfloat16 alone counts no further than 256.
    """
    ones, tens = digits[:, :1], digits[:, 1:]
    ones.add_(1)
    full = ones >= _BASE
    ones.masked_fill_(full, 0)
    tens.add_(full)
    return tens.double() * _BASE + ones.double()


@final
class AdagradRows:
    """`torch.optim.Adagrad` (Duchi, Hazan & Singer 2011), lazy.

    g += weight_decay w; s += g²; w -= lr / (1 + (t - 1) lr_decay) g / (√s + eps).

    State: s, `width` numbers a row, and with lr_decay the count t of the updates of the row itself, 2 numbers. Lazy:
    without weight_decay and lr_decay nothing is lost by it, as Adagrad leaves a row alone whose gradient is 0.
    """

    echo = ""

    def __init__(self, hyper: Numbers) -> None:
        total = StateColumn("sum", fill=hyper["initial_accumulator_value"])
        self.columns: tuple[StateColumn, ...] = (total, _STEP) if hyper["lr_decay"] else (total,)

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Take one step."""
        del echo
        gradient = ascent(values, gradient, hyper, hyper["weight_decay"])
        total = state["sum"].addcmul_(gradient, gradient)
        divisor = total.sqrt().add_(hyper["eps"])
        if not hyper["lr_decay"]:
            values.addcdiv_(gradient, divisor, value=-hyper["lr"])
            return
        step = count_step(declared(state, "step", "lr_decay"))
        rate = hyper["lr"] / (1 + (step - 1) * hyper["lr_decay"])
        values.sub_((gradient * rate.to(values.dtype)).div_(divisor))


@final
class RowwiseAdagradRows:
    """Adagrad with one accumulator a row, as large embedding tables use it (Mudigere et al. 2022).

    s += mean over the row of g²; w -= lr g / (√s + eps).

    State: s, 1 number a row whatever its width. Lazy: nothing is lost by it, a row of zeros changes nothing.
    """

    echo = ""

    def __init__(self, hyper: Numbers) -> None:
        self.columns = (StateColumn("sum", 1, hyper["initial_accumulator_value"]),)

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Take one step."""
        del echo
        total = state["sum"].add_(gradient.square().mean(dim=1, keepdim=True))
        values.addcmul_(gradient, hyper["lr"] / total.sqrt().add_(hyper["eps"]), value=-1)


@final
class AdamRows:
    """`torch.optim.Adam` (Kingma & Ba 2015) and `AdamW` (Loshchilov & Hutter 2019), lazy.

    m = β1 m + (1 - β1) g; v = β2 v + (1 - β2) g²; w -= lr m / (1 - β1ᵗ) / (√(v / (1 - β2ᵗ)) + eps).

    State: m and v, with amsgrad the greatest v as well, `width` numbers a row each, and t, 2 numbers.

    Lazy, which makes it a DIFFERENT algorithm from Adam: dense Adam lets m and v decay and moves every weight at every
    step, this one leaves absent rows as they are, and a row of zeros that is present is an update with g = 0. t counts
    the updates of the row itself, so its first step is as long as that of any other row; `torch.optim.SparseAdam`
    corrects by the steps of the whole table instead. Where every update has every row, it is Adam.
    """

    echo = ""

    def __init__(self, hyper: Numbers, *, decoupled: bool) -> None:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        self.columns = (*map(StateColumn, names if hyper["amsgrad"] else names[:2]), _STEP)
        self._decoupled = decoupled or bool(hyper.get("decoupled_weight_decay"))

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Take one step."""
        del echo
        decay, (beta1, beta2) = hyper["weight_decay"], hyper["betas"]
        if decay and self._decoupled:
            values.mul_(1 - hyper["lr"] * decay)
        gradient = ascent(values, gradient, hyper, 0.0 if self._decoupled else decay)
        average = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if hyper["amsgrad"]:
            greatest = declared(state, "max_exp_avg_sq", "amsgrad")
            square = torch.maximum(greatest, square, out=greatest)
        step = count_step(state["step"])
        length = hyper["lr"] / (1 - torch.pow(beta1, step))
        shrinkage = (1 - torch.pow(beta2, step)).sqrt_()
        divisor = square.sqrt().div_(shrinkage.to(values.dtype)).add_(hyper["eps"])
        values.sub_((average * length.to(values.dtype)).div_(divisor))
