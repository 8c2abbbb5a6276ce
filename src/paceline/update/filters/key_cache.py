"""Key cache: both ends of a connection remember lists of ids, so that 16 bytes replace a repeated list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import final

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.filters.check import named, number
from paceline.update.rows.spec import FilterSpec

DIGEST_BYTES = 16


def digest(table: str, server: int, ids: Tensor) -> bytes:
    """Return a digest of 16 bytes of a list of ids of one table on one server; the order of ids matters.

    Args:
        table: the name of the table.
        server: the server of the rows.
        ids: int64 [n].

    Raises:
        UsageError: `ids` have another type or shape.

    Example:
        >>> digest("users", 0, torch.tensor([1, 2])) == digest("users", 0, torch.tensor([2, 1]))
        False
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise UsageError(f"Table '{table}': ids are {ids.dtype} {tuple(ids.shape)}, expected torch.int64 [n].")
    name = table.encode()
    whole = blake2b(f"{server}:{len(name)}:".encode(), digest_size=DIGEST_BYTES)
    whole.update(name)
    whole.update(ids.contiguous().numpy().data)
    return whole.digest()


@final
class KeyLists:
    """The most recently used lists, by digest; both ends of a connection hold them, with the same limits.

    Args:
        max_lists: number of lists held.
        max_ids: number of ids in all lists together; a longer list is not held.

    Example:
        >>> lists = KeyLists(max_lists=1, max_ids=100)
        >>> lists.put(b"first", torch.tensor([1, 2]))
        >>> lists.put(b"second", torch.tensor([3]))
        >>> lists.get(b"first") is None, lists.get(b"second")
        (True, tensor([3]))
    """

    def __init__(self, max_lists: int, max_ids: int) -> None:
        self._max_lists = max_lists
        self._max_ids = max_ids
        self._lists: OrderedDict[bytes, Tensor] = OrderedDict()  # least recently used first
        self._num_ids = 0  # of all lists together

    def __len__(self) -> int:
        return len(self._lists)

    @property
    def num_ids(self) -> int:
        """Number of ids in all lists together."""
        return self._num_ids

    def get(self, key: bytes) -> Tensor | None:
        """Return the list of a digest and count it as used; None if it is not held."""
        if key not in self._lists:
            return None
        self._lists.move_to_end(key)
        return self._lists[key]

    def put(self, key: bytes, ids: Tensor) -> None:
        """Hold a list under its digest, without a copy: do not change it afterwards."""
        self._drop(key)
        if len(ids) > self._max_ids:
            return
        self._lists[key] = ids
        self._num_ids += len(ids)
        while len(self._lists) > self._max_lists or self._num_ids > self._max_ids:
            self._drop(next(iter(self._lists)))

    def clear(self) -> None:
        """Drop all lists, as the other end no longer has them."""
        self._lists.clear()
        self._num_ids = 0

    def _drop(self, key: bytes) -> None:
        ids = self._lists.pop(key, None)
        if ids is not None:
            self._num_ids -= len(ids)


def key_lists_of(filters: Sequence[FilterSpec]) -> KeyLists | None:
    """Return an empty `KeyLists` with the limits that the table declares; None without a key cache."""
    spec = named(filters, "key_cache")
    if spec is None:
        return None
    return KeyLists(int(number(spec, "max_lists")), int(number(spec, "max_ids")))
