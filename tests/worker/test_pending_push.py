"""A push in flight ends once: a refusal is told, and a future is there for callers that ask for one."""

from __future__ import annotations

from threading import Condition

import pytest

from paceline.errors import PeerError
from paceline.worker.pushes import PendingPush, PushOutcome

APPLIED, REFUSED = PushOutcome(applied=True), PushOutcome(applied=False, reason="it is not finite")


def test_a_refusal_is_told_whether_it_comes_before_or_after_the_question() -> None:
    pushed, told = PendingPush(Condition()), list[PushOutcome]()
    pushed.when_refused(told.append)
    assert told == []
    pushed.end(REFUSED)
    pushed.when_refused(told.append)
    assert told == [REFUSED, REFUSED]


def test_nothing_is_told_of_a_push_that_is_applied_or_whose_worker_fails() -> None:
    told = list[PushOutcome]()
    for outcome, error in ((APPLIED, None), (None, PeerError("server 0 is lost"))):
        pushed = PendingPush(Condition())
        pushed.when_refused(told.append)
        pushed.end(outcome, error)
        pushed.when_refused(told.append)
    assert told == []


@pytest.mark.parametrize("outcome", [APPLIED, REFUSED])
def test_its_future_is_the_same_before_and_after_the_end(outcome: PushOutcome) -> None:
    pushed, late = PendingPush(Condition()), PendingPush(Condition(), outcome)
    before = pushed.future
    assert not before.done()
    assert not before.cancel(), "the push may be on its way"
    pushed.end(outcome)
    assert before is pushed.future
    assert before.result(timeout=0) is late.future.result(timeout=0) is outcome


def test_a_failure_is_raised_by_futures_that_were_made_before_and_after() -> None:
    pushed = PendingPush(Condition())
    before = pushed.future
    pushed.end(None, PeerError("server 0 is lost"))
    for future in (before, pushed.future):
        with pytest.raises(PeerError, match="server 0 is lost"):
            future.result(timeout=0)
