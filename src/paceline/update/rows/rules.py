"""Row rules: the interface, and the built-in rules by name. State lies in columns beside the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final, runtime_checkable

import msgspec
import torch
from torch.nn.functional import softshrink

from paceline.errors import UsageError
from paceline.update.rules import require_finite
from paceline.update.torch_rule import PREFIX, check_groups
from paceline.update.user_code import build_own, missing_members, own_code

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rules import RuleSpec

Numbers: TypeAlias = Mapping[str, Any]  # the hyperparameters, as of this update


class StateColumn(msgspec.Struct, frozen=True):
    """A column of state that every row has, in the dtype of its table.

    Args:
        name: unique in its rule.
        width: numbers a row; 0 is as many as the row has.
        fill: the initial number; NaN can mark rows that were never written.
    """

    name: str
    width: int = 0
    fill: float = 0.0

    def elements(self, row_width: int) -> int:
        """Return how many numbers a row of `row_width` numbers has in this column."""
        return self.width or row_width


@runtime_checkable
class RowRule(Protocol):
    """Turns the gradients of some rows into new values; stateless: the state is an argument.

    Every row rule is lazy: rows that are not in an update do not change, unlike under the dense rule of its name.
    A class given as "package.module:Rule" is built without arguments and must have these three members.
    """

    @property
    def columns(self) -> tuple[StateColumn, ...]:
        """Return the state that is kept for a row; always the same."""
        ...

    @property
    def echo(self) -> str:
        """Return the column that is sent with values and comes back with the gradients computed from them, or ""."""
        ...

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Change `values` and `state` in place; called without autograd, with copies that lie nowhere else.

        Args:
            values: [n, width], float32 or float64 whatever the table has; n distinct rows, possibly none.
            gradient: of the same shape and dtype; never write to it.
            state: [n, width of the column] each, by name.
            hyper: the hyperparameters, as of this update.
            echo: the echo column as the worker read it, NaN for rows that it has not read; None if it has read none.
        """
        ...


def declared(state: Mapping[str, Tensor], column: str, number: str) -> Tensor:
    """Return a column that hyperparameter `number` needs; raises UsageError if the rows lack it."""
    if column not in state:
        raise UsageError(
            f"{number} is in use now, but it was not when the table was declared, so its rows have no {column}. "
            f"Declare the table with the {number} it will need."
        )
    return state[column]


def fresh_rows(column: Tensor) -> Tensor:
    """Return the positions of the rows that were never written, in a column that starts as NaN."""
    return column[:, 0].isnan().nonzero()[:, 0]


def ascent(values: Tensor, gradient: Tensor, hyper: Numbers, decay: float) -> Tensor:
    """Return the gradient to descend along, with weight decay, added as torch.optim does."""
    if hyper["maximize"]:
        gradient = gradient.neg()
    return gradient.add(values, alpha=decay) if decay else gradient


def soft_threshold(numbers: Tensor, threshold: float) -> Tensor:
    """Return sign(x) max(|x| - threshold, 0) of each number, never -0."""
    return softshrink(numbers, threshold).add_(0.0)


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
    """Return the sum of the gradients since the worker read the rows; 0 for rows that it has not read."""
    return torch.zeros_like(total) if echo is None else torch.where(echo.isnan(), 0.0, total - echo)


_MEMBERS = ("columns", "echo", "update")


class _Known(msgspec.Struct, frozen=True):
    """How a rule is built from its hyperparameters, and the names of those it needs."""

    build: Callable[[Numbers], RowRule]
    numbers: str


_ADAM = "lr betas eps weight_decay amsgrad maximize"
_KNOWN: dict[str, _Known] = {
    "add": _Known(AddRows, ""),
    "torch.optim.SGD": _Known(SGDRows, "lr momentum dampening nesterov weight_decay maximize"),
    "torch.optim.Adagrad": _Known(AdagradRows, "lr lr_decay weight_decay initial_accumulator_value eps maximize"),
    "torch.optim.Adam": _Known(partial(AdamRows, decoupled=False), _ADAM),
    "torch.optim.AdamW": _Known(partial(AdamRows, decoupled=True), _ADAM),
    "rowwise_adagrad": _Known(RowwiseAdagradRows, "lr initial_accumulator_value eps"),
    "ftrl": _Known(FTRLRows, "alpha beta l1 l2"),
    "adaptive_revision": _Known(AdaptiveRevisionRows, "lr initial_accumulator_value"),
    "proximal": _Known(ProximalRows, "lr l1"),
}


def row_rule(spec: RuleSpec, allowed: AbstractSet[str] | None) -> RowRule:
    """Return the rule for rows that `spec` names; it has no memory, so one object can serve many tables.

    Args:
        spec: what a worker asked for.
        allowed: the import paths that may be loaded; None allows all, which is for code that you wrote yourself.

    Raises:
        UsageError: there is no such rule for rows, it may not be loaded, it is not a row rule, or a number of it is not
            finite.

    Example:
        >>> from paceline.update.named_rules import RowwiseAdagrad
        >>> row_rule(RowwiseAdagrad(lr=0.1), allowed=None).columns
        (StateColumn(name='sum', width=1, fill=0.0),)
    """
    require_finite(spec)
    hyper = spec.groups[0]
    known = _KNOWN.get(spec.name)
    if known is None:
        with own_code(f"The update rule {spec.name}"):
            return _InFullPrecision(_own(spec.name, allowed))
    lacking = [name for name in known.numbers.split() if hyper.get(name) is None]
    if lacking:
        raise UsageError(f"The update rule {spec.name} lacks {', '.join(lacking)}. Take it from paceline.update.")
    if spec.name.startswith(PREFIX):
        check_groups(spec)
    else:
        unknown = sorted(hyper.keys() - set(known.numbers.split()))[:3]
        if unknown:
            raise UsageError(f"The update rule {spec.name} has no {unknown}, expected {known.numbers or 'none'}.")
    return _InFullPrecision(known.build(hyper))


def _own(path: str, allowed: AbstractSet[str] | None) -> RowRule:
    if ":" not in path:
        raise UsageError(
            f"There is no form of {path} for rows. Row tables have {', '.join(_KNOWN)}, "
            "and row rules of your own by their import path: 'package.module:Rule'."
        )
    made = build_own(path, allowed)
    if not isinstance(made, RowRule):
        missing = missing_members(made, _MEMBERS)
        raise UsageError(f"{path} is not a rule for rows: it has no {missing}. See paceline.update.rows.rules.RowRule.")
    names = [column.name for column in made.columns]
    if len(set(names)) < len(names):
        raise UsageError(f"{path} has two columns of one name: {', '.join(names)}.")
    if made.echo and made.echo not in names:
        raise UsageError(f"{path} echoes '{made.echo}', which is none of its columns: {', '.join(names) or 'none'}.")
    return made


@final
class _InFullPrecision:
    """Makes a rule compute in float32 for rows of 16 bits, in which squares and eps would vanish."""

    def __init__(self, rule: RowRule) -> None:
        self._rule = rule
        self.columns = rule.columns
        self.echo = rule.echo

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Change values and state in place, rounding once."""
        with own_code("The update rule"):
            self._update(values, gradient, state, hyper, echo)

    def _update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        if values.dtype.itemsize >= torch.float32.itemsize:
            self._rule.update(values, gradient, state, hyper, echo)
            return
        wide, wide_state = values.float(), {name: column.float() for name, column in state.items()}
        self._rule.update(wide, gradient.float(), wide_state, hyper, None if echo is None else echo.float())
        values.copy_(wide)
        for name, column in state.items():
            column.copy_(wide_state[name])
