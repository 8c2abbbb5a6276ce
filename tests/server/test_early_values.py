"""Pushes that come in pieces, and values that are sent ahead of their clock: what counts, and what does not."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline.core.messages import Push, PushId
from paceline.errors import PeerError
from paceline.server.early_values import Assemblies, EarlyBody, EarlySeries
from paceline.transport.base import Connection
from paceline.transport.buffer_pool import BufferPool, ExactAllocator
from paceline.transport.buffers import fresh_buffer
from paceline.update.summing import Contribution
from paceline.wire.messages import PushFrame, PushPiece

BYTES = 1024
FIRST, SECOND = (cast("Connection", object()) for _ in range(2))
LIKE = Contribution(torch.empty(0))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.early_values._LEAST_BYTES", 128)
    monkeypatch.setattr("paceline.server.early_values._GRAIN_BYTES", 64)


def assemblies() -> Assemblies:
    pool = BufferPool(ExactAllocator(fresh_buffer), poisons=True)
    return Assemblies("w", BYTES, torch.float32, pool)


def piece(at: int, worker: int = 0, seq: int = 0, clock: int = 0) -> PushPiece:
    return PushPiece(PushFrame(Push(PushId(0, worker, 0, seq), "w", clock, 0), 1.0, (), ()), at)


def body(at: int, size: int) -> memoryview:
    return memoryview(bytearray((at + place) % 251 for place in range(size)))


def test_a_push_is_whole_with_its_last_piece_and_copies_of_pieces_change_nothing() -> None:
    coming = assemblies()
    for at, num_bytes in ((0, 256), (0, 256), (512, 256), (0, 256), (512, 256), (256, 512)):
        assert coming.add(piece(at), body(at, 256), FIRST, LIKE) is None  # 256 is missing until the last
        assert coming.coming(0)[PushId(0, 0, 0, 0)][1] == num_bytes
    assert coming.coming(1) == {}
    assert coming.add(piece(512), body(512, 256), FIRST, LIKE) is None
    whole = coming.add(piece(768), body(768, 256), FIRST, LIKE)
    assert whole is not None
    assert whole.body == body(0, BYTES)
    assert coming.coming(0) == {}
    assert coming.add(piece(768), body(768, 256), FIRST, LIKE) is None
    assert coming.pool.num_lent == 1
    whole.release()


def test_a_connection_brings_one_push_at_a_time_and_takes_it_along() -> None:
    coming = assemblies()
    coming.add(piece(0), body(0, 256), FIRST, LIKE)
    coming.add(piece(0, worker=1), body(0, 512), SECOND, LIKE)
    coming.add(piece(0, seq=1), body(0, 128), FIRST, LIKE)
    found = coming.coming(0)
    assert {push_id: num_bytes for push_id, (_, num_bytes) in found.items()} == {
        PushId(0, 0, 0, 1): 128,
        PushId(0, 1, 0, 0): 512,
    }
    coming.forget_connection(FIRST)
    coming.forget_connection(FIRST)
    assert list(coming.coming(0)) == [PushId(0, 1, 0, 0)]
    assert coming.pool.num_lent == 1


@pytest.mark.parametrize(("at", "size"), [(0, BYTES + 1), (BYTES, 1), (-4, 8), (0, 0), (1 << 62, 8)])
def test_a_piece_outside_of_its_push_is_a_breach(at: int, size: int) -> None:
    with pytest.raises(PeerError, match="a piece of a push of table 'w' has bytes"):
        assemblies().add(piece(at), body(0, size), FIRST, LIKE)


class Series:
    """The values of a table of two workers, to which an update adds what is pushed."""

    def __init__(self) -> None:
        self.values = torch.arange(BYTES // 4, dtype=torch.float32)
        memory = cast("Any", self.values.numpy().data).cast("B")
        self.early = EarlySeries("w", memory, 4, self.preview)
        self.gradients = [torch.ones(BYTES // 4), torch.full((BYTES // 4,), 2.0)]
        for worker, connection in enumerate((FIRST, SECOND)):
            self.early.add_reader((worker, 0), connection)

    def preview(self, start: int, stop: int, contributions: Any) -> Tensor:
        return self.values[start:stop] + sum(each.gradient[start:stop] for each in contributions)

    def make(
        self, *num_bytes: int, clock: int = 0, seq: int = 0, members: tuple[int, ...] = (0, 1)
    ) -> EarlyBody | None:
        pushes = {
            PushId(0, worker, 0, seq): (Contribution(self.gradients[worker]), num)
            for worker, num in enumerate(num_bytes)
        }
        return self.early.make(members, clock, pushes)

    def update(self, *workers: int) -> tuple[int, int]:
        """Apply the pushes of these workers; return what both were sent ahead of that."""
        for worker in workers:
            self.values += self.gradients[worker]
        self.early.prove()
        return self.early.take_sent((0, 0), FIRST), self.early.take_sent((1, 0), SECOND)


def test_values_follow_the_push_that_is_least_far_and_count_where_the_update_makes_them() -> None:
    series = Series()
    assert series.make(BYTES) is None  # the other member has sent nothing
    assert series.make(BYTES, 100) is None  # too few to be worth it
    first = series.make(BYTES, 300)
    assert first is not None
    assert (first.message.at, first.body.nbytes, len(first.readers)) == (0, 256, 2)
    assert series.make(BYTES, 300) is None
    second = series.make(BYTES, BYTES)
    assert second is not None
    assert (second.message.at, second.body.nbytes) == (256, BYTES - 256)
    assert torch.frombuffer(first.body, dtype=torch.float32).tolist() == [place + 3.0 for place in range(64)]
    assert series.update(0, 1) == (BYTES, BYTES)
    assert series.early.take_sent((0, 0), FIRST) == 0  # said once


@pytest.mark.parametrize("workers", [(0,), (1,), (0, 1, 1)])
def test_values_do_not_count_where_others_contributed_to_the_update(workers: tuple[int, ...]) -> None:
    series = Series()
    assert series.make(BYTES, 512)
    assert series.update(*workers) == (0, 0)


def test_values_do_not_count_where_they_changed_otherwise_or_another_push_took_the_place_of_one() -> None:
    series = Series()
    assert series.make(512, 512)
    series.values[200:] += 1  # not among those that were sent, but of the same update
    assert series.update(0, 1) == (512, 512)
    for _ in range(2):
        series.early.add_reader((0, 0), FIRST)
        assert series.make(512, 512, clock=1)
        series.early.forget()
        assert series.make(BYTES, BYTES, clock=1) is None
        assert series.make(512, 512, clock=2)
        assert series.make(BYTES, BYTES, clock=2, seq=1) is None
        series.values[0] += 1
        assert series.update(0, 1) == (0, 0)


def test_a_connection_that_has_ended_was_sent_nothing_and_other_members_are_waited_for() -> None:
    series = Series()
    assert series.make(BYTES, BYTES, members=(0, 1, 2)) is None
    assert series.make(BYTES, BYTES)
    series.early.forget_connection(SECOND)
    assert series.update(0, 1) == (BYTES, 0)
    assert series.make(BYTES, BYTES, clock=1) is None  # no member takes any


def test_what_was_sent_over_another_connection_does_not_count() -> None:
    series = Series()
    assert series.make(BYTES, BYTES)
    series.values += sum(series.gradients)
    series.early.prove()
    assert series.early.take_sent((0, 0), SECOND) == 0
    assert series.early.take_sent((0, 0), FIRST) == BYTES


def test_an_update_that_cannot_be_computed_ahead_is_not() -> None:
    series = Series()
    series.gradients[1] = torch.ones(3)
    assert series.make(BYTES, BYTES) is None
    series.gradients[1] = torch.ones(BYTES // 4)
    assert series.make(BYTES, BYTES) is None  # in this clock
    assert series.make(BYTES, BYTES, clock=1)
