"""Pieces of work are dealt by the first server: copies get the same, the dead give back, all have to agree."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline.core.messages import PushId
from paceline.core.work_queue import Life, WorkAnswer, WorkRound
from paceline.errors import UsageError
from paceline.server.work_queue import MAX_WORKS, WorkQueueHost
from paceline.wire.requests import ClaimWork, RequestDone, RequestFailed, WorkQueueEntry, read_work_answer

ONE, OTHER = (0, 0), (1, 0)


class Table:
    """A dealer, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Life, object]] = []
        self.work_host = WorkQueueHost(self._send)

    def _send(self, rank: int, incarnation: int, message: object, body: memoryview) -> None:
        self.sent.append(
            ((rank, incarnation), read_work_answer(body).answer if isinstance(message, RequestDone) else message)
        )

    def ask(
        self, life: Life, number: int, place: int = 0, sizes: tuple[int, ...] = (1, 2), work: str = "slices"
    ) -> object:
        """What a worker is answered; None while it has to wait."""
        before = len(self.sent)
        self.work_host.claim(life, ClaimWork(number, work, 0, place, sizes, (3, 3, 2, 0, 0)))
        self.work_host.release()
        return self.sent[-1][1] if len(self.sent) > before else None


def piece(home: int, index: int, num_left: int = 0) -> WorkAnswer:
    return WorkAnswer("piece", WorkRound(0, 0), home, index, num_left)


def test_a_copy_of_a_request_gets_the_same_answer_and_takes_nothing() -> None:
    table = Table()
    assert [table.ask(OTHER, 4), table.ask(OTHER, 4), table.ask(OTHER, 5)] == [piece(1, 0, 2)] * 2 + [piece(1, 1, 1)]
    assert table.ask(OTHER, 4) is None, "its sender has had that answer"
    assert table.ask(ONE, 1) == piece(0, 0)


def test_a_wait_for_the_end_ends_when_the_last_update_is_applied() -> None:
    table = Table()
    assert [table.ask(OTHER, number) for number in (1, 2, 3)] == [piece(1, 0, 2), piece(1, 1, 1), piece(0, 0)]
    assert [table.ask(ONE, 1), table.ask(ONE, 2, 1, ())] == [WorkAnswer("rest", WorkRound(0, 0)), None]
    table.work_host.settle([PushId(0, *OTHER, 0)])
    assert table.sent[-1] == (ONE, WorkAnswer("over", WorkRound(0, 1)))
    assert table.ask(ONE, 2, 1, ()) == WorkAnswer("over", WorkRound(0, 1)), "a copy"


def test_a_dead_worker_gives_back_and_is_dealt_no_more() -> None:
    table = Table()
    assert table.ask(OTHER, 1, sizes=(0, 1)) == piece(1, 0)
    assert table.ask(ONE, 1, 1, ()) is None
    table.work_host.remove_worker(OTHER)
    table.work_host.release()
    assert table.sent[-1] == (ONE, replace(piece(1, 0), again=True))
    assert table.ask(OTHER, 2) == RequestFailed(2, "worker 1 takes no part")


def test_a_worker_that_goes_to_another_work_holds_up_no_other_in_the_one_before() -> None:
    table = Table()
    assert table.ask(OTHER, 1, sizes=(0, 1)) == piece(1, 0)
    assert table.ask(ONE, 1, 1, ()) is None
    assert table.ask(OTHER, 2, sizes=(0, 1), work="others") == WorkAnswer("piece", WorkRound(0, 0), 1, 0)
    assert (ONE, WorkAnswer("over", WorkRound(0, 1))) in table.sent


def test_workers_that_cut_the_work_differently_are_told() -> None:
    table = Table()
    table.ask(ONE, 1)
    with pytest.raises(UsageError, match=r"workers 0 and 1 do not cut slices alike: .* is \(3, 3, 2, 0, 0\) there and"):
        table.work_host.claim(OTHER, ClaimWork(1, "slices", 0, 0, (1, 2), (3, 3, 4, 0, 0)))


def beginning(number: int, start: int, epoch: int = 0) -> ClaimWork:
    return ClaimWork(number, "slices", epoch, 0, (1, 2), (3, 3, 2, 0, epoch), start)


def test_all_begin_an_epoch_behind_the_same_batch_and_are_told_where() -> None:
    sent: list[tuple[int, WorkQueueEntry]] = []
    work_host = WorkQueueHost(lambda rank, incarnation, message, body: sent.append((rank, read_work_answer(body))))
    work_host.claim(ONE, beginning(1, start=4))
    work_host.release()
    with pytest.raises(
        UsageError, match="do not begin slices alike: after 4 batches of epoch 0 there and after 6 here"
    ):
        work_host.claim(OTHER, beginning(1, start=6))
    work_host.claim(OTHER, beginning(1, start=4))
    work_host.release()
    assert sent == [(0, WorkQueueEntry(piece(0, 0, 2), 4)), (1, WorkQueueEntry(piece(1, 0, 1), 4))]


