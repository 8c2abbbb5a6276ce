"""The part of a model that a worker holds, and whole tensors of sharded ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from paceline.job.mesh import MeshPosition, MeshShape
from paceline.model_parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class ModelPart:
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
        """Worker with the initial values for all that hold the same part: the one of replica 0."""
        return self.grid.rank(MeshPosition(self.position.stage, 0, self.position.tensor))

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
