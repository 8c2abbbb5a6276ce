"""The parts of the cores by themselves: ledger, readers, closing, outbox, membership."""

from tests.core.cores import pull, push, push_id, sender, tick

from paceline.core.exactly_once import WINDOW, DedupWindow, Retransmit
from paceline.core.membership import WorkerLives
from paceline.core.messages import Applied, Clock, Held, Join, Pull, PushRefused
from paceline.core.tables import MAX_WITHDRAWN, ClockCommit, CommitDecision, DenseReadQueue

# -- ledger ----------------------------------------------------------------------------------------------------------


def test_t29_the_ledger_knows_the_answer_to_every_unsettled_push() -> None:
    dedup = DedupWindow()
    dedup.record("w", Held(push_id(0, 0)))
    dedup.record("w", Applied(push_id(0, 0)))
    dedup.record("v", PushRefused(push_id(0, 1), "no"))
    assert dedup.answer(push(0, 0, 0)) == Applied(push_id(0, 0))
    assert dedup.answer(push(0, 1, 0)) == PushRefused(push_id(0, 1), "no")
    assert dedup.answer(push(0, 2, 0)) is None


def test_t29_the_ledger_forgets_what_is_settled_and_calls_its_copies_late() -> None:
    dedup = DedupWindow()
    for seq in range(5):
        dedup.record("w", Applied(push_id(0, seq)))
    dedup.settle("w", 3)
    dedup.settle("w", 1)  # an older word changes nothing
    assert (len(dedup), dedup.settled_in("w")) == (2, 3)
    assert dedup.is_late(push(0, 2, 0))
    assert not dedup.is_late(push(0, 3, 0))
    dedup.record("w", Applied(push_id(0, 2)))  # an answer that is known to be known is not kept
    assert len(dedup) == 2


def test_no_word_of_the_sender_settles_what_is_only_held() -> None:
    dedup = DedupWindow()
    dedup.record("w", Applied(push_id(0, 0)))
    dedup.record("w", Held(push_id(0, 1)))
    dedup.settle("w", 2)
    assert (len(dedup), dedup.settled_in("w")) == (1, 1)
    dedup.record("w", Applied(push_id(0, 1)))
    dedup.settle("w", 2)
    assert (len(dedup), dedup.settled_in("w")) == (0, 2)


def test_the_ledger_says_when_a_worker_has_too_much_under_way() -> None:
    dedup = DedupWindow()
    for seq in range(WINDOW):
        assert not dedup.overflows("w")
        dedup.record("w", Held(push_id(0, seq)))
    assert dedup.overflows("w")
    assert not dedup.overflows("v")


def test_t9_the_ledger_lists_what_is_applied_to_one_table() -> None:
    dedup = DedupWindow()
    dedup.record("w", Applied(push_id(0, 2)))
    dedup.record("w", Applied(push_id(0, 0)))
    dedup.record("w", Held(push_id(0, 1)))
    dedup.record("v", Applied(push_id(0, 3)))
    assert dedup.applied_in("w") == (0, 2)


# -- readers ---------------------------------------------------------------------------------------------------------


def test_t4_every_waiter_at_or_below_the_clock_is_ready_also_after_a_jump() -> None:
    readers = DenseReadQueue(subscribing=False)
    assert not readers.add_pull(pull(0, 1, 3, needs=3), 0)
    assert not readers.add_pull(pull(1, 1, 1, needs=1), 0)
    assert not readers.add_pull(pull(2, 1, 5, needs=5), 0)
    assert [p.sender.worker for p in readers.satisfied_pulls(4)] == [0, 1]


def test_an_overtaken_pull_is_ignored_and_a_repeated_one_replaces_itself() -> None:
    readers = DenseReadQueue(subscribing=False)
    assert not readers.add_pull(pull(0, 2, 3, needs=3), 0)
    assert not readers.add_pull(pull(0, 1, 0, needs=0), 0)
    assert not readers.add_pull(pull(0, 2, 3, needs=3), 0)
    assert readers.satisfied_pulls(3) == [pull(0, 2, 3, needs=3)]
    assert readers.add_pull(pull(0, 2, 3, needs=3), 3)
    assert readers.satisfied_pulls(3) == []


def test_t10_a_reader_subscribes_with_the_reply_and_has_one_delivery_at_a_time() -> None:
    readers = DenseReadQueue(subscribing=True)
    assert readers.start_deliveries(5) == []
    assert readers.add_pull(pull(0, 1, 0, needs=0), 1)
    assert readers.start_deliveries(1) == []  # it has just been sent this clock
    assert readers.start_deliveries(2) == [0]
    assert readers.start_deliveries(3) == []  # still busy with clock 2
    readers.note_taken(0, 1)  # an older notice
    assert readers.start_deliveries(3) == []
    readers.note_taken(0, 2)
    assert readers.start_deliveries(4) == [0]  # the newest only; clock 3 is skipped


