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
# A scaler tries some scales that are too high, above all when it begins; so many in a row are more than that.
USUAL_OVERFLOWS = 10


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a scaler has left at an optimizer that says `_step_supports_amp_scaling`, for the length of its step.

    Args:
        scale: one number; None where the script has had the gradients unscaled before.
        overflowed: a gradient of this worker is not finite.
    """

    scale: Tensor | None
    overflowed: bool

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> Scaling | None:
        """Return what a scaler says of this step; None where it is called without one."""
        found = cast("Tensor | None", getattr(optimizer, "found_inf", None))
        if found is None:
            return None
        return Scaling(cast("Tensor | None", getattr(optimizer, "grad_scale", None)), bool(found.item()))

    def undo(self, parameters: Iterable[Tensor], lookups: EmbeddingLookups, where: str) -> None:
        """Unscale the gradients, and those that embeddings have collected.

        Raises:
            UsageError: the script has had gradients unscaled, which the scaler cannot do for embeddings.
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