def test_a_restarted_worker_is_told_where_the_others_began_before_it_is_given_anything() -> None:
    sent: list[tuple[int, WorkQueueEntry]] = []
    work_host = WorkQueueHost(lambda rank, incarnation, message, body: sent.append((rank, read_work_answer(body))))
    again = (1, 1)
    work_host.claim(ONE, beginning(1, start=4))
    work_host.release()
    work_host.claim(again, beginning(1, start=6))
    work_host.release()
    work_host.claim(again, beginning(2, start=4))
    work_host.release()
    elsewhere = WorkQueueEntry(WorkAnswer("elsewhere", WorkRound(0, 0)), 4)
    assert sent[1:] == [(1, elsewhere), (1, WorkQueueEntry(piece(1, 0, 1), 4))]


def test_a_restarted_worker_says_nothing_about_where_later_epochs_begin() -> None:
    sent: list[tuple[int, WorkQueueEntry]] = []
    work_host = WorkQueueHost(lambda rank, incarnation, message, body: sent.append((rank, read_work_answer(body))))
    work_host.claim(ONE, beginning(1, start=4))
    work_host.release()
    work_host.claim((1, 1), beginning(1, start=6, epoch=1))
    work_host.release()
    work_host.claim(ONE, beginning(2, start=0, epoch=1))
    work_host.release()
    assert [dealing.start for _, dealing in sent] == [4, 0, 0]


def test_a_restarted_worker_that_comes_first_says_where_the_first_epoch_begins() -> None:
    sent: list[tuple[int, WorkQueueEntry]] = []
    work_host = WorkQueueHost(lambda rank, incarnation, message, body: sent.append((rank, read_work_answer(body))))
    work_host.claim((1, 1), beginning(1, start=6))
    work_host.claim(ONE, beginning(1, start=6))
    work_host.release()
    assert [(rank, dealing.start) for rank, dealing in sent] == [(0, 6), (1, 6)]


def test_a_wait_for_an_epoch_that_others_left_for_a_later_one_ends() -> None:
    sent: list[tuple[int, WorkQueueEntry]] = []
    work_host = WorkQueueHost(lambda rank, incarnation, message, body: sent.append((rank, read_work_answer(body))))
    work_host.claim(OTHER, beginning(1, start=4))
    work_host.release()
    work_host.claim(ONE, ClaimWork(1, "slices", 0, 1, (), (3, 3, 2, 0, 0), 4))
    work_host.release()
    assert [rank for rank, _ in sent] == [1], "the piece is not settled"
    work_host.claim(OTHER, beginning(2, start=0, epoch=2))
    work_host.release()
    assert [rank for rank, _ in sent] == [1, 1, 0], "the piece counts when its holder goes on, after the other was seen"
    assert sent[-1] == (0, WorkQueueEntry(WorkAnswer("over", WorkRound(0, 1)), 4))


def test_an_older_copy_takes_nothing_from_the_request_that_waits() -> None:
    table = Table()
    assert table.ask(OTHER, 1, sizes=(0, 1)) == piece(1, 0)
    assert [table.ask(ONE, 1, sizes=(0, 1)), table.ask(ONE, 2, 1, ())] == [WorkAnswer("rest", WorkRound(0, 0)), None]
    assert table.ask(ONE, 1, sizes=(0, 1)) == WorkAnswer("rest", WorkRound(0, 0)), "a copy, late"
    table.work_host.settle([PushId(0, *OTHER, 0)])
    assert table.sent[-1] == (ONE, WorkAnswer("over", WorkRound(0, 1)))


def test_what_is_agreed_on_for_one_work_is_kept_when_another_comes_to_later_epochs() -> None:
    sent: list[tuple[int, WorkQueueEntry]] = []
    work_host = WorkQueueHost(lambda rank, incarnation, message, body: sent.append((rank, read_work_answer(body))))
    work_host.claim(ONE, beginning(1, start=4))
    work_host.release()
    work_host.claim(ONE, replace(beginning(2, start=0, epoch=9), work="others"))
    work_host.release()
    work_host.claim((1, 1), beginning(1, start=6))
    work_host.release()
    assert sent[-1] == (1, WorkQueueEntry(WorkAnswer("elsewhere", WorkRound(0, 0)), 4))


def test_more_works_than_a_job_can_have_are_refused_with_what_to_do() -> None:
    table = Table()
    for number in range(MAX_WORKS):
        table.ask(ONE, number + 1, work=f"slices of loader {number}")
    with pytest.raises(UsageError, match="1024 loaders are dealt out already: make each loader once, before the loop"):
        table.ask(ONE, MAX_WORKS + 1, work="one more")
