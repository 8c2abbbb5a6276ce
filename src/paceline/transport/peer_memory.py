"""A peer's memory, mapped here: it shows what the peer writes, and what is written here stays here."""

import mmap
import os
from collections.abc import Iterable
from typing import Final, final

_PAGEMAP: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
_PRESENT: Final = 1 << 63
_FROM_FILE: Final = 1 << 61


@final
class PeerMemory(mmap.mmap):
    """The private mapping of a segment. A page that is written to here becomes this process's own copy of it."""

    def reread(self) -> None:
        """Forget what was written here: every page shows the peer's memory again."""
        self.madvise(mmap.MADV_DONTNEED)


def any_written(addresses: Iterable[int]) -> bool:
    """Say whether the page of one of these addresses, all inside peer memory, was written to by this process.

    Where the system does not tell, the answer is no.
    """
    try:
        pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return any(_is_own(pagemap, address) for address in addresses)
    finally:
        os.close(pagemap)


def _is_own(pagemap: int, address: int) -> bool:
    raw = os.pread(pagemap, _ENTRY_BYTES, address // mmap.PAGESIZE * _ENTRY_BYTES)
    entry = int.from_bytes(raw, "little")
    return bool(entry & _PRESENT) and not entry & _FROM_FILE
