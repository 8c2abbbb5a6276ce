"""Thousands of pushes that are held for one clock: what one more costs does not grow with those before it."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Condition

import pytest
import torch
from tests.attacks.rogue import row_table
from tests.nodes.cluster import hosted_tables
from torch import Tensor

from paceline.core.effects import Release
from paceline.core.messages import Push, PushId
from paceline.server.served_table import ACCEPTED
from paceline.update.rows.store import RowStore
from paceline.wire.messages import Keys, PushFrame, RowPushFrame
from paceline.worker.pushes import PendingPush, PushBuffer, Pushes

NUM = 1000


class Clock(int):
    """A clock that counts how often one is compared."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        Clock.num_compared += 1
        return int(self) < int(other)


def one_more(pushes: Pushes, seq: int, clock: int) -> PushId:
    assert pushes.has_slot(clock)
    buffer = pushes.lend(shown=False)
    made = Push(PushId(1, 0, 0, seq), "w", clock, 0)
    pushes.prepare(buffer, {0: buffer.memory}, PushFrame(made, 1.0, (), ()), PendingPush(Condition()))
    return made.id


def test_memory_for_one_more_is_found_without_a_look_at_each() -> None:
    pushes = Pushes(2, True, lambda: PushBuffer(memoryview(bytearray(4)), torch.zeros(1)))
    Clock.num_compared = 0
    ids = [one_more(pushes, seq, Clock(3)) for seq in range(NUM)]
    assert pushes.num_held(3) > 0
    assert not pushes.num_held(2)
    assert Clock.num_compared <= 2 * NUM
    assert not pushes.has_slot(Clock(4)), "those of the clock before are waited for"
    for push_id in ids:
        assert pushes.release(Release(0, "w", push_id)) is not None
    assert pushes.has_slot(Clock(4))
    assert not pushes.num_held(3)
    one_more(pushes, NUM, Clock(4))
    assert pushes.num_held(4) > 0


@pytest.mark.parametrize("num_ids", [1, 3])
def test_room_for_rows_is_made_without_a_look_at_each_push(num_ids: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    reserve = RowStore.reserve

    def counted(store: RowStore, ids: Sequence[Tensor]) -> None:
        sizes.append(len(ids))
        reserve(store, ids)

    monkeypatch.setattr(RowStore, "reserve", counted)
    tables = hosted_tables()
    tables.declare(row_table("r", consistency="bsp"))
    served = tables["r"]

    def push(seq: int) -> PushId:
        made = Push(PushId(1, 0, 0, seq), "r", 0, 0)
        ids = torch.arange(seq, seq + num_ids)
        body = bytearray(ids.numpy().tobytes() + torch.ones(num_ids, 2).numpy().tobytes())
        frame = RowPushFrame(made, 1.0, (), Keys(num_ids, b"", sent=True))
        assert served.accept(frame, memoryview(body), None) == ACCEPTED
        return made.id

    held = [push(seq) for seq in range(NUM)]
    assert max(sizes) < 100
    served.discard(held[0])
    held.append(push(NUM))
    assert served.apply(held[1:], 0) == ""
    rows = served.store.read(torch.arange(NUM + num_ids))
    expected = torch.zeros(NUM + num_ids)
    for seq in range(1, NUM + 1):
        expected[seq : seq + num_ids] += 1
    assert torch.equal(rows, expected[:, None].expand(-1, 2))
    tables.close()
