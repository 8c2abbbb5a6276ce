"""A worker's part of what can only be read from its beginning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.partition import Cut, Sharding, is_hashed_to
from paceline.data.position import Bookmark
from paceline.errors import UsageError


class ShardedStream(IterableDataset[Any]):
    """This worker's items of an iterable, which everyone reads whole, each time it is read.

    In the processes of a `DataLoader` with `num_workers`, each takes its part of them; an `IterableDataset` is
    expected to see to that itself, as it has to without us.
    """

    def __init__(self, source: Iterable[Any], sharding: Sharding, cut: Cut | None = None) -> None:
        self._cut = cut or Cut()
        _check(self._cut)
        self._source = source
        self._sharding = sharding
        by_hash = {"worker": sharding.rank, "num_workers": sharding.size}
        self._bookmark = Bookmark(by_hash if self._cut.partition == "hashed" else {})
        self._has_said_size = False

    def __repr__(self) -> str:
        return f"ShardedStream({type(self._source).__name__}, worker {self._sharding.rank} of {self._sharding.size})"

    def __iter__(self) -> Iterator[Any]:
        """Read the iterable from where it is continued, and yield this worker's items."""
        start = self._bookmark.begin().num_done
        place, num_places = _place_among_readers(self._source)
        num_own, number = 0, -1
        for number, item in enumerate(self._source):
            if number >= start and self._is_own(number - start, number, item):
                if num_own % num_places == place:
                    self._bookmark.reach(self._num_done(start, number))
                    yield item
                num_own += 1
        self._check_size(number + 1)
        self._bookmark.end()

    def state_dict(self) -> dict[str, int]:
        """Return how far reading has come: the items that this worker has been given count, as does all before them.

        What a `DataLoader` reads in processes of its own is not known here, and what it reads ahead counts.
        """
        return self._bookmark.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there the next time this is read; what comes before is read and left out.

        Raises:
            UsageError: it is not the state of such a source.
        """
        self._bookmark.load_state_dict(state)

    def _is_own(self, place: int, number: int, item: object) -> bool:
        """Say whether an item is this worker's, by its place since reading was continued and its number in all."""
        if self._cut.partition != "hashed":
            return place % self._sharding.size == self._sharding.rank
        key = number if self._cut.key is None else self._cut.key(item)
        return is_hashed_to(key, self._sharding)

    def _num_done(self, start: int, number: int) -> int:
        """Count the items that all workers have been given once this worker has been given that of this number.

        Where items are dealt out by turns, the others have been given theirs of this turn; hashed ones come as they
        come, and each worker keeps its own count.
        """
        if self._cut.partition == "hashed":
            return number + 1
        return number + self._sharding.size - (number - start) % self._sharding.size

    def _check_size(self, num_items: int) -> None:
        if not num_items:
            raise UsageError(f"the {type(self._source).__name__} that is read by workers has no items at all.")
        if not self._has_said_size:
            self._has_said_size = True
            self._sharding.note_size(num_items, f"items of a {type(self._source).__name__}")


def _check(cut: Cut) -> None:
    if cut.partition == "contiguous" or cut.shuffled:
        what = "shuffled" if cut.shuffled else 'cut by partition="contiguous"'
        raise UsageError(
            f"an iterable cannot be {what}, as nobody knows how long it is: leave that out, or give a sequence."
        )


def _place_among_readers(source: Iterable[Any]) -> tuple[int, int]:
    """Return which process of a `DataLoader` this is, and of how many."""
    info = get_worker_info()
    return (0, 1) if info is None or isinstance(source, IterableDataset) else (info.id, info.num_workers)
