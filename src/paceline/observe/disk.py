"""What lies on the disk of a run: how much room is left, and which of its files and folders took most."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_NAMED: Final = 2  # files and folders, which a line of a terminal has room for
_MOST_LOOKED_AT: Final = 20_000  # files, so that a look ends soon


class DiskUse(msgspec.Struct, frozen=True):
    """The disk that a folder is on, and what is in the folder.

    Args:
        free_bytes: room that is left for this user.
        total_bytes: of the whole disk.
        of_run_bytes: what the folder takes of it.
        largest: names in the folder and the bytes that each takes, the largest first; of a folder with all in it.
    """

    free_bytes: int
    total_bytes: int
    of_run_bytes: int
    largest: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """Return in a few words what took the room.

        >>> DiskUse(0, 1_000_000, 999_000, (("filling", 900_000), ("trace/", 99_000))).text
        '0 MB of 1.0 MB are free; filling takes 0.9 MB, trace/ 0.1 MB'
        """
        room = f"{megabytes(self.free_bytes)} of {megabytes(self.total_bytes)} are free"
        if not self.largest:
            return room
        (first, first_bytes), *others = self.largest
        named = f"{first} takes {megabytes(first_bytes)}"
        named += "".join(f", {name} {megabytes(num_bytes)}" for name, num_bytes in others)
        if 2 * self.of_run_bytes < self.total_bytes - self.free_bytes:
            return f"{room}, and this run takes {megabytes(self.of_run_bytes)} of it: {named}"
        return f"{room}; {named}"


def look_at_disk(folder: Path) -> DiskUse | None:
    """Return what is on the disk of a folder; None if it cannot be read. Looks at 20,000 files at most."""
    try:
        disk = shutil.disk_usage(folder)
        entries = list(os.scandir(folder))
    except OSError:
        return None
    left, sizes = _MOST_LOOKED_AT, Counter[str]()
    for entry in entries:
        name = entry.name + "/" * entry.is_dir(follow_symlinks=False)
        for size_bytes in islice(_sizes(entry), left):
            sizes[name] += size_bytes
            left -= 1
    return DiskUse(disk.free, disk.total, sizes.total(), tuple(sizes.most_common(NUM_NAMED)))


def _sizes(entry: os.DirEntry[str]) -> Iterator[int]:
    """Yield what each file below an entry takes on its disk."""
    with suppress(OSError):  # gone, or not for us to look at
        if not entry.is_dir(follow_symlinks=False):
            yield 512 * entry.stat(follow_symlinks=False).st_blocks
            return
        with os.scandir(entry) as inside:
            for each in inside:
                yield from _sizes(each)


def megabytes(num_bytes: int) -> str:
    """Return bytes in MB, or in GB from a thousand of them on.

    >>> megabytes(904_000), megabytes(45_200_000), megabytes(1_200_000_000)
    ('0.9 MB', '45 MB', '1.2 GB')
    """
    if num_bytes >= 999_500_000:
        return f"{num_bytes / 1e9:,.1f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if 50_000 <= num_bytes < 9_950_000 else f"{num_bytes / 1e6:.0f} MB"
