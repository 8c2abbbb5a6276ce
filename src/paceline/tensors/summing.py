"""The gradients of one update become one gradient: added in the order given, then scaled. Bit-exact by construction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.tensors.table import Scale

if TYPE_CHECKING:
    from torch import Tensor

# Elements that are summed and scaled together: 1 MiB of float32, so that the sum stays in the cache meanwhile.
CHUNK = 256 * 1024


def combine(
    out: Tensor, gradients: Sequence[Tensor], counts: Sequence[float], everyone: Sequence[float], scale: Scale
) -> None:
    """Write the combined gradient to `out`; the gradients are only read.

    Args:
        out: (n,), overwritten.
        gradients: (n,) each, at least one; added as ((g1 + g2) + g3) + ...
        counts: samples behind each of the gradients.
        everyone: samples of every contribution to the update, those without these elements too: they count as zeros.
        scale: see `TableSpec`.
    """
    weighted = scale == "samples" and len(set(everyone)) > 1
    for start in range(0, out.numel(), CHUNK):
        stop = start + CHUNK
        parts = [gradient[start:stop] for gradient in gradients]
        if weighted:
            parts = [part * count for part, count in zip(parts, counts, strict=True)]
        total = out[start:stop]
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        if weighted:
            total.div_(sum(everyone))
        elif scale != "sum" and len(everyone) > 1:
            total.div_(len(everyone))


def num_nonfinite(tensor: Tensor) -> int:
    """Return how many elements are NaN or infinite; cheap when there are none."""
    # NaN and infinity survive every sum, so a finite sum proves all elements finite; the converse may overflow.
    if tensor.sum().isfinite():
        return 0
    return tensor.numel() - int(tensor.isfinite().sum())
