"""A peer's memory, mapped here: it shows what the peer writes, and what is written here stays here."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Final, final

_PAGEMAP: Final = "/proc/self/pagemap"
_ENTRY_BYTES: Final = 8
_STRETCH_PAGES: Final = 1024
# The highest byte of an entry says: the page is in memory, or in the swap, and if so whether it is one of a file.
_HERE: Final = 0x80 | 0x40
_FROM_FILE: Final = 0x20
_NOT_OWN: Final = bytes(flags for flags in range(256) if not flags & _HERE or flags & _FROM_FILE)


@final
class PeerMemory(mmap.mmap):
    """The private mapping of a segment. A page that is written to here becomes this process's own copy of it."""

    _turn = 0  # which stretch is looked at next

    def was_written(self, at: Iterable[int] = ()) -> bool:
        """Say whether this process has written here since it last forgot that; where nobody can tell, it may have.

        Looking takes 1 ms for each 100 MB. So of large memory it looks at the pages of these addresses, and at one
        stretch of all pages, the next one each time: what is written elsewhere is noticed some looks later.
        """
        start = ctypes.addressof(ctypes.c_char.from_buffer(self)) // mmap.PAGESIZE
        stop = start + -(-len(self) // mmap.PAGESIZE)
        first = start + self._turn * _STRETCH_PAGES
        self._turn = 0 if first + _STRETCH_PAGES >= stop else self._turn + 1
        stretches = [(first, min(stop - first, _STRETCH_PAGES)), *((address // mmap.PAGESIZE, 1) for address in at)]
        return _any_own(stretches)

    def was_written_anywhere(self) -> bool:
        """Say so after looking at every page."""
        return any(self.was_written() for _ in range(-(-len(self) // (_STRETCH_PAGES * mmap.PAGESIZE))))

    def reread(self) -> None:
        """Forget what was written here: every page shows the peer's memory again."""
        self.madvise(mmap.MADV_DONTNEED)


def _any_own(stretches: Iterable[tuple[int, int]]) -> bool:
    """Say whether a page of these stretches, each (first page, number of pages), is this process's own."""
    try:
        pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return any(_has_own(pagemap, first, num_pages) for first, num_pages in stretches)
    finally:
        os.close(pagemap)


def _has_own(pagemap: int, first: int, num_pages: int) -> bool:
    """Say whether some of these pages are not those of the file they belong to."""
    entries = os.pread(pagemap, num_pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
    known = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
    return len(known) < num_pages or bool(known.translate(None, delete=_NOT_OWN))
