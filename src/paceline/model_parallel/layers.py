"""A model as a sequence of layers, each fed with the output of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.tensor_plan import has_hooks


@runtime_checkable
class Layered(Protocol):
    """A model that says itself which layers it is made of."""

    def layers(self) -> Sequence[nn.Module]:
        """Return modules whose composition is the forward of the model."""
        ...


@runtime_checkable
class Resettable(Protocol):
    """A module that can draw its parameters anew."""

    def reset_parameters(self) -> None:
        """Draw them."""
        ...


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One layer, by the name it has in its model."""

    name: str
    module: nn.Module

    @property
    def num_parameters(self) -> int:
        """Number of elements of its parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())


def layers_of(model: nn.Module) -> list[ModelLayer]:
    """Return the layers of a `Sequential`, those inside of it flattened, or of a model that has a method `layers`.

    A `Sequential` inside that has hooks stays one layer, so that they are called.

    Raises:
        UsageError: another kind of model, one with hooks of its own, or `layers` leaves parameters out.

    Example:
        >>> inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> [layer.name for layer in layers_of(nn.Sequential(inner, nn.Linear(2, 1)))]
        ['0.0', '0.1', '1']
    """
    if has_hooks(model):
        raise UsageError(
            f"a {type(model).__name__} with hooks cannot be split: its layers are called, and not the model itself. "
            "Give the hooks to its first or last layer."
        )
    if type(model) is nn.Sequential:
        return _flattened(model, "")
    if not isinstance(model, Layered) or "layers" in dict(model.named_children()):
        raise UsageError(
            f"a {type(model).__name__} cannot be split: expected a torch.nn.Sequential, or a model with a method "
            "layers() that returns the modules whose composition is its forward."
        )
    names = {id(module): name for name, module in model.named_modules()}
    found = [ModelLayer(names.get(id(module), f"layer{index}"), module) for index, module in enumerate(model.layers())]
    held = {id(parameter) for layer in found for parameter in layer.module.parameters()}
    lost = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    if lost:
        raise UsageError(
            f"{type(model).__name__}.layers() leaves out parameters of the model: {', '.join(lost[:5])}. Its layers "
            "must be all that forward does, one after the other."
        )
    return found


def _flattened(model: nn.Sequential, prefix: str) -> list[ModelLayer]:
    layers: list[ModelLayer] = []
    for key, module in model._modules.items():  # pyright: ignore[reportPrivateUsage] - a module may be in it twice
        assert module is not None, "a Sequential has only modules"
        if type(module) is nn.Sequential and not has_hooks(module):
            layers.extend(_flattened(module, f"{prefix}{key}."))
        else:
            layers.append(ModelLayer(f"{prefix}{key}", module))
    return layers


def starts_of(layers: Sequence[ModelLayer]) -> list[int]:
    """Return the layers that a stage after the first may begin with.

    Those that have something to learn, with no parameter that a layer before and one from there on share.

    Example:
        >>> first, last = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> layers = [ModelLayer(str(n), one) for n, one in enumerate((first, nn.Tanh(), nn.Linear(2, 2), last))]
        >>> starts_of(layers)
        [2, 3]
        >>> last.weight = first.weight
        >>> starts_of(layers)
        []
    """
    spans: dict[int, tuple[int, int]] = {}  # the first and the last layer that has each parameter
    for index, layer in enumerate(layers):
        for parameter in layer.module.parameters():
            spans[id(parameter)] = (spans.get(id(parameter), (index, index))[0], index)
    learning = [index for index, layer in enumerate(layers) if layer.num_parameters][1:]
    return [start for start in learning if not any(first < start <= last for first, last in spans.values())]


def require_apart(layers: Sequence[ModelLayer], ends: Sequence[int]) -> None:
    """Raise UsageError when stages share a parameter: each would learn its own."""
    owners: dict[int, tuple[int, str]] = {}
    start = 0
    for stage, end in enumerate(ends):
        for layer in layers[start:end]:
            for name, parameter in layer.module.named_parameters(layer.name):
                other, first = owners.setdefault(id(parameter), (stage, name))
                if other != stage:
                    raise UsageError(
                        f"'{first}' of stage {other} and '{name}' of stage {stage} are one parameter: stages cannot "
                        "share any. Untie them, or let one stage hold both (placement=...)."
                    )
        start = end


def tree_of(layers: Sequence[ModelLayer]) -> nn.Module:
    """Return a module that holds these layers under the names that they have in their model."""
    root = nn.Module()
    for layer in layers:
        *path, last = layer.name.split(".")
        holder = root
        for step in path:
            if step not in dict(holder.named_children()):
                holder.add_module(step, nn.Module())
            holder = holder.get_submodule(step)
        holder.add_module(last, layer.module)
    return root


def drop(layers: Sequence[ModelLayer], kept: Sequence[ModelLayer]) -> None:
    """Free the memory of layers that other workers hold: their tensors have shapes left, but no values."""
    own = {id(module) for layer in kept for module in layer.module.modules()}
    for layer in layers:
        if own.isdisjoint(map(id, layer.module.modules())):
            layer.module.to("meta")


def materialise(model: nn.Module) -> None:
    """Give memory and first values to what was built on the meta device.

    Raises:
        UsageError: a module with parameters that cannot draw them, as it has no `reset_parameters`.
    """
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        resettable: object = module
        if not isinstance(resettable, Resettable):
            raise UsageError(
                f"'{name}', a {type(module).__name__}, was built on the meta device and has no reset_parameters() to "
                "draw first values: give it one, or build the model on the CPU."
            )
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            resettable.reset_parameters()
