"""A batch that lies in the memory of a data server: looked at here, and returned when nobody looks at it any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from paceline.transport.peer_memory import PeerMemory


def borrowed(memory: memoryview, on_returned: Callable[[], None]) -> memoryview:
    """Return a view of this memory, which is not empty; once all that was made of the view is gone, the call is made.

    That happens in whatever thread lets go of the last tensor, also in the midst of anything: it must not lock.

    >>> returned = []
    >>> view = borrowed(memoryview(bytearray(b"abcd")), lambda: returned.append(1))
    >>> part = view[1:3]
    >>> del view
    >>> returned, bytes(part)
    ([], b'bc')
    >>> del part
    >>> returned
    [1]
    """
    holder = np.frombuffer(memory, dtype=np.uint8)
    weakref.finalize(holder, on_returned).atexit = False
    return holder.data


def forget_writes(memory: memoryview) -> None:
    """See what the data server has written, also where a loop has written into an earlier batch in this memory.

    What is written to mapped memory stays here, and hides what the data server writes there later.
    """
    if isinstance(memory.obj, PeerMemory) and memory.obj.was_written_anywhere():
        memory.obj.reread()
