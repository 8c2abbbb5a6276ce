"""Kernels: element-wise update rules as steps on flat memory, bit-identical to torch.optim on a CPU.

Kernels call torch's operations in torch's order. Results go to reused memory, so that a chunk stays in the cache.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, final

import msgspec
import torch

from paceline.torch_private import FUSED_ADAGRAD, FUSED_ADAM, FUSED_ADAMW, FUSED_SGD
from paceline.update.rules import Granularity, RuleSpec

if TYPE_CHECKING:
    from torch import Tensor

Numbers: TypeAlias = Mapping[str, Any]  # hyperparameters of one group


class Operands(msgspec.Struct, frozen=True):
    """Operands of one step: flat tensors of one chunk, one group and one age.

    Args:
        values: changed in place.
        gradients: one for each value; read only.
        state: by name, one for each value; changed in place.
        step: number of this step, from 1.
        fresh: whether the state has never been written.
        spare: (2, elements of the longest tensor), scratch memory.
        divisor: divisor of the gradients; not 1 only if the kernel `divides`, which may overwrite gradients.
    """

    values: Sequence[Tensor]
    gradients: Sequence[Tensor]
    state: Mapping[str, Sequence[Tensor]]
    step: float
    fresh: bool
    spare: Tensor
    divisor: float = 1.0

    def one_by_one(self) -> list[tuple[Tensor, Tensor, Mapping[str, Tensor]]]:
        """Return value, gradient and state of each tensor."""
        return [
            (value, gradient, {name: tensors[index] for name, tensors in self.state.items()})
            for index, (value, gradient) in enumerate(zip(self.values, self.gradients, strict=True))
        ]

    def steps(self) -> list[Tensor]:
        """Return the step as an argument of torch's fused operations."""
        return [torch.tensor(self.step, dtype=torch.float32)] * len(self.values)

    def scaling(self) -> dict[str, Tensor]:
        """Return the divisor as an argument of torch's fused operations."""
        return {} if self.divisor == 1.0 else {"grad_scale": torch.tensor(self.divisor, dtype=torch.float32)}

    def gradient_of(self, value: Tensor, gradient: Tensor, numbers: Numbers, decay: float) -> Tensor:
        """Return the gradient to descend, with weight decay; a changed one is in the first spare row."""
        out = self.spare[0, : value.numel()]
        if numbers["maximize"]:
            gradient = torch.neg(gradient, out=out)
        if decay:
            gradient = torch.add(gradient, value, alpha=decay, out=out)
        return gradient


class Kernel(ABC):
    """One update rule. It keeps no state: the state of the elements is an argument."""

    granularity: ClassVar[Granularity] = "element"
    known: ClassVar[tuple[str, ...]] = ()  # all states that an element may have
    counts_steps: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        self.name = name

    def names(self, numbers: Numbers) -> tuple[str, ...]:
        """Return the states of an element after a step."""
        del numbers
        return self.known

    def initial(self, numbers: Numbers) -> Mapping[str, float]:
        """Return the states that elements have before the first step, and their values; other states start at 0."""
        del numbers
        return {}

    def divides(self, numbers: Numbers) -> bool:
        """Return whether a step divides the gradients, as torch's fused operations do at no cost."""
        return bool(numbers.get("fused"))

    @abstractmethod
    def step(self, at: Operands, numbers: Numbers) -> None:
        """Take one step."""


@final
class AddKernel(Kernel):
    """Adds gradients to values."""

    def step(self, at: Operands, numbers: Numbers) -> None:
        """Add each gradient to its value."""
        for value, gradient in zip(at.values, at.gradients, strict=True):
            value.add_(gradient)


