"""Reads of a worker that are under way: which of them an answer ends."""

from paceline.core.effects import ReadDone
from paceline.worker.dense import Reads


def test_an_answer_ends_its_read_and_older_ones_of_its_table() -> None:
    reads = Reads()
    first, second, third = (reads.add(request) for request in (1, 2, 3))
    reads.finish(ReadDone(2, "w", 5, "fetch"))
    assert (first.result(timeout=0).clock, second.result(timeout=0).clock) == (5, 5)
    assert not third.done()
