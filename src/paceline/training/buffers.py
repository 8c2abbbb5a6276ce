"""Model buffers (BatchNorm statistics, for example), averaged over the workers through a table of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.core.consistency import Consistency
from paceline.training.flat import FlatParameters, Weights
from paceline.training.strategy import Settings, TrainingJob, open_flat
from paceline.update.named_rules import Add
from paceline.update.table import Segment, TableSpec
from paceline.worker.table import Table


@dataclass(slots=True)
class Buffers:
    """Floating-point buffers of one worker, and their values when they were last set from the servers.

    Each clock a worker pushes the change of its buffers; the table adds the mean of these. Other buffers, such as step
    counts, stay local to each worker.
    """

    flat: FlatParameters
    table: Table
    num_workers: int
    weights: Weights = field(init=False)
    _before: Tensor = field(init=False)
    _now: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Start from the current buffers."""
        self.weights = Weights(self.flat, self.table)
        self._before, self._now = self.flat.empty(), self.flat.empty()
        self.flat.pack_values(self._before)

    def push(self, *, ends_clock: bool = False) -> None:
        """Send the change of the buffers since they were last set. `ends_clock`: see `DenseClient.push_reserved`."""
        self.flat.pack_values(self._now)
        move = self._now - self._before
        if self.table.consistency.visible == "on_arrival":
            move.div_(self.num_workers)  # pushes are added one by one, so each is a share of the mean
        self._before.copy_(self._now)
        buffer = self.table.client.reserve(shown=False)
        buffer.gradient.copy_(move)
        self.table.push_reserved(buffer, samples=1.0, absent=(), hyper=(), ends_clock=ends_clock)

    def fetch(self, *, refresh: bool) -> None:
        """Set the buffers to the workers' mean."""
        self.weights.fetch(refresh=refresh)
        self.flat.pack_values(self._before)


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model that can be averaged, each once: dense, no integers, complex or float8."""
    dense = ((name, one) for name, one in model.named_buffers() if one.layout == torch.strided and one.numel())
    return {name: buffer for name, buffer in dense if FlatParameters.takes(buffer)}


def open_buffers(
    model: nn.Module | None, settings: Settings, consistency: Consistency, job: TrainingJob, *, read_my_writes: bool
) -> Buffers | None:
    """Open a table of the buffers of a model, which adds the mean of what is pushed for a clock; None without any."""
    named = floating_buffers(model) if model is not None and settings.average_buffers else {}
    if not named:
        return None
    flat = FlatParameters.widened(named)
    segments = tuple(Segment(own, tuple(buffer.shape)) for own, buffer in named.items())
    spec = TableSpec(f"{settings.name}.buffers", segments, flat.dtype, Add(), str(consistency), "mean", "reject")
    table = open_flat(job, settings, spec, flat, read_my_writes=read_my_writes)
    return Buffers(flat, table, settings.num_replicas(job))
