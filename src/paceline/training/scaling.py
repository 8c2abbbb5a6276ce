"""Gradient scale and overflow flag that a `torch.amp.GradScaler` passes to a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.training.embedding_gradients import EmbeddingLookups

OVERFLOW = "a GradScaler has found gradients that are not finite: its scale is too high for this batch"
# A scaler tries some scales that are too high, above all at the start; more overflows in a row than this are unusual.
USUAL_OVERFLOWS = 10


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a scaler passes to an optimizer that sets `_step_supports_amp_scaling`, for the length of a step.

    Args:
        scale: scale of the gradients; None where the script has unscaled them already.
        overflowed: whether a gradient of this worker is not finite.
    """

    scale: Tensor | None
    overflowed: bool

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> Scaling | None:
        """Return what a scaler has passed to this step; None where it is called without one."""
        found = cast("Tensor | None", getattr(optimizer, "found_inf", None))
        if found is None:
            return None
        return Scaling(cast("Tensor | None", getattr(optimizer, "grad_scale", None)), bool(found.item()))

    def undo(self, parameters: Iterable[Tensor], lookups: EmbeddingLookups, where: str) -> None:
        """Unscale the gradients, and those that embeddings have collected.

        Raises:
            UsageError: the script has unscaled gradients before, which the scaler cannot do for embeddings.
        """
        if self.scale is None:
            if lookups.have_gradients:
                raise UsageError(
                    f"{where}: scaler.unscale_ does not know the gradients of paceline.Embedding, which stay scaled: "
                    "leave it out, or train in bfloat16, which needs no scaler."
                )
            return
        inverse = float(self.scale.double().reciprocal().float())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(inverse)
        lookups.multiply(inverse)
