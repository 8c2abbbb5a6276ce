"""Operations on rows: the interface, and the choice between the package's small C library and torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Protocol

from paceline.errors import UsageError
from paceline.notices import tell
from paceline.update.rows.index import NO_SEED, Seed
from paceline.update.rows.native_ops import LIBRARY, NativeOps, load_library
from paceline.update.rows.torch_ops import TorchOps

if TYPE_CHECKING:
    from torch import Tensor


class RowOps(Protocol):
    """The operations behind row tables; every implementation gives the same results, bit for bit.

    The `seed` of an index decides where its entries lie, and nothing else. Peers that choose ids must not know it, or
    each lookup could be made to pass all of them. It is the same in all calls for one index.

    Ids, keys, slots, positions and entries are contiguous int64 tensors of one dimension in main memory; any int64 is
    an id. An index is `entries` (a power of two of them, zero is empty, at most three of four taken) together with
    `ids`, the id of every slot. Columns and rows are (n, width) tensors of one dtype whose rows are contiguous. Calls
    block, raise ProtocolBug for what no caller may do, and may run at once where they share no tensor that one changes.
    """

    name: ClassVar[str]  # "native" or "torch"

    def find(self, entries: Tensor, ids: Tensor, keys: Tensor, seed: Seed = NO_SEED) -> Tensor:
        """Return the slot of each of the keys, (n,), -1 where it has none."""
        ...

    def insert(
        self, entries: Tensor, ids: Tensor, keys: Tensor, next_slot: int, free: Tensor, seed: Seed = NO_SEED
    ) -> tuple[Tensor, Tensor]:
        """Return the slots of keys, which may repeat, and the positions where new ids appear first, ascending.

        New ids take slots from the end of `free`, which stays as it is, and then `next_slot` and up; they are written
        to `ids`. The caller makes sure that `entries` and `ids` have room for all of them.
        """
        ...

    def erase(self, entries: Tensor, ids: Tensor, slots: Tensor, seed: Seed = NO_SEED) -> None:
        """Take distinct slots out of the index."""
        ...

    def rebuild(self, entries: Tensor, ids: Tensor, live: Tensor | None, num_slots: int, seed: Seed = NO_SEED) -> None:
        """Fill entries that are all zero from the first `num_slots` ids, or those of them where `live` (bool) is."""
        ...

    def gather(self, column: Tensor, slots: Tensor, out: Tensor) -> None:
        """Copy rows of the column to `out`, (n, width); slot -1 leaves its row of `out` as it is."""
        ...

    def scatter(self, column: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Copy rows, (n, width), to distinct slots of the column."""
        ...

    def unique(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct keys in the order of their first appearance, and which of them every key is, (n,)."""
        ...

    def sum_rows(self, rows: Tensor, inverse: Tensor, num: int) -> Tensor:
        """Return (num, width): to each sum its rows are added one by one from zero on, in the order given.

        Rows of 16-bit floats are added in float32 and rounded once.
        """
        ...

    def split(self, keys: Tensor, num_servers: int) -> tuple[Tensor, list[int]]:
        """Return the positions of keys by the server that owns them, in the order given, and how many each has."""
        ...


@cache
def tell_of_missing_library(tell: Callable[[str], None] = tell) -> None:
    """Tell once in this process if the library of row operations cannot be used, and what to do."""
    library = load_library(LIBRARY)
    if isinstance(library, str):
        tell(f"row tables are looked up in torch, which is slower, as their C library cannot be used: {library}")


def row_ops(name: str = "") -> RowOps:
    """Return the operations called "native" or "torch", or the faster of those that are there.

    Raises UsageError when it is "native" and the library cannot be loaded.

    Example:
        >>> import torch
        >>> row_ops("torch").unique(torch.tensor([7, -1, 7]))
        (tensor([ 7, -1]), tensor([0, 1, 0]))
    """
    if name not in ("", "native", "torch"):
        raise UsageError(f"There are no row operations '{name}'; expected 'native', 'torch' or '' for the faster.")
    if name == "torch":
        return TorchOps()
    library = load_library()
    if isinstance(library, str):
        if name:
            raise UsageError(f"The library of row operations cannot be loaded: {library}.")
        return TorchOps()
    return NativeOps(library)
