"""Faults fire, are counted, repeat with their seed, and never last for ever."""

from collections.abc import Callable
from contextlib import closing
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.transport.carriers import CREDENTIALS, Pair, connect_pair

from paceline.errors import ConnectionLost, DeadlineExceeded, UsageError
from paceline.transport import FaultCounts, FaultPlan, FaultyTransport, MemoryTransport, TcpTransport


def faulty_pair(plan: FaultPlan, seed: int = 1) -> tuple[FaultyTransport, Pair]:
    transport = FaultyTransport(MemoryTransport(), plan, seed)
    return transport, connect_pair(transport, "memory://server-0")


def received(pair: Pair, num_frames: int) -> list[int]:
    return [int.from_bytes(pair.server.receive(timeout_s=30).header) for _ in range(num_frames)]


def send_numbers(pair: Pair, num_frames: int) -> None:
    for number in range(num_frames):
        pair.client.send(number.to_bytes(2), memoryview(bytes([number])), timeout_s=30)


def arrivals(plan: FaultPlan, seed: int, num_frames: int = 200) -> tuple[FaultCounts, list[int]]:
    """Return the counts and what arrived, up to a last frame that nothing befalls (it may overtake the one before)."""
    transport, pair = faulty_pair(replace(plan, only=lambda header: header != b"end"), seed)
    with closing(pair):
        send_numbers(pair, num_frames)
        pair.client.send(b"end", timeout_s=30)
        numbers: list[int] = []
        while (header := pair.server.receive(timeout_s=30).header) != b"end":
            numbers.append(int.from_bytes(header))
        return transport.counts, numbers


def test_without_faults_nothing_is_counted() -> None:
    counts, numbers = arrivals(FaultPlan(), seed=1)
    assert counts == FaultCounts()
    assert numbers == list(range(200))


def test_dropped_frames_are_counted_and_missing() -> None:
    counts, numbers = arrivals(FaultPlan(drop=0.3), seed=1)
    assert 30 < counts.dropped < 90
    assert len(numbers) == 200 - counts.dropped
    assert numbers == sorted(numbers)


def test_duplicated_frames_arrive_twice_in_a_row() -> None:
    counts, numbers = arrivals(FaultPlan(duplicate=0.3), seed=1)
    assert 30 < counts.duplicated < 90
    assert len(numbers) == 200 + counts.duplicated
    assert numbers == sorted(numbers)


def test_reordered_frames_are_overtaken_by_one() -> None:
    counts, numbers = arrivals(FaultPlan(reorder=0.3, delay_s=(5, 5)), seed=2)
    assert counts.reordered > 30
    overtaken = [number for number, following in pairwise(numbers) if following < number]
    assert abs(len(overtaken) - counts.reordered) <= 1
    assert sorted(numbers) == list(range(len(numbers)))


def test_reordered_frame_that_nothing_overtakes_is_released() -> None:
    transport, pair = faulty_pair(FaultPlan(reorder=1.0, delay_s=(0, 0.01)))
    with closing(pair):
        send_numbers(pair, 1)
        assert received(pair, 1) == [0]
        assert transport.counts.reordered == 1


def test_delayed_frames_arrive_later_and_in_order() -> None:
    transport, pair = faulty_pair(FaultPlan(delay=0.5, delay_s=(0.001, 0.004)))
    with closing(pair):
        send_numbers(pair, 50)
        assert received(pair, 50) == list(range(50))
        assert transport.counts.delayed > 10


def test_a_delayed_frame_is_not_there_before_its_time() -> None:
    transport, pair = faulty_pair(FaultPlan(delay=1.0, delay_s=(30, 30)))
    with closing(pair):
        send_numbers(pair, 1)
        with pytest.raises(DeadlineExceeded):
            pair.server.receive(timeout_s=0.05)
        assert transport.counts.delayed == 1


@pytest.mark.parametrize("plan", [FaultPlan(delay=1.0, delay_s=(0.02, 0.02)), FaultPlan(reorder=1.0)])
def test_held_back_bodies_are_copies(plan: FaultPlan) -> None:
    _, pair = faulty_pair(plan)
    with closing(pair):
        memory = pair.transport.allocate(4)
        memory[:] = b"then"
        pair.client.send(b"push", memory, timeout_s=30)
        memory[:] = b"now!"
        assert bytes(pair.server.receive(timeout_s=30).body) == b"then"


def test_cut_ends_the_connection_for_both() -> None:
    transport, pair = faulty_pair(FaultPlan(cut=1.0))
    with closing(pair):
        with pytest.raises(ConnectionLost, match="cut by the fault plan"):
            pair.client.send(b"push", timeout_s=30)
        with pytest.raises(ConnectionLost):
            pair.client.send(b"push", timeout_s=30)
        with pytest.raises(ConnectionLost):
            pair.server.receive(timeout_s=30)
        assert transport.counts == FaultCounts(cut=1)


def test_only_chosen_frames_are_harmed() -> None:
    transport, pair = faulty_pair(FaultPlan(drop=1.0, only=lambda header: header.startswith(b"push")))
    with closing(pair):
        pair.client.send(b"push", timeout_s=30)
        pair.client.send(b"pull", timeout_s=30)
        assert pair.server.receive(timeout_s=30).header == b"pull"
        assert transport.counts.dropped == 1


def test_accepted_connections_fail_too() -> None:
    transport, pair = faulty_pair(FaultPlan(drop=1.0))
    with closing(pair):
        pair.server.send(b"reply", timeout_s=30)
        assert transport.counts.dropped == 1


def test_same_seed_same_faults_other_seed_others() -> None:
    plan = FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, delay_s=(5, 5))
    first, again, other = (arrivals(plan, seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_connections_of_one_identity_differ() -> None:
    transport = FaultyTransport(MemoryTransport(), FaultPlan(drop=0.5), seed=5)
    patterns: list[list[int]] = []
    for _ in range(2):
        with closing(connect_pair(transport, "memory://server-0")) as pair:
            dropped = [0]
            for number in range(40):
                pair.client.send(number.to_bytes(2), timeout_s=30)
                dropped.append(transport.counts.dropped)
            patterns.append([after - before for before, after in pairwise(dropped)])
    assert patterns[0][1:] != patterns[1][1:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FaultPlan(drop=1.5),
        lambda: FaultPlan(cut=-0.1),
        lambda: FaultPlan(delay_s=(0.2, 0.1)),
        lambda: FaultPlan(delay_s=(-1, 0.1)),
    ],
)
def test_impossible_plans_are_refused(make: Callable[[], FaultPlan]) -> None:
    with pytest.raises(UsageError, match="expected"):
        make()


def test_faults_over_tcp_lose_nothing_but_what_was_dropped() -> None:
    plan = FaultPlan(duplicate=0.1, delay=0.1, reorder=0.1, delay_s=(0.0, 0.002))
    transport = FaultyTransport(TcpTransport(CREDENTIALS), plan, seed=6)
    with closing(connect_pair(transport, "127.0.0.1:0")) as pair:
        send_numbers(pair, 200)
        numbers = received(pair, 200 + transport.counts.duplicated)
        assert set(numbers) == set(range(200))
        assert min(transport.counts.duplicated, transport.counts.delayed, transport.counts.reordered) > 5
