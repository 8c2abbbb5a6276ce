"""Values that come ahead of their clock, on the worker: what continues what is here, and nothing else."""

from __future__ import annotations

import pytest

from paceline.worker.dense import EarlyPart


@pytest.fixture
def part() -> EarlyPart:
    """A part of 8 bytes, of which 4 have come in clock 3."""
    part = EarlyPart(memoryview(bytearray(8)))
    assert part.place(3, 0, 4) is not None
    return part


@pytest.mark.parametrize(("clock", "at", "size"), [(3, 6, 2), (3, 2, 2), (3, 0, 4), (2, 4, 4), (4, 4, 4), (3, 4, 5)])
def test_only_what_continues_is_taken(part: EarlyPart, clock: int, at: int, size: int) -> None:
    assert part.place(clock, at, size) is None
    assert part.place(3, 4, 4) is not None
    assert part.whole(3) is not None


def test_what_came_over_a_connection_that_has_ended_does_not_count_in_its_clock(part: EarlyPart) -> None:
    part.forget()
    assert part.place(3, 4, 4) is None
    assert part.place(3, 0, 8) is None
    assert part.whole(3) is None
    assert part.place(4, 0, 8) is not None
    assert part.whole(4) is not None
