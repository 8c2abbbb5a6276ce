"""Rounds in shared memory: what a worker that gives up means for the rounds of the others."""

from __future__ import annotations

import threading

import pytest
from tests.jobs import join_all

from paceline.collective.peers import Peers
from paceline.collective.rounds import SEGMENT_BYTES, Call, Fill, Round, SharedRounds, Take, no_piece, nothing
from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport.deadline import Deadline
from paceline.transport.memory import MemoryTransport

CALL = Call("barrier")
WAIT_S = 30.0


def step(fill: Fill = nothing, take: Take = nothing) -> Round:
    return Round(fill, take, no_piece)


def rounds_of_two() -> tuple[SharedRounds, SharedRounds]:
    transport = MemoryTransport()
    listener = transport.listen("rounds")
    first = transport.connect(listener.address, b"", timeout_s=WAIT_S)
    second = listener.accept(timeout_s=WAIT_S)
    listener.close()
    segments = {rank: memoryview(bytearray(SEGMENT_BYTES)) for rank in range(2)}
    return SharedRounds(Peers(0, {1: first}), segments), SharedRounds(Peers(1, {0: second}), segments)


def test_a_round_that_all_have_filled_stays_good_though_a_worker_gives_up_in_the_next_one() -> None:
    slow, quick = rounds_of_two()
    found: list[float] = []

    def run_slowly() -> None:
        slow.run(CALL, Deadline.after(WAIT_S), [step(take=lambda slots: found.append(slots[1][0].item()))])

    thread = threading.Thread(target=run_slowly, daemon=True)
    with slow.peers.news:  # the slow worker has filled its slot, and looks at those of others after this
        thread.start()
        quick.run(CALL, Deadline.after(WAIT_S), [step(fill=lambda slot: slot[0].fill_(7))])
        with pytest.raises(DeadlineExceeded, match="worker 0 did not come in time"):
            quick.run(CALL, Deadline.after(0), [step()])
    join_all([thread])
    assert found == [7]
    with pytest.raises(PeerError, match="worker 1"):  # that round is the one in which it gave up
        slow.run(CALL, Deadline.after(0), [step()])
    for rounds in (slow, quick):
        rounds.peers.end("the test is over")
        rounds.close()
