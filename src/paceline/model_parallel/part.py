"""The part of a model that a worker holds."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.job.mesh import MeshPosition, MeshShape
from paceline.model_parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What a worker holds of a model that several hold between them.

    Example:
        >>> from paceline.job.mesh import MeshShape
        >>> part = ModelPart(MeshShape(pipeline=2, replicas=2, tensor=1), 3, None)
        >>> part.name, part.first, part.replica
        ('stage1', 2, 1)
    """

    grid: MeshShape
    rank: int
    mesh: Mesh | None  # None where nobody has to be connected: a worker holds all of the model

    @property
    def position(self) -> MeshPosition:
        """Where its holder stands."""
        return self.grid.position(self.rank)

    @property
    def name(self) -> str:
        """What the tables of this part are called by: "stage1" or "stage1.tensor0"; "" for all of the model."""
        return self.grid.part_name(self.position)

    @property
    def replica(self) -> int:
        """Number of the model that it is a part of."""
        return self.position.replica

    @property
    def first(self) -> int:
        """The worker that gives the first values to all who hold the same part: the one of replica 0."""
        return self.grid.rank(MeshPosition(self.position.stage, 0, self.position.tensor))

    @property
    def name_end(self) -> str:
        """What is added to the name of an optimizer for its tables: ".stage1"."""
        return f".{self.name}" if self.name else ""
