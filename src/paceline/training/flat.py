"""Parameters as one flat vector and back, in the order of the optimizer's groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.tensors.table import DType, Segment

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, slots=True)
class Flat:
    """Tensors laid end to end: (elements of all,), on the CPU, of their common dtype."""

    tensors: tuple[Tensor, ...]
    dtype: DType

    @staticmethod
    def over(tensors: Sequence[Tensor]) -> Flat:
        """Lay tensors end to end.

        Raises:
            UsageError: they have no common floating-point dtype.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
            found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
            raise UsageError(
                f"the parameters have the dtypes {found}; expected one of {', '.join(_DTYPES.values())} for all. "
                "Convert the model, or make one optimizer for each dtype."
            )
        return Flat(tuple(tensors), _DTYPES[dtypes.pop()])

    def empty(self) -> Tensor:
        """Return an uninitialised flat vector."""
        return torch.empty(sum(tensor.numel() for tensor in self.tensors), dtype=self.tensors[0].dtype)

    def pack_values(self, out: Tensor) -> None:
        """Copy the tensors into a flat vector."""
        for tensor, part in zip(self.tensors, self._parts(out), strict=True):
            part.copy_(tensor.detach().reshape(-1))

    def pack_gradients(self, out: Tensor) -> tuple[int, ...]:
        """Copy the gradients into a flat vector; return the indices of the tensors that have none (zeros there).

        Raises:
            UsageError: a gradient is sparse.
        """
        absent: list[int] = []
        for index, (tensor, part) in enumerate(zip(self.tensors, self._parts(out), strict=True)):
            gradient = tensor.grad
            if gradient is None:
                part.zero_()
                absent.append(index)
            elif gradient.layout != torch.strided:
                raise UsageError(f"parameter {index} has a sparse gradient: build its layer with sparse=False.")
            else:
                part.copy_(gradient.reshape(-1))
        return tuple(absent)

    def unpack(self, flat: Tensor) -> None:
        """Copy a flat vector into the tensors."""
        with torch.no_grad():
            for tensor, part in zip(self.tensors, self._parts(flat), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _parts(self, flat: Tensor) -> list[Tensor]:
        starts = accumulate((tensor.numel() for tensor in self.tensors), initial=0)
        return [flat[start : start + t.numel()] for start, t in zip(starts, self.tensors, strict=False)]


def segments_of(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> tuple[list[Tensor], tuple[Segment, ...]]:
    """Return the parameters of an optimizer in order, and what they are called."""
    names = {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else {}
    tensors: list[Tensor] = []
    segments: list[Segment] = []
    for group_index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            own = given[index] if index < len(given) else f"group{group_index}.{index}"
            name = names.get(id(parameter), own)
            tensors.append(parameter)
            segments.append(Segment(name, tuple(parameter.shape), group_index))
    return tensors, tuple(segments)
