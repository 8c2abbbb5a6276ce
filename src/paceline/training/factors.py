"""The factors of gradients, recorded while backward runs: of each linear layer its inputs and its output gradients.

Gradients are computed as without it. Factors are only another way to send them, and count only where they are the
gradient that `step` pushes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from paceline.update.factors import Factors

_DTYPES = (torch.float32, torch.float64)  # in others, rounding errors hide what the factors may lack
_LEAST_BYTES = 64 << 10  # a smaller gradient travels in one message with the end of its clock


@dataclass(slots=True, weakref_slot=True, eq=False)
class WeightFactors:
    """The factors of the gradient of one weight, over all layers that have it and all backward passes of a step.

    Args:
        name: of the weight.
        weight: (M, N).
        tell: called with a line, once, if a gradient is not the product of what was recorded.
    """

    name: str
    weight: Tensor
    tell: Callable[[str], None]
    _arrived: list[Factors] = field(default_factory=list[Factors])  # from the backward pass that runs
    _kept: list[Factors] = field(default_factory=list[Factors])  # of what is in the gradient
    _has_told: bool = False
    _handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def follow(self, layers: Iterable[nn.Linear]) -> None:
        """Record what passes these layers, for the lifetime of this object or until `detach`."""
        on_forward, on_sum = WeakMethod(self._on_forward), WeakMethod(self._on_sum)
        for layer in layers:  # first of the layer's hooks, as others may replace its output
            self._handles.append(layer.register_forward_hook(_after_forward(on_forward), prepend=True))
        self._handles.append(self.weight.register_hook(_before_sum(on_sum)))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._arrived, self._kept = [], []

    def take(self, gradient: Tensor) -> Factors | None:
        """Return the factors of a gradient (M, N), and forget them; None if there are none or too many.

        None, too, if the gradient is not their product, as of a weight that is used outside of its layers as well, or
        after the gradient was clipped or scaled. This is told once.
        """
        found, self._kept, self._arrived = self._kept, [], []
        num_samples = sum(each.num_samples for each in found)
        if not found or not self._is_smaller(num_samples):
            return None
        factors = found[0]
        if len(found) > 1:
            factors = Factors(torch.cat([each.outputs for each in found]), torch.cat([each.inputs for each in found]))
        if factors.explain(gradient):
            return factors
        if not self._has_told and bool(gradient.isfinite().all()):
            self._has_told = True
            self.tell(
                f"the gradient of '{self.name}' is not the product of what passed its layers, and is sent whole: it is "
                "clipped or scaled after backward, or the weight is used elsewhere as well."
            )
        return None

    def _is_smaller(self, num_samples: int) -> bool:
        return num_samples * sum(self.weight.shape) < self.weight.numel()

    def _on_forward(self, layer: nn.Module, given: tuple[object, ...], output: Tensor) -> None:
        """Wait for the gradient at the output, unless this forward has none, or its gradient is not sent as factors."""
        inputs = given[0] if given else None
        if layer.weight is not self.weight or not isinstance(inputs, Tensor) or not output.requires_grad:
            return
        if inputs.dtype != self.weight.dtype or output.dtype != self.weight.dtype:
            return
        inputs = inputs.detach().reshape(-1, self.weight.shape[1])
        if self._is_smaller(len(inputs)):
            output.register_hook(partial(_at_output, ref(self), inputs))

    def add(self, factors: Factors) -> None:
        """Note what one layer has contributed to the gradient in this backward pass."""
        self._arrived.append(factors)

    def _on_sum(self) -> None:
        """Note that backward adds up the gradient; what is there before stays in it, or there was none."""
        before = self._kept if self.weight.grad is not None else []
        self._kept, self._arrived = before + self._arrived, []


def follow_layers(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]], tell: Callable[[str], None]
) -> dict[Tensor, WeightFactors]:
    """Record factors for the large weights of linear layers on the CPU that are among these named parameters."""
    layers: dict[Tensor, list[nn.Linear]] = {}
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            layers.setdefault(layer.weight, []).append(layer)
    found: dict[Tensor, WeightFactors] = {}
    for name, weight in parameters:
        is_fit = weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.nbytes >= _LEAST_BYTES
        if weight in layers and is_fit:
            found[weight] = WeightFactors(name, weight, tell)
            found[weight].follow(layers[weight])
    return found


def _after_forward(
    act: WeakMethod[Callable[[nn.Module, tuple[object, ...], Tensor], None]],
) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
    """Return a hook that a layer calls after its forward; it keeps no object alive."""

    def on_forward(layer: nn.Module, given: tuple[object, ...], output: Tensor) -> None:
        if torch.compiler.is_compiling():  # a compiled graph has no place for what is recorded
            return
        call = act()
        if call is not None:
            call(layer, given, output)

    return on_forward


def _before_sum(act: WeakMethod[Callable[[], None]]) -> Callable[[Tensor], None]:
    """Return a hook that autograd calls before it adds to a gradient; it keeps no object alive."""

    @unserializable_hook
    def on_sum(_: Tensor) -> None:
        call = act()
        if call is not None:
            call()

    return on_sum


def _at_output(weight: ref[WeightFactors], inputs: Tensor, gradient: Tensor) -> None:
    """Record the factors of one forward, when autograd knows the gradient at its output."""
    factors = weight()
    if factors is not None:
        outputs = gradient.detach().reshape(-1, gradient.shape[-1])
        factors.add(Factors(outputs, inputs))
