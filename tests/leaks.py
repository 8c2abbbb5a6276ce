"""What a test must not leave behind in its own process: descriptors (memory files are descriptors too) and threads."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def open_descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


def shared_mappings() -> int:
    """How many pieces of shared memory are mapped; those of a connection go with its last view."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:paceline" in line for line in maps)


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    descriptors, threads, mappings = open_descriptors(), set(threading.enumerate()), shared_mappings()
    yield
    gc.collect()
    left = {number: name for number, name in open_descriptors().items() if number not in descriptors}
    assert not left, f"descriptors left open: {left}"
    running = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not running, f"threads left running: {running}"
    assert shared_mappings() <= mappings, "shared memory left mapped"
