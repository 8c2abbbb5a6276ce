"""Parameters packed into one flat vector and unpacked again, in the order of the optimizer's groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.update.table import DType, Segment, position_hint, positional_name

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, slots=True)
class FlatParameters:
    """Tensors laid end to end: (elements of all,), on the CPU, of their common dtype.

    Example:
        >>> weights = FlatParameters.over({"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
        >>> flat = weights.empty()
        >>> weights.pack_values(flat)
        >>> flat
        tensor([1., 1., 1., 1., 0., 0.])
    """

    named: Mapping[str, Tensor]
    dtype: DType
    tensors: tuple[Tensor, ...] = field(init=False)  # in order
    # Where each tensor lies in a flat vector: its first element, and one past its last.
    bounds: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Lay out the tensors; their number of elements does not change later."""
        object.__setattr__(self, "tensors", tuple(self.named.values()))
        edges = accumulate((tensor.numel() for tensor in self.tensors), initial=0)
        object.__setattr__(self, "bounds", tuple(pairwise(edges)))

    @staticmethod
    def over(named: Mapping[str, Tensor]) -> FlatParameters:
        """Lay tensors end to end, in this order.

        Raises:
            UsageError: they have no common floating-point dtype.
        """
        first_of: dict[torch.dtype, str] = {}
        for name, tensor in named.items():
            first_of.setdefault(tensor.dtype, name)
        if len(first_of) != 1 or not first_of.keys() <= _DTYPES.keys():
            found = ", ".join(f"{str(dtype).removeprefix('torch.')} ('{name}')" for dtype, name in first_of.items())
            raise UsageError(
                f"the tensors of one table have the dtypes {found or 'of nothing: there are none'}; expected one of "
                f"{', '.join(_DTYPES.values())} for all. {_advice(first_of)}"
            )
        return FlatParameters(named, _DTYPES[first_of.popitem()[0]])

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def empty(self) -> Tensor:
        """Return an uninitialised flat vector."""
        return torch.empty(self.numel, dtype=getattr(torch, self.dtype), device="cpu")

    def pack_values(self, out: Tensor) -> None:
        """Copy the tensors into a flat vector."""
        for tensor, part in self._pairs(out):
            part.copy_(tensor.detach())

    def unpack(self, flat: Tensor) -> None:
        """Copy a flat vector into the tensors."""
        with torch.no_grad():
            for tensor, part in self._pairs(flat):
                tensor.copy_(part)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return the view of a flat vector that belongs to each tensor, in its shape."""
        return [
            flat[start:stop].view(tensor.shape) for (start, stop), tensor in zip(self.bounds, self.tensors, strict=True)
        ]

    def _pairs(self, flat: Tensor) -> zip[tuple[Tensor, Tensor]]:
        return zip(self.tensors, self.parts(flat), strict=True)


def _advice(first_of: Mapping[torch.dtype, str]) -> str:
    """Return what to do about these dtypes, and where the name of a parameter comes from if it is a position."""
    advice = "Convert the model, or make one optimizer for each dtype."
    if any(dtype.is_complex for dtype in first_of):
        advice = (
            "For complex numbers make the parameter of their real and imaginary parts, torch.view_as_real(values), and "
            "compute with torch.view_as_complex(parameter)."
        )
    return advice + "".join(position_hint(name) for name in list(first_of.values())[:1])


def segments_of(
    optimizer: torch.optim.Optimizer, model: nn.Module | None
) -> tuple[dict[str, Tensor], tuple[Segment, ...]]:
    """Return the parameters of an optimizer in order, by what they are called, and the segments they become.

    A parameter has the name it has in the model, or else the one that the optimizer was given.
    """
    names = {parameter: name for name, parameter in model.named_parameters()} if model is not None else {}
    named: dict[str, Tensor] = {}
    segments: list[Segment] = []
    for group_index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            own = given[index] if index < len(given) else positional_name(group_index, index)
            name = names.get(parameter, own)
            if name in named:
                raise UsageError(f"the optimizer has two parameters of the name '{name}': give each its own.")
            named[name] = parameter
            segments.append(Segment(name, tuple(parameter.shape), group_index))
    return named, tuple(segments)