def test_readers_forget_a_worker() -> None:
    readers = DenseReadQueue(subscribing=True)
    readers.add_pull(pull(0, 7, 0, needs=0), 0)
    readers.add_pull(pull(1, 7, 3, needs=3), 0)
    readers.forget(0)
    readers.forget(1)
    assert readers.start_deliveries(9) == []
    assert readers.satisfied_pulls(9) == []
    assert readers.add_pull(pull(0, 1, 0, needs=0), 0)  # the next life counts its requests from the start


# -- closing ---------------------------------------------------------------------------------------------------------


def test_t21_a_clock_closes_in_rank_order_whatever_the_order_of_arrival() -> None:
    commit = ClockCommit(num_followers=0)
    for worker in (2, 0, 1):
        commit.hold(push_id(worker, 0), 0)
    all_contribute = CommitDecision(((0, 0), (1, 0), (2, 0)))
    assert commit.close(all_contribute) == ([push_id(0, 0), push_id(1, 0), push_id(2, 0)], [], [])
    assert commit.clock == 1


def test_t33_a_worker_that_does_not_contribute_is_refused_also_a_former_life() -> None:
    commit = ClockCommit(num_followers=0)
    commit.hold(push_id(0, 0), 0)
    commit.hold(push_id(1, 0, incarnation=0), 0)
    commit.hold(push_id(1, 0, incarnation=1), 0)
    commit.hold(push_id(0, 1), 1)
    applied, withdrawn, late = commit.close(CommitDecision(((1, 1),)))
    assert applied == [push_id(1, 0, incarnation=1)]
    assert withdrawn == []
    assert late == [push_id(0, 0), push_id(1, 0)]
    assert commit.close(CommitDecision(((0, 0),))) == ([push_id(0, 1)], [], [])


def test_a_withdrawn_push_is_left_out_of_its_clock_and_others_of_its_worker_are_not() -> None:
    commit = ClockCommit(num_followers=0)
    for seq in (0, 1):
        commit.hold(push_id(1, seq), 0)
    assert commit.withdraw(1, 0, 0, 1)
    decision = commit.decide([(0, 0), (1, 0)])
    assert decision == CommitDecision(((0, 0), (1, 0)), ((1, 0, 1),))
    assert commit.close(decision) == ([push_id(1, 0)], [push_id(1, 1)], [])
    assert commit.withdraw(1, 0, 0, 1)  # too late to matter
    assert commit.decide([(0, 0), (1, 0)]) == CommitDecision(((0, 0), (1, 0)))


def test_a_push_is_withdrawn_from_a_clock_however_far_ahead_and_too_many_are_not_taken() -> None:
    commit = ClockCommit(num_followers=0)
    assert commit.withdraw(1, 0, 10**6, 0)
    commit.clock = 10**6
    assert commit.decide([(1, 0)]).withdrawn == ((1, 0, 0),)
    assert all(commit.withdraw(1, 0, 10**6, seq) for seq in range(MAX_WITHDRAWN))
    assert not commit.withdraw(1, 0, 10**6, MAX_WITHDRAWN)
    assert commit.withdraw(0, 0, 10**6, 0)  # each worker has its own number


def test_the_lead_keeps_a_decision_until_every_follower_has_applied_it() -> None:
    commit = ClockCommit(num_followers=2)
    assert commit.follow(1, 0) is None
    assert commit.follow(2, 0) is None
    assert commit.followers_of(0) == [1, 2]
    commit.close(commit.decide([(0, 0)]))
    assert commit.follow(1, 1) is None
    assert commit.follow(2, 0) == CommitDecision(((0, 0),))  # asked again: its answer was lost
    assert commit.follow(2, 1) is None
    assert commit.follow(2, 0) is None  # a late copy; the decision is not needed any more


def test_a_clock_from_before_the_table_has_no_contributors() -> None:
    assert ClockCommit(num_followers=1, clock=3).follow(1, 1) == CommitDecision(())


def test_the_pushes_of_the_dead_are_dropped_once() -> None:
    commit = ClockCommit(num_followers=0)
    commit.hold(push_id(0, 0), 0)
    commit.hold(push_id(0, 1), 1)
    commit.hold(push_id(1, 0), 0)
    assert commit.drop(0, 0) == [push_id(0, 0), push_id(0, 1)]
    assert commit.drop(0, 0) == []
    assert commit.close(CommitDecision(((1, 0),))) == ([push_id(1, 0)], [], [])


