"""How the workers of a job share models and data, as set by the launcher or the script; the part of a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace
from torch import Tensor, nn

from paceline.collective.collectives import Collectives
from paceline.errors import UsageError
from paceline.job.mesh import MeshPosition, MeshShape
from paceline.job.strategy import ALL_REDUCE, Distribution
from paceline.model_parallel.mesh import Mesh


class ModelPart(msgspec.Struct, frozen=True):
    """Part of a model that several workers hold together, on one of them.

    Example:
        >>> from paceline.job.mesh import MeshShape
        >>> part = ModelPart(MeshShape(pipeline=2, replicas=2, tensor=1), 3, None)
        >>> part.name, part.first, part.replica
        ('stage1', 2, 1)
    """

    grid: MeshShape
    rank: int
    mesh: Mesh | None  # None where a worker holds all of the model, and needs no connections
    shards: int = 1  # neighbouring replicas that keep this part between them, in slices

    @property
    def position(self) -> MeshPosition:
        """Position of its worker."""
        return self.grid.position(self.rank)

    @property
    def name(self) -> str:
        """Prefix of the names of this part's tables: "stage1" or "stage1.tensor0"; "" for all of the model."""
        return self.grid.part_name(self.position)

    @property
    def replica(self) -> int:
        """Number of the model replica that it belongs to."""
        return self.position.replica

    @property
    def first(self) -> int:
        """Worker with the initial values for all that hold the same part: the one of the first replica that does."""
        return self.grid.rank(MeshPosition(self.position.stage, self.replica % self.shards, self.position.tensor))

    @property
    def num_holders(self) -> int:
        """Number of workers that hold the same part."""
        return self.grid.replicas // self.shards

    @property
    def name_end(self) -> str:
        """Suffix of the optimizer's name for this part's tables: ".stage1"."""
        return f".{self.name}" if self.name else ""


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as an ordinary one; all workers must call it, and block until all have.

    Example:
        >>> import torch
        >>> whole(torch.ones(2))  # not sharded
        tensor([1., 1.])
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor  # takes half a second

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True)
class Arrangement:
    """How all workers share models and data, as one worker knows it.

    Args:
        rank: number of this worker.
        size: number of workers.
        distribution: strategy of the launcher, until the script names another.
    """

    rank: int
    size: int
    distribution: Distribution = field(default_factory=Distribution)
    # Weak, so that a dropped model is freed.
    _parts: WeakKeyDictionary[nn.Module, ModelPart] = field(default_factory=WeakKeyDictionary[nn.Module, ModelPart])
    _mesh: Mesh | None = None
    _relied_on: str = ""  # why the arrangement can no longer change, as a clause for messages

    @property
    def grid(self) -> MeshShape:
        """Position of each worker.

        Raises:
            UsageError: the workers do not divide into whole replicas.
        """
        wanted = self.distribution
        return MeshShape(wanted.pipeline, wanted.num_replicas(self.size), wanted.tensor)

    def settle(self, wanted: Distribution) -> MeshShape:
        """Set the distribution that a script asks for, and return its shape.

        Raises:
            UsageError: the workers do not divide by it, or data or a model already use another arrangement.
        """
        grid = MeshShape(wanted.pipeline, wanted.num_replicas(self.size), wanted.tensor)
        if self._relied_on and grid != self.grid:
            raise UsageError(
                f"worker {self.rank}: parallelize asks for {wanted.pipeline} stages of {wanted.tensor} ranks, but "
                f"{self._relied_on} with {self.grid.pipeline} stages of {self.grid.tensor}. Call parallelize before "
                "shard, and with the same numbers for each model; or give them to the launcher (--strategy)."
            )
        self.distribution = wanted
        return grid

    def mesh(self, exchange: Collectives) -> Mesh:
        """Return the process groups of all workers; the first call makes them, and blocks until all workers call it."""
        if self._mesh is None:
            self._mesh = Mesh.open(exchange, self.grid)
        return self._mesh

    def share(self) -> tuple[int, int]:
        """Return this worker's part of the data and the number of parts; all workers of a replica get the same."""
        self._relied_on = self._relied_on or "the data is cut already"
        return self.grid.position(self.rank).replica, self.grid.replicas

    def enter(self, model: nn.Module, part: ModelPart) -> None:
        """Register a model with the part of the whole that it is."""
        self._relied_on = self._relied_on or "a model is held already"
        self._parts[model] = part

    def part_of(self, model: nn.Module | None, name: str) -> ModelPart | None:
        """Return the part of the whole that a model is; None for a model that this worker holds alone.

        Raises:
            UsageError: models are split over workers, but this one was not.
        """
        part = self._parts.get(model) if model is not None else None
        if part is None and self.grid.is_split:
            raise UsageError(
                f"worker {self.rank}: '{name}' runs under {self.distribution}, but without a model that was "
                "cut that way: model = paceline.parallelize(model, loss=...), then give model=model to "
                "paceline.distributed."
            )
        return part if part is not None and part.grid.is_split else None

    def between_replicas(self, *, served: bool) -> Distribution:
        """Return the distribution of the replicas; the workers of a single replica need no servers.

        Args:
            served: whether a consistency was given, which only servers use.
        """
        wanted = self.distribution
        is_held_once = (self.grid.is_split or wanted.shards > 1) and self.grid.replicas == wanted.shards
        alone = is_held_once and wanted.data is None
        return replace(wanted, data=ALL_REDUCE) if alone and not served else wanted
