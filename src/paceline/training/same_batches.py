"""Detection of workers that compute with the same batches, as they do when each trains on all samples, not on a shard.

For strategies whose gradients pass no server; `server/push_checks.py` does the same for the others. Only the first
steps are checked, and only a sample of each batch, so it costs nothing later.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import torch
from torch import Tensor

from paceline.notices import SHARD_ADVICE, tell

STEPS: Final = 4  # that are checked
_SAMPLES: Final = 4096  # numbers of a tensor that are checked
_MAX_WORKERS: Final = 64
_FEWEST: Final = 8  # different numbers; batches with fewer may be alike by chance, or on purpose


@dataclass(slots=True)
class SameBatches:
    """Warns once, through `tell`, when workers have computed with the same batch in two steps.

    Args:
        rank: of this worker; of two workers with the same batches the one of lower rank warns.
        name: of the optimizer.
    """

    rank: int
    name: str
    tell: Callable[[str], object] = tell
    # By step, the digest of each worker's batch.
    _digests: list[dict[int, int]] = field(default_factory=list[dict[int, int]])

    @property
    def is_checking(self) -> bool:
        """Whether the next step is checked, which is the same on all workers."""
        return len(self._digests) < STEPS

    def compare(self, workers: Sequence[int], digests: Sequence[int]) -> None:
        """Compare the digests of all workers' batches in a step, and warn where two had the same twice."""
        if not self.is_checking:
            return
        now = dict(zip(workers[:_MAX_WORKERS], digests[:_MAX_WORKERS], strict=True))
        for earlier in self._digests:
            for one, other in combinations(now, 2):
                if _are_same(one, other, now, earlier):
                    self._digests = [now] * STEPS
                    if one == self.rank:  # the others have found the same pair
                        self.tell(
                            f"workers {one} and {other} computed with the same batches in two of the first steps of "
                            f"'{self.name}': {SHARD_ADVICE}"
                        )
                    return
        self._digests.append(now)


def _are_same(one: int, other: int, now: dict[int, int], earlier: dict[int, int]) -> bool:
    """Return whether two workers had the same batch twice, and not one that never changes, which may be intended."""
    alike = now[one] == now[other] != 0 and earlier.get(one) == earlier.get(other) != 0
    return alike and now[one] != earlier[one]


def digest_of_batch(batch: Iterable[object]) -> int:
    """Return a digest of the tensors of a batch; 0 if they have few different numbers.

    >>> digest_of_batch([torch.zeros(100)]), digest_of_batch([torch.arange(100)]) > 0
    (0, True)
    """
    digest, numbers = 0, set[float]()
    for tensor in batch:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
            continue
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].to("cpu", torch.float64)
        if len(numbers) < _FEWEST:
            numbers.update(sample[sample.isfinite() & (sample != 0)].unique()[:_FEWEST].tolist())
        digest = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), digest)
    return digest if len(numbers) >= _FEWEST else 0