@final
class SGDKernel(Kernel):
    """`torch.optim.SGD`."""

    known = ("momentum_buffer",)

    def names(self, numbers: Numbers) -> tuple[str, ...]:
        """Return the momentum buffer, if momentum is not 0."""
        return self.known if numbers["momentum"] else ()

    def step(self, at: Operands, numbers: Numbers) -> None:
        """Take one step."""
        if not numbers.get("fused"):
            for value, gradient, state in at.one_by_one():
                self._step(at, value, at.gradient_of(value, gradient, numbers, numbers["weight_decay"]), state, numbers)
            return
        FUSED_SGD(
            at.values,
            at.gradients,
            at.state.get("momentum_buffer", []),
            **{key: numbers[key] for key in ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")},
            is_first_step=at.fresh and bool(numbers["momentum"]),
            **at.scaling(),
        )

    def _step(
        self, at: Operands, value: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Numbers
    ) -> None:
        if numbers["momentum"]:
            buffer = state["momentum_buffer"]
            if at.fresh:
                buffer.copy_(gradient)
            else:
                buffer.mul_(numbers["momentum"]).add_(gradient, alpha=1 - numbers["dampening"])
            if numbers["nesterov"]:
                out = at.spare[0, : value.numel()]
                gradient = torch.add(gradient, buffer, alpha=numbers["momentum"], out=out)
            else:
                gradient = buffer
        value.add_(gradient, alpha=-numbers["lr"])


@final
class AdamKernel(Kernel):
    """`torch.optim.Adam` and `torch.optim.AdamW`."""

    known = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    counts_steps = True

    def names(self, numbers: Numbers) -> tuple[str, ...]:
        """Return the two averages, and with amsgrad the maximum of the second one."""
        return self.known if numbers["amsgrad"] else self.known[:2]

    def step(self, at: Operands, numbers: Numbers) -> None:
        """Take one step."""
        decoupled = self.name.endswith("AdamW") or bool(numbers.get("decoupled_weight_decay"))
        if not numbers.get("fused"):
            for value, gradient, state in at.one_by_one():
                self._step(at, value, gradient, state, numbers, decoupled=decoupled)
            return
        fused = FUSED_ADAMW if decoupled else FUSED_ADAM
        fused(
            at.values,
            at.gradients,
            *(at.state.get(name, []) for name in self.known),
            at.steps(),
            beta1=numbers["betas"][0],
            beta2=numbers["betas"][1],
            **{key: numbers[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")},
            **at.scaling(),
        )

    def _step(
        self,
        at: Operands,
        value: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        numbers: Numbers,
        *,
        decoupled: bool,
    ) -> None:
        decay, (beta1, beta2) = numbers["weight_decay"], numbers["betas"]
        if decay and decoupled:
            value.mul_(1 - numbers["lr"] * decay)
        gradient = at.gradient_of(value, gradient, numbers, 0.0 if decoupled else decay)
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if numbers["amsgrad"]:
            square = torch.maximum(state["max_exp_avg_sq"], square, out=state["max_exp_avg_sq"])
        divisor = torch.sqrt(square, out=at.spare[1, : value.numel()])
        divisor.div_((1 - beta2**at.step) ** 0.5).add_(numbers["eps"])
        value.addcdiv_(average, divisor, value=-(numbers["lr"] / (1 - beta1**at.step)))


@final
class AdagradKernel(Kernel):
    """`torch.optim.Adagrad`."""

    known = ("sum",)
    counts_steps = True

    def initial(self, numbers: Numbers) -> Mapping[str, float]:
        """Return the initial sum of squares."""
        return {"sum": numbers["initial_accumulator_value"]}

    def step(self, at: Operands, numbers: Numbers) -> None:
        """Take one step."""
        if numbers.get("fused"):
            plain = {key: numbers[key] for key in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
            FUSED_ADAGRAD(at.values, at.gradients, at.state["sum"], at.steps(), **plain, **at.scaling())
            return
        for value, pushed, state in at.one_by_one():
            gradient = at.gradient_of(value, pushed, numbers, numbers["weight_decay"])
            state["sum"].addcmul_(gradient, gradient, value=1)
            divisor = torch.sqrt(state["sum"], out=at.spare[1, : value.numel()]).add_(numbers["eps"])
            value.addcdiv_(gradient, divisor, value=-(numbers["lr"] / (1 + (at.step - 1) * numbers["lr_decay"])))


@final
class DelayedNesterovKernel(Kernel):
    """Nesterov momentum once in `every` updates, on their mean; other updates take a part of a plain step.

    `every` updates together are exactly one step of `torch.optim.SGD` with their mean.
    """

    known = ("momentum_buffer", "sum")
    counts_steps = True

    def step(self, at: Operands, numbers: Numbers) -> None:
        """Take one step."""
        every, lr, momentum = numbers["every"], numbers["lr"], numbers["momentum"]
        for value, gradient, state in at.one_by_one():
            buffer, total = state["momentum_buffer"], state["sum"]
            total.add_(gradient)
            value.add_(gradient, alpha=-lr / every)
            if at.step % every == 0:
                buffer.mul_(momentum).add_(total, alpha=1 / every)
                value.add_(buffer, alpha=-lr * momentum)
                total.zero_()


_KERNELS: dict[str, type[Kernel]] = {
    "add": AddKernel,
    "delayed_nesterov": DelayedNesterovKernel,
    "torch.optim.SGD": SGDKernel,
    "torch.optim.Adam": AdamKernel,
    "torch.optim.AdamW": AdamKernel,
    "torch.optim.Adagrad": AdagradKernel,
}

# Hyperparameters of the rules that are not in torch.optim.
OWN_NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {"add": (), "delayed_nesterov": ("lr", "momentum", "every")}


def kernel_of(spec: RuleSpec) -> Kernel | None:
    """Return the kernel of a rule; None for a rule that runs on whole tensors, as with torch's multi-tensor loops."""
    found = _KERNELS.get(spec.name)
    return None if found is None or any(group.get("foreach") for group in spec.groups) else found(spec.name)
