"""Where each worker stands when several of them hold one model between them."""

from __future__ import annotations

import msgspec


class MeshPosition(msgspec.Struct, frozen=True):
    """The place of a worker: which stage of the pipeline, which replica of the model, which rank of its layers."""

    stage: int
    replica: int
    tensor: int


class MeshShape(msgspec.Struct, frozen=True):
    """Workers by stage, replica and tensor rank. Tensor ranks are neighbours, then come replicas, then stages.

    Args:
        pipeline: stages that the layers are cut into.
        replicas: models, each with its share of the data.
        tensor: ranks that each layer is split over.

    Example:
        >>> mesh = MeshShape(pipeline=2, replicas=2, tensor=1)
        >>> mesh.position(3)
        MeshPosition(stage=1, replica=1, tensor=0)
        >>> mesh.replica_ranks(1)
        [1, 3]
    """

    pipeline: int
    replicas: int
    tensor: int

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.pipeline * self.replicas * self.tensor

    @property
    def is_split(self) -> bool:
        """Whether a model is held by several workers between them."""
        return self.pipeline * self.tensor > 1

    def rank(self, position: MeshPosition) -> int:
        """Return the rank at a position."""
        return (position.stage * self.replicas + position.replica) * self.tensor + position.tensor

    def position(self, rank: int) -> MeshPosition:
        """Return where a worker stands."""
        before, tensor = divmod(rank, self.tensor)
        stage, replica = divmod(before, self.replicas)
        return MeshPosition(stage, replica, tensor)

    def replica_ranks(self, replica: int) -> list[int]:
        """Return the ranks that hold a replica between them, stage by stage."""
        return [
            self.rank(MeshPosition(stage, replica, tensor))
            for stage in range(self.pipeline)
            for tensor in range(self.tensor)
        ]

    def part_name(self, position: MeshPosition) -> str:
        """Return what the part of the model that is held there is called: "stage1.tensor0"; "" for all of it.

        >>> MeshShape(2, 1, 1).part_name(MeshPosition(1, 0, 0))
        'stage1'
        """
        stage = f"stage{position.stage}" if self.pipeline > 1 else ""
        tensor = f"tensor{position.tensor}" if self.tensor > 1 else ""
        return ".".join(word for word in (stage, tensor) if word)
