"""Pushes of a dense table in which factors stand for the gradients of some matrices; see `update.factors`."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace
from torch import Tensor

from paceline.core.partition import Range
from paceline.update.factors import Factors, MatrixPart, matrix_parts, pack
from paceline.update.table import TableSpec
from paceline.wire.messages import FactoredMatrix, FactoredPush, PushFrame


class FactoredPart(msgspec.Struct, frozen=True):
    """What one server is sent of a push."""

    message: FactoredPush
    body: memoryview


@dataclass(slots=True)
class FactoredPushes:
    """Makes the parts of pushes for the servers that are reached by a connection that carries bytes.

    Args:
        spec: of the table.
        spans: of all servers, by rank.
        servers: that are sent factors.
        checks_memory: send a checksum with each part.
    """

    spec: TableSpec
    spans: Sequence[Range]
    servers: Collection[int]
    checks_memory: bool = False
    num_matrices: int = 0  # whose factors were sent, counted for each push and server
    _parts: dict[int, dict[int, MatrixPart]] = field(init=False)  # by server, and by parameter

    def __post_init__(self) -> None:
        """Find the matrices of each server."""
        self._parts = {server: matrix_parts(self.spec, self.spans[server]) for server in self.servers}

    def parts(self, frame: PushFrame, gradient: Tensor, factors: Mapping[int, Factors]) -> dict[int, FactoredPart]:
        """Return the parts of a push, by server; without those for which factors have no fewer bytes.

        Args:
            frame: of the push.
            gradient: of the whole table, (elements of the table,).
            factors: of its matrices, by the index of their parameter.
        """
        made: dict[int, FactoredPart] = {}
        for server, parts in self._parts.items():
            taken = {
                index: each
                for index, each in factors.items()
                if index in parts and parts[index].is_smaller(each.num_samples)
            }
            if taken:
                span = self.spans[server]
                body = pack(gradient[span.start : span.stop], parts, taken).numpy().data.cast("B")
                matrices = tuple(FactoredMatrix(index, taken[index].num_samples) for index in sorted(taken))
                checksum = zlib.crc32(body) if self.checks_memory else None
                made[server] = FactoredPart(FactoredPush(replace(frame, checksums=()), matrices, checksum), body)
                self.num_matrices += len(taken)
        return made
