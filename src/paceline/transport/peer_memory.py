"""Private mappings of a peer's memory: they show what the peer writes, and local writes stay local."""

from __future__ import annotations

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

_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_OWN: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# Linux's numbers, which Python does not name.
_MAP_FIXED: Final = 0x10
_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@final
class PeerMemory(mmap.mmap):
    """The private mapping of a segment. A page that is written to here becomes this process's own copy of it."""

    _turn = 0  # which stretch is looked at next

    @staticmethod
    def of(descriptor: int, size_bytes: int) -> PeerMemory:
        """Map the file behind a descriptor, which is not needed any more then; raises OSError."""
        # Python maps files only while it keeps a descriptor of its own: the peer's memory would live as long.
        made = PeerMemory(-1, size_bytes, flags=_OWN, prot=_READ_WRITE)
        map_privately(made._address, size_bytes, descriptor)
        return made

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def keep(self) -> None:
        """Replace the mapping in place by a copy that this process owns; raises OSError."""
        size_bytes = len(self)
        copy = _succeeded(_libc.mmap(None, size_bytes, _READ_WRITE, _OWN, -1, 0))
        ctypes.memmove(copy, self._address, size_bytes)
        # Moved there atomically: a concurrent reader sees the same bytes before and after.
        _succeeded(_libc.mremap(copy, size_bytes, size_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, self._address))

    def was_written(self, at: Iterable[int] = ()) -> bool:
        """Return whether this process has written here since the last `reread`; True where that cannot be found out.

        The check takes 1 ms for each 100 MB. So in large memory it covers the pages of the addresses `at` and one
        stretch of all pages, the next one at each call: writes elsewhere are noticed some calls later.
        """
        start = self._address // mmap.PAGESIZE
        stop = start + -(-len(self) // mmap.PAGESIZE)
        first = start + self._turn * _STRETCH_PAGES
        self._turn = 0 if first + _STRETCH_PAGES >= stop else self._turn + 1
        stretches = [(first, min(stop - first, _STRETCH_PAGES)), *((address // mmap.PAGESIZE, 1) for address in at)]
        return _any_own(stretches)

    def was_written_anywhere(self) -> bool:
        """Return whether this process has written to any page; looks at all of them."""
        return any(self.was_written() for _ in range(-(-len(self) // (_STRETCH_PAGES * mmap.PAGESIZE))))

    def reread(self) -> None:
        """Discard local writes: every page shows the peer's memory again."""
        self.madvise(mmap.MADV_DONTNEED)


def map_privately(address: int, size_bytes: int, descriptor: int) -> None:
    """Map a file in the place of memory of this process, so that writes stay here; raises OSError."""
    _succeeded(_libc.mmap(address, size_bytes, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0))


def _succeeded(address: int | None) -> int:
    """Return the address that a call has given; raises OSError if it has failed."""
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def _any_own(stretches: Iterable[tuple[int, int]]) -> bool:
    """Return whether this process owns a page of these stretches, each (first page, number of pages)."""
    try:
        pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return any(_has_own(pagemap, first, num_pages) for first, num_pages in stretches)
    finally:
        os.close(pagemap)


def _has_own(pagemap: int, first: int, num_pages: int) -> bool:
    """Return whether one of these pages is a private copy and not the file's page."""
    entries = os.pread(pagemap, num_pages * _ENTRY_BYTES, first * _ENTRY_BYTES)
    known = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
    return len(known) < num_pages or bool(known.translate(None, delete=_NOT_OWN))
