"""An optimizer whose update runs on the servers: push, clock and pull behind `step()`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from paceline.core.consistency import Consistency
from paceline.errors import UsageError
from paceline.node.outgoing import PushOutcome
from paceline.node.table import Table
from paceline.tensors.table import NonFinite, Scale, Segment, TableSpec
from paceline.tensors.torch_rule import from_optimizer, hyper_of
from paceline.tensors.update import Add
from paceline.training.buffers import Buffers, floating_buffers
from paceline.training.flat import Flat, segments_of
from paceline.training.state import fetch_state, send_state


@dataclass(frozen=True, slots=True)
class Settings:
    """How an optimizer is distributed; see `paceline.distributed`."""

    consistency: Consistency
    scale: Scale
    fetch_every: int | None
    nonfinite: NonFinite
    name: str

    def __post_init__(self) -> None:
        """Refuse cadences that never fetch."""
        if self.fetch_every is not None and self.fetch_every < 1:
            raise UsageError(f"fetch_every is {self.fetch_every}, expected 1 or more steps, or None.")
        if self.fetch_every is None and self.consistency.bound is None:
            raise UsageError(
                "fetch_every=None fetches when the bound forces it, but asynchronous has none: give a number."
            )


class Job(Protocol):
    """What the optimizer needs of the session it works in."""

    @property
    def rank(self) -> int:
        """Number of this worker."""
        ...

    @property
    def size(self) -> int:
        """Number of workers."""
        ...

    def open_table(self, spec: TableSpec, shape: tuple[int, ...], first: Tensor, *, read_my_writes: bool) -> Table:
        """Declare a table and wait for its first values."""
        ...

    def clock(self) -> int:
        """Finish the current clock."""
        ...

    def take_samples(self) -> int:
        """Return the number of samples of this clock, 0 if nobody counts them."""
        ...

    def barrier(self) -> None:
        """Wait for all workers."""
        ...


class DistributedOptimizer(torch.optim.Optimizer):
    """Used like the optimizer it wraps; its state lives on the servers.

    `param_groups` are those of the wrapped optimizer, so schedulers that change the learning rate are followed: the
    numbers travel with the next push. Gradient accumulation needs nothing special: a clock is a call of `step()`.

    Attributes:
        num_refused: pushes that were not applied, of this worker (not finite, or late under backup).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: Job) -> None:
        rule = from_optimizer(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.num_refused = 0
        self._settings = settings
        self._job = job
        self._num_steps = 0
        tensors, segments = segments_of(optimizer, model)
        self._flat = Flat.over(tensors)
        self._scratch = self._flat.empty()
        spec = TableSpec(
            settings.name,
            segments,
            self._flat.dtype,
            rule,
            str(settings.consistency),
            settings.scale,
            settings.nonfinite,
        )
        self._table = self._open(spec, self._flat)
        self._buffers = self._open_buffers(model)
        self._fetch(refresh=True)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Push gradients, finish the clock, fetch values; blocks as long as the consistency asks for.

        Args:
            closure: computes the loss and its gradients first, once.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        absent = self._flat.pack_gradients(self._scratch)
        hyper = tuple(hyper_of(group) for group in self.param_groups)
        samples = self._job.take_samples() or 1
        pushed = self._table.push(self._scratch, samples=samples, absent=absent, hyper=hyper)
        pushed.add_done_callback(self._count_refusal)
        if self._buffers is not None:
            self._buffers.push()
        self._job.clock()
        self._num_steps += 1
        every = self._settings.fetch_every
        eager = self._settings.consistency.deliver == "on_clock"
        self._fetch(refresh=not eager and every is not None and self._num_steps % every == 0)
        return loss

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Hold one consistent state in the model for the length of a `with` block, for evaluation or saving.

        It contains every update of all clocks below this worker's own (under asynchronous: all that have arrived);
        blocks until they are in. Training continues from where it was.
        """
        before = self._flat.empty()
        self._flat.pack_values(before)
        self._fetch(refresh=True, exact=self._settings.consistency.bound is not None)
        try:
            yield
        finally:
            self._flat.unpack(before)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state on the servers in the form of the wrapped optimizer's own `state_dict`.

        A plain `torch.optim` optimizer can load it, and the other way round. Blocks; take it at a barrier, where no
        pushes are under way, so that all its parts are of one state.
        """
        hyper = tuple(hyper_of(group) for group in self.param_groups)
        return fetch_state(self._table, hyper)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state on the servers, and the model's parameters there to what they are on worker 0.

        Every worker must call it, with the same state; blocks until all have.
        """
        groups = cast("list[dict[str, Any]]", state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise UsageError(f"the state has {len(groups)} parameter groups, this optimizer {len(self.param_groups)}.")
        for own, given in zip(self.param_groups, groups, strict=True):
            own.update({key: value for key, value in given.items() if key not in ("params", "param_names")})
        self._job.barrier()
        if self._job.rank == 0:
            self._flat.pack_values(self._scratch)
            send_state(self._table, state_dict, self._scratch)
        self._job.barrier()
        self._fetch(refresh=True)

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _open(self, spec: TableSpec, flat: Flat) -> Table:
        first = flat.empty()
        flat.pack_values(first)
        return self._job.open_table(spec, tuple(first.shape), first, read_my_writes=True)

    def _open_buffers(self, model: nn.Module | None) -> Buffers | None:
        tensors = floating_buffers(model) if model is not None else []
        if not tensors:
            return None
        flat = Flat.over(tensors)
        segments = tuple(Segment(f"buffer{index}", tuple(t.shape)) for index, t in enumerate(tensors))
        spec = TableSpec(
            f"{self._settings.name}.buffers",
            segments,
            flat.dtype,
            Add(),
            str(self._settings.consistency),
            "sum",
            "reject",
        )
        buffers = Buffers(flat, self._job.size, self._open(spec, flat))
        buffers.fetch(refresh=True)
        return buffers

    def _fetch(self, *, refresh: bool, exact: bool = False) -> None:
        self._table.pull(out=self._scratch, refresh=refresh, exact=exact)
        self._flat.unpack(self._scratch)
        if self._buffers is not None:
            self._buffers.fetch(refresh=refresh, exact=exact)

    def _count_refusal(self, pushed: Future[PushOutcome]) -> None:
        if pushed.exception() is None:  # else the worker has failed, which the next call tells
            self.num_refused += not pushed.result().applied
