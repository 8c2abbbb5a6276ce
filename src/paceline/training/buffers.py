"""The model's buffers (BatchNorm statistics, for example), averaged over the workers through a table of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from paceline.node.table import Table
from paceline.training.flat import Flat


@dataclass(slots=True)
class Buffers:
    """Floating-point buffers of one worker and what they were when they were last set from the servers.

    Each clock a worker pushes how its buffers moved, divided by the number of workers; the table adds. So the table
    moves by the mean of the workers' moves. Other buffers, such as step counts, stay each worker's own.
    """

    flat: Flat
    num_workers: int
    table: Table
    _before: Tensor = field(init=False)
    _now: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Start from the buffers as they are."""
        self._before, self._now = self.flat.empty(), self.flat.empty()
        self.flat.pack_values(self._before)

    def push(self) -> None:
        """Send how the buffers have moved since they were set."""
        self.flat.pack_values(self._now)
        move = (self._now - self._before).div_(self.num_workers)
        self._before.copy_(self._now)
        self.table.push(move)

    def fetch(self, *, refresh: bool, exact: bool = False) -> None:
        """Set the buffers to the workers' mean."""
        self.table.pull(out=self._before, refresh=refresh, exact=exact)
        self.flat.unpack(self._before)


def floating_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers of a model that can be averaged, each once."""
    return list({id(buffer): buffer for buffer in model.buffers() if buffer.is_floating_point()}.values())
