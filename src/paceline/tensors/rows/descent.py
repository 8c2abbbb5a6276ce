"""Rules that step along the gradient: add, SGD with momentum, and a step with a soft threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from paceline.tensors.rows.rule import Numbers, StateColumn, ascent, declared, fresh_rows, soft_threshold

if TYPE_CHECKING:
    from torch import Tensor


@final
class AddRows:
    """Adds what is pushed: w += g. No state. An absent row and a present row of zeros are the same."""

    columns: tuple[StateColumn, ...] = ()
    echo = ""

    def __init__(self, hyper: Numbers) -> None:
        del hyper

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Add each gradient to its row."""
        del state, hyper, echo
        values.add_(gradient)


@final
class SGDRows:
    """`torch.optim.SGD`, lazy.

    g += weight_decay w; b = momentum b + (1 - dampening) g, and b = g the first time; w -= lr b, or
    lr (g + momentum b) with nesterov.

    State: with momentum b, `width` numbers a row, and without none. Lazy: velocity and weight decay act on a row when
    it is pushed, so an absent row rests, where the dense rule would let it drift on and decay.
    """

    echo = ""

    def __init__(self, hyper: Numbers) -> None:
        buffer = StateColumn("momentum_buffer", fill=math.nan)
        self.columns: tuple[StateColumn, ...] = (buffer,) if hyper["momentum"] else ()

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Take one step."""
        del echo
        step, momentum = ascent(values, gradient, hyper, hyper["weight_decay"]), hyper["momentum"]
        if momentum:
            buffer = declared(state, "momentum_buffer", "momentum")
            fresh = fresh_rows(buffer)
            buffer.mul_(momentum).add_(step, alpha=1 - hyper["dampening"])
            buffer[fresh] = step[fresh]
            step = step.add(buffer, alpha=momentum) if hyper["nesterov"] else buffer
        values.add_(step, alpha=-hyper["lr"])


@final
class ProximalRows:
    """Proximal gradient descent for an L1 penalty, known as ISTA.

    w = S(w - lr g, lr l1), where S(x, t) = sign(x) max(|x| - t, 0) is the soft threshold.

    No state. Lazy: the penalty pulls at a row when it is pushed; push zeros to let it act on a row alone.
    """

    columns: tuple[StateColumn, ...] = ()
    echo = ""

    def __init__(self, hyper: Numbers) -> None:
        del hyper

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Take one step, and what is then within the threshold becomes 0."""
        del state, echo
        values.add_(gradient, alpha=-hyper["lr"])
        values.copy_(soft_threshold(values, hyper["lr"] * hyper["l1"]))
