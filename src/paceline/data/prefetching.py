"""Batches read one ahead, so that embedding rows of the next batch are prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from paceline.core.calls import checked, shown
from paceline.data.sharding import ShardedLoader
from paceline.data.slicing import SlicedLoader
from paceline.data.source_loader import FedLoader
from paceline.errors import UsageError

Batch = TypeVar("Batch")


class Prefetches(Protocol):
    """Requests rows ahead: `paceline.Embedding` and `paceline.EmbeddingBag`."""

    def prefetch(self, ids: Tensor, *, ahead: int = 1) -> None:
        """Request the rows of these ids, for use `ahead` clocks from now."""
        ...


@checked
def prefetch(batches: Iterable[Batch], ids_of: Mapping[Prefetches, Callable[[Batch], Tensor]]) -> Iterable[Batch]:
    """Return the same batches; during each step the embedding rows of the next batch are requested.

    One step a batch is expected: rows are requested for the clock after the current one. If a batch is skipped, or
    takes part of a step, its prefetched rows are not used and forward pulls others; nothing else changes. Under bsp
    values are the same, bit by bit, as without. While gradients are off nothing is requested.

    Args:
        batches: read one batch ahead: a loader from `paceline.shard` or `feed`, for example, or a list.
        ids_of: for each embedding, a function that returns the ids that it will be given for a batch.

    Returns:
        An iterable with the length of `batches`, which can be iterated as often.

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
    if not hasattr(type(batches), "__iter__"):
        raise UsageError(f"prefetch: batches is {shown(batches)}, expected a loader, or what else can be iterated.")
    fits = isinstance(ids_of, Mapping) and all(map(callable, ids_of.values()))  # pyright: ignore[reportUnnecessaryIsInstance]
    if not fits or not all(hasattr(layer, "prefetch") for layer in ids_of):
        raise UsageError(
            f"prefetch: ids_of is {shown(ids_of)}, expected a dict of embeddings, each with a function that returns "
            "the ids of a batch."
        )
    return _Ahead(batches, ids_of)


class _Ahead(msgspec.Struct, Generic[Batch], frozen=True):
    """Batches whose embedding rows are requested one batch ahead."""

    batches: Iterable[Batch]
    ids_of: Mapping[Prefetches, Callable[[Batch], Tensor]]

    def __len__(self) -> int:
        return len(cast("Sized", self.batches))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        if isinstance(self.batches, SlicedLoader):
            raise UsageError("the next slice is known only when it is requested: leave out prefetch or slices.")
        if isinstance(self.batches, ShardedLoader | FedLoader):
            return self.batches.through(self._ask_ahead)
        return self._ask_ahead(iter(self.batches))

    def _ask_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        held: list[Any] = []  # at most one: the batch before the one just read
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
