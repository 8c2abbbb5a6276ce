"""Reads of a worker that are under way: which of them an answer ends."""

import threading

import pytest

from paceline.core.effects import ReadDone
from paceline.errors import PeerError
from paceline.worker.dense import PendingRead, Reads


def started(reads: Reads, *requests: int) -> list[PendingRead]:
    lock = threading.Condition()
    found = [PendingRead(0, lock) for _ in requests]
    for request, read in zip(requests, found, strict=True):
        reads.add(request, read)
    return found


def test_an_answer_ends_its_read_and_older_ones_of_its_table() -> None:
    reads = Reads()
    first, second, third = started(reads, 1, 2, 3)
    before = first.future
    reads.finish(ReadDone(2, "w", 5, "fetch"))
    assert before is first.future
    assert (first.future.result(timeout=0).clock, second.future.result(timeout=0).clock) == (5, 5)
    assert (second.is_over(), third.is_over(), third.future.done()) == (True, False, False)


def test_the_failure_of_a_worker_ends_its_reads_and_futures_that_are_made_of_them_later() -> None:
    reads = Reads()
    first, second = started(reads, 1, 2)
    before = first.future
    reads.abandon(PeerError("gone"))
    for future in (before, second.future):
        with pytest.raises(PeerError, match="gone"):
            future.result(timeout=0)
