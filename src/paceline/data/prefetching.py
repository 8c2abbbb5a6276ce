"""Batches read one ahead, so that embedding rows of the next batch are prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from paceline.data.fed import FedLoader
from paceline.data.sharding import ShardedLoader
from paceline.data.slicing import SlicedLoader
from paceline.errors import UsageError

Batch = TypeVar("Batch")


class Prefetches(Protocol):
    """What can ask for rows ahead: `paceline.Embedding` and `paceline.EmbeddingBag`."""

    def prefetch(self, ids: Tensor, *, ahead: int = 1) -> None:
        """Ask for the rows of these ids, for use so many clocks from now."""
        ...


def prefetch(batches: Iterable[Batch], ids_of: Mapping[Prefetches, Callable[[Batch], Tensor]]) -> Iterable[Batch]:
    """Return the same batches; while one is worked on, the rows that embeddings need for the next are on their way.

    A step a batch is expected: rows are asked for the clock after the one under way. Where a batch is skipped, or takes
    part of a step, the rows that were asked for it are left and forward pulls others; nothing else changes. Under bsp
    values are the same, bit by bit, as without. While gradients are off nothing is asked.

    Args:
        batches: what to read from, one batch ahead: a loader from `paceline.shard` or `feed`, for example, or a list.
        ids_of: for each embedding, what returns the ids that it will be given for a batch.

    Returns:
        What can be iterated as often as `batches`, and has its length.

    Example:
        >>> import torch, paceline
        >>> with paceline.connect() as ps:
        ...     users = paceline.Embedding(None, 2, update=paceline.update.SGD(lr=0.5), init=1.0, ps=ps)
        ...     for ids in paceline.prefetch(torch.tensor([[1, 2], [2, 3]]), {users: lambda ids: ids}):
        ...         users(ids).sum().backward()
        ...         _ = ps.clock()
        ...     users(torch.tensor([1, 2, 3]))[:, 0].tolist()
        [0.5, 0.0, 0.5]
    """
    return _Ahead(batches, ids_of)


@dataclass(frozen=True, slots=True)
class _Ahead(Generic[Batch]):
    """Batches, and what asks for the rows of each."""

    batches: Iterable[Batch]
    ids_of: Mapping[Prefetches, Callable[[Batch], Tensor]]

    def __len__(self) -> int:
        return len(cast("Sized", self.batches))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        if isinstance(self.batches, SlicedLoader):
            raise UsageError("which slice comes next is known only when it is asked for: leave out prefetch or slices.")
        if isinstance(self.batches, ShardedLoader | FedLoader):
            return self.batches.through(self._ask_ahead)
        return self._ask_ahead(iter(self.batches))

    def _ask_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        held: list[Any] = []  # at most one: that before the one just read
        for following in batches:
            if held:
                self._ask(following)
                yield held.pop()
            held.append(following)
        yield from held

    def _ask(self, batch: Any) -> None:  # noqa: ANN401 - whatever the loader makes
        if torch.is_grad_enabled():
            for embedding, ids_of in self.ids_of.items():
                embedding.prefetch(ids_of(batch))
