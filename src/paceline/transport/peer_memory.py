"""A peer's memory, mapped here: it shows what the peer writes, and what is written here stays here."""

import ctypes
import mmap
import os
from typing import Final, final

_PAGEMAP: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
_CHUNK_PAGES: Final = 16384
# The highest byte of an entry says: the page is in memory, or in the swap, and if so whether it is one of a file.
_HERE: Final = 0x80 | 0x40
_FROM_FILE: Final = 0x20
_NOT_OWN: Final = bytes(flags for flags in range(256) if not flags & _HERE or flags & _FROM_FILE)


@final
class PeerMemory(mmap.mmap):
    """The private mapping of a segment. A page that is written to here becomes this process's own copy of it."""

    def was_written(self) -> bool:
        """Say whether this process has written here since it last forgot that; where nobody can tell, it may have."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self)) // mmap.PAGESIZE
        stop = start + -(-len(self) // mmap.PAGESIZE)
        try:
            pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            return any(
                _has_own(pagemap, first, min(stop - first, _CHUNK_PAGES)) for first in range(start, stop, _CHUNK_PAGES)
            )
        finally:
            os.close(pagemap)

    def reread(self) -> None:
        """Forget what was written here: every page shows the peer's memory again."""
        self.madvise(mmap.MADV_DONTNEED)


def _has_own(pagemap: int, first: int, num_pages: int) -> bool:
    """Say whether some of these pages are not those of the file they belong to."""
    entries = os.pread(pagemap, num_pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
    known = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
    return len(known) < num_pages or bool(known.translate(None, delete=_NOT_OWN))
