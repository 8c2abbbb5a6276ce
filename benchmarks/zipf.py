"""Ids that are asked for as often as the words of a text are."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Zipf:
    """`num_rows` random 64-bit ids; the one of rank k is drawn with a probability in proportion to 1/k."""

    num_rows: int
    seed: int = 0
    ids: Tensor = field(init=False)
    _generator: torch.Generator = field(init=False)
    _cumulative: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Draw the ids."""
        self._generator = torch.Generator().manual_seed(self.seed)
        self.ids = torch.randint(-(1 << 62), 1 << 62, (self.num_rows,), generator=self._generator)
        self._cumulative = (1.0 / torch.arange(1, self.num_rows + 1, dtype=torch.float64)).cumsum(0)

    def draw(self, num: int) -> Tensor:
        """Return the positions in `ids` of so many draws, (num,)."""
        at = torch.rand(num, generator=self._generator, dtype=torch.float64) * self._cumulative[-1]
        return torch.searchsorted(self._cumulative, at).clamp_(max=self.num_rows - 1)