# -- outbox ----------------------------------------------------------------------------------------------------------


def test_what_is_unanswered_is_repeated_with_growing_pauses_up_to_a_limit() -> None:
    retransmit = Retransmit(retry_s=1.0)
    retransmit.add((0, "clock", 0), tick(0, 1), now=0.0)
    times = list[float]()
    while len(times) < 7:
        due = retransmit.next_due()
        assert due is not None
        assert retransmit.repeat_due(due - 0.001) == []
        assert [(server, entry.message) for server, entry in retransmit.repeat_due(due)] == [(0, tick(0, 1))]
        times.append(due)
    assert times == [1.0, 3.0, 7.0, 15.0, 27.0, 39.0, 51.0]


def test_an_answer_is_expected_once_and_a_later_message_replaces_the_earlier() -> None:
    retransmit = Retransmit(retry_s=1.0)
    retransmit.add((0, "clock", 0), tick(0, 1), now=0.0)
    retransmit.add((0, "clock", 0), tick(0, 2), now=0.5)
    assert retransmit.message((0, "clock", 0)) == tick(0, 2)
    assert retransmit.next_due() == 1.5
    assert retransmit.answered((0, "clock", 0))
    assert not retransmit.answered((0, "clock", 0))
    assert retransmit.next_due() is None


def test_a_held_push_is_repeated_bare_and_patiently() -> None:
    retransmit = Retransmit(retry_s=1.0)
    key = (0, "push", 0)
    retransmit.add(key, push(0, 0, 0), now=0.0)
    retransmit.repeat_due(1.0)
    retransmit.make_bare(key)
    (entry,) = retransmit.for_server(0)
    assert (entry.bare, entry.attempts) == (True, 1)
    retransmit.make_bare((0, "push", 9))  # answered already: nothing to do
    assert retransmit.for_server(1) == []


def test_after_a_new_connection_the_join_comes_first() -> None:
    retransmit = Retransmit(retry_s=1.0)
    retransmit.add((0, "push", 0), push(0, 0, 0), now=0.0)
    retransmit.add((0, "clock", 0), tick(0, 1), now=0.0)
    retransmit.add((0, "join", 0), Join(sender(0)), now=0.0)
    assert [type(entry.message) for entry in retransmit.for_server(0)] == [Join, type(push(0, 0, 0)), Clock]


# -- membership ------------------------------------------------------------------------------------------------------


def test_an_expected_worker_has_a_deadline_and_may_not_act() -> None:
    lives = WorkerLives(generation=1)
    lives.expect(0, until=9.0)
    assert lives.next_deadline() == 9.0
    assert "has not joined" in lives.objection(sender(0))
    assert lives.overdue(8.9) == []
    assert [worker for worker, _ in lives.overdue(9.0)] == [0]


def test_m2_an_ended_incarnation_never_comes_back() -> None:
    lives = WorkerLives(generation=1)
    lives.start_life(sender(0, 1), clock=3)
    assert lives.objection(sender(0, 1)) == ""
    assert "worker 0 has ended since it joined (incarnation 0 is over)" in lives.objection(sender(0, 0))
    assert "has not joined" in lives.objection(sender(0, 2))
    lives.end_life(0, left=False)
    assert lives.has_ended(sender(0, 1))
    assert lives.has_ended(sender(0, 0))
    assert not lives.has_ended(sender(0, 2))
    assert not lives.has_left(sender(0, 1))


def test_k5_another_generation_may_not_act() -> None:
    lives = WorkerLives(generation=2)
    lives.start_life(sender(0, 0, generation=2), clock=0)
    assert "belongs to generation 1 of the job, this is generation 2" in lives.objection(sender(0, 0, generation=1))


def test_a_worker_that_left_by_itself_is_told_apart() -> None:
    lives = WorkerLives(generation=1)
    lives.start_life(sender(0), clock=0)
    lives.end_life(0, left=True)
    assert lives.has_left(sender(0))
    assert not lives.has_left(sender(0, 0, generation=2))


def test_a_life_that_never_began_can_be_over_and_stays_so() -> None:
    lives = WorkerLives(generation=1)
    lives.start_life(sender(0, 0), clock=0)
    lives.mark_dead(0, 1)
    lives.mark_dead(0, 0)
    lives.end_life(0, left=False)
    assert lives.has_ended(sender(0, 1))
    assert not lives.has_ended(sender(0, 2))


def test_t2_readers_compare_with_the_need_of_the_reader_not_with_its_clock() -> None:
    assert DenseReadQueue(subscribing=False).add_pull(Pull(sender(0), 1, "w", clock=9, needs=2), clock=2)
