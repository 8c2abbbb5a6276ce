"""Collective calls between machines: the bits of sums, who is named, who may take part, and what is refused."""

from __future__ import annotations

import struct
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.collective.groups import TIMEOUT, far_access, run_group
from tests.jobs import run_job, start_and_join
from tests.leaks import nothing_left_behind
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions
from torch.distributed import HashStore

import paceline
from paceline.api import join
from paceline.api.session import Session
from paceline.collective import group as group_module
from paceline.collective import meeting, peers
from paceline.collective.meeting import FarAccess, MemberAddresses, Offer
from paceline.collective.peers import MOST_TAG, ROUND_TAG, SEGMENT_TAG, Peers
from paceline.collective.process_group import OwnGroup
from paceline.collective.rounds import SENT_SLOT_BYTES, Arrivals, Call, Round, SentRounds, nothing
from paceline.collective.torch_backend import connect
from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError, UsageError
from paceline.transport.base import EMPTY, Connection
from paceline.transport.deadline import Deadline
from paceline.transport.memory import MemoryConnection, MemoryTransport
from paceline.wire.messages import encode

WAIT_S = 30.0
BARRIER = Call("barrier")


def reduce_all(group: OwnGroup, tensor: Tensor) -> Tensor:
    group.allreduce([tensor], AllreduceOptions()).wait()
    return tensor


def folded(tensors: list[Tensor], machines: str) -> Tensor:
    """The sum by machines, each in the order of ranks, then in the order of the first ranks of machines."""
    by_machine = [
        reduce(torch.add, (one for one, name in zip(tensors, machines, strict=True) if name == here))
        for here in dict.fromkeys(machines)
    ]
    return reduce(torch.add, by_machine)


@given(
    machines=st.sampled_from(("abc", "abab", "abba", "aab", "abbb", "abcb")),
    numel=st.sampled_from((1, 1000, 16 * 1024, 16 * 1024 + 1, SENT_SLOT_BYTES // 4 + 7)),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=8)
def test_sums_have_the_bits_of_machines_added_in_order(machines: str, numel: int, seed: int) -> None:
    drawn = [torch.randn(numel, generator=torch.Generator().manual_seed(seed + rank)) for rank in range(len(machines))]

    def work(group: OwnGroup, rank: int) -> bytes:
        return reduce_all(group, drawn[rank].clone()).numpy().tobytes()

    expected = folded(drawn, machines).numpy().tobytes()
    assert run_group("machines", len(machines), work, machines=machines) == [expected] * len(machines)


@pytest.mark.parametrize("numel", [100, 100_000])
def test_one_worker_on_each_machine_gets_the_bits_of_shared_memory(numel: int) -> None:
    drawn = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def work(group: OwnGroup, rank: int) -> bytes:
        return reduce_all(group, drawn[rank].clone()).numpy().tobytes()

    found = {bits for backend in ("paceline", "memory") for bits in run_group(backend, 3, work)}
    assert found == {folded(drawn, "abc").numpy().tobytes()}


def between_machines(group: OwnGroup) -> SentRounds | None:
    """The rounds that a worker makes with other machines, where it does."""
    between = group._exchange._between  # type: ignore[union-attr]
    return between._rounds if between is not None else None


@pytest.mark.parametrize(("machines", "leaver"), [("abab", 3), ("abab", 1), ("aab", 1)])
def test_a_worker_that_goes_in_the_middle_of_a_call_is_named_by_all(machines: str, leaver: int) -> None:
    num_workers, leaves = len(machines), threading.Event()

    def work(group: OwnGroup, rank: int) -> None:
        between = between_machines(group)
        if between is not None:
            end = between._end

            def end_and_wait(*told: Any) -> None:
                end(*told)
                leaves.set()
                assert gone.wait(WAIT_S)

            between._end = end_and_wait  # type: ignore[method-assign]
        if rank == leaver:
            group.allreduce([torch.ones(SENT_SLOT_BYTES)], AllreduceOptions())
            assert leaves.wait(WAIT_S)
            group.peers.end("the test ends it")
            gone.set()
            return
        # Workers whose machine had all that they need from it may end this call, as the sum is whole.
        total = reduce_all(group, torch.ones(SENT_SLOT_BYTES))
        assert total.eq(num_workers).all()
        reduce_all(group, torch.ones(1))

    gone = threading.Event()
    told = run_group("machines", num_workers, work, machines=machines)
    for rank in set(range(num_workers)) - {leaver}:
        assert isinstance(told[rank], PeerError)
        assert f"worker {leaver} is gone" in str(told[rank])


def test_a_worker_that_is_late_is_named_by_those_that_wait_for_one_that_waits_for_it() -> None:
    over, num_told = threading.Event(), threading.Semaphore(0)

    def work(group: OwnGroup, rank: int) -> None:
        if rank == 3:
            assert over.wait(WAIT_S)
            return
        if rank == 1:  # which finds out first, however slow the others are
            group.set_timeout(timedelta(seconds=0.5))
        try:
            reduce_all(group, torch.ones(4))
        finally:
            num_told.release()
            if rank == 0:
                for _ in range(3):
                    assert num_told.acquire(timeout=WAIT_S)
                over.set()

    told = run_group("machines", 4, work, machines="abab")
    assert isinstance(told[1], DeadlineExceeded)
    assert all("worker 3 did not come in time" in str(told[rank]) for rank in range(3)), told


def test_calls_that_differ_on_one_machine_are_told_on_the_others_and_the_next_one_works() -> None:
    def work(group: OwnGroup, rank: int) -> str:
        call: Callable[[], object] = lambda: reduce_all(group, torch.ones(4))  # noqa: E731
        if rank == 2:
            call = lambda: group.barrier(BarrierOptions()).wait()  # noqa: E731
        with pytest.raises(UsageError) as told:
            call()
        assert reduce_all(group, torch.ones(4)).tolist() == [4.0] * 4
        return str(told.value)

    said = run_group("machines", 4, work, machines="abab")
    assert said[1] == said[3] == said[0]
    assert said[0].startswith("worker 0: expected all_reduce of 4 x float32 (0) of every worker, got barrier from work")
    assert "got all_reduce of 4 x float32 (0) from worker 0" in said[2]


@pytest.mark.parametrize(("machines", "share"), [("abab", 1.0), ("abcabc", 4 / 3), ("abc", 4 / 3)])
def test_a_tensor_crosses_the_line_of_a_machine_as_in_a_ring(
    machines: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, numel = Peers.send, 3 * 64 * 1024
    sent: Counter[str] = Counter()

    def count(own: Peers, to: int, tag: int, about: bytes = b"", body: memoryview = EMPTY, *told: float) -> None:
        if machines[own.rank] != machines[to]:
            sent[machines[own.rank]] += body.nbytes
        send(own, to, tag, about, body, *told)

    monkeypatch.setattr(Peers, "send", count)
    run_group(
        "machines", len(machines), lambda group, _: reduce_all(group, torch.ones(numel)).sum().item(), machines=machines
    )
    assert sent == dict.fromkeys(machines, share * 4 * numel)


# -- what comes over the wire ----------------------------------------------------------------------------------------


def worker_and_wire() -> tuple[SentRounds, Peers, Connection]:
    """Worker 0 of two, and the other end of its connection to worker 1."""
    transport = MemoryTransport()
    listener = transport.listen("rounds")
    wire = transport.connect(listener.address, b"", timeout_s=WAIT_S)
    arrivals = Arrivals([0, 1])
    own = Peers(0, {1: listener.accept(timeout_s=WAIT_S)}, {1}, arrivals)
    listener.close()
    return SentRounds(own, arrivals), own, wire


def header(tag: int, about: bytes = b"") -> bytes:
    return struct.pack("<q", tag) + about


def piece_of(number: int, start: int, call: Call = BARRIER) -> bytes:
    return header(ROUND_TAG, struct.pack("<2q32s", number, start, call.encoded()))


@pytest.mark.parametrize(
    ("told", "size_bytes", "words"),
    [
        (piece_of(2, 0), 8, "it sent a piece of round 2, expected round 1"),
        (piece_of(0, 0), 8, "it sent a piece of round 0, expected round 1"),
        (piece_of(-(1 << 62), 0), 0, "expected round 1"),
        (piece_of(1, SENT_SLOT_BYTES - 7), 8, "8 bytes for a slot of"),
        (piece_of(1, -8), 8, "8 bytes for a slot of"),
        (piece_of(1, 0), SENT_SLOT_BYTES + 1, "bytes for a slot of"),
        (piece_of(1, 0) + b"x", 8, "of another version"),
        (header(ROUND_TAG), 0, "of another version"),
        (header(SEGMENT_TAG), 8, "means nothing here"),
        (header(-9), 8, "means nothing here"),
        (header(MOST_TAG + 1), 8, "means nothing here"),
        (header(3, b"about"), 8, "means nothing here"),
        (b"short", 0, "means nothing here"),
        (b"", 8, "means nothing here"),
        (header(peers._GAVE_UP_TAG, b"\x00" + bytes(5000)), 0, "means nothing here"),
        (header(peers._GAVE_UP_TAG, b"\x00nonsense"), 0, "malformed _GaveUp"),
        (header(peers._GAVE_UP_TAG), 0, "unknown kind"),
    ],
    ids=map(str, range(17)),
)
def test_a_frame_that_no_worker_sends_ends_the_call_and_names_its_sender(
    told: bytes, size_bytes: int, words: str
) -> None:
    rounds, own, wire = worker_and_wire()
    wire.send(told, memoryview(bytes(size_bytes)), timeout_s=WAIT_S)
    with pytest.raises(PeerError, match="worker 1 is gone: ") as error:
        rounds.run(BARRIER, Deadline.after(WAIT_S), [Round(nothing, nothing, lambda source, to: (0, 8))])
    assert words in str(error.value)
    own.end("the test is over")
    wire.close()


def test_a_worker_that_has_much_to_take_before_is_told_why_the_group_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    _, own, wire = worker_and_wire()
    line = own._connections[1]
    while line.has_room(EMPTY):
        own.send(1, 7)
    told, tried, try_send = [b""], threading.Event(), MemoryConnection.try_send

    def note(connection: MemoryConnection, *frames: Any, timeout_s: float) -> bool:
        is_sent = try_send(connection, *frames, timeout_s=timeout_s)
        tried.set()
        return is_sent

    monkeypatch.setattr(MemoryConnection, "try_send", note)
    ending = threading.Thread(target=own.end, args=("a call has failed", PeerError("worker 3 is gone")))
    ending.start()
    assert tried.wait(WAIT_S)
    with suppress(PeerError):  # at the end of the connection
        while b"worker 3" not in told[-1]:
            told.append(wire.receive(timeout_s=WAIT_S).header)
    ending.join(WAIT_S)
    assert not ending.is_alive()
    assert b"worker 3 is gone" in told[-1]
    wire.close()


def test_a_piece_that_is_not_the_one_expected_is_no_part_of_a_sum() -> None:
    rounds, own, wire = worker_and_wire()
    wire.send(piece_of(1, 8), memoryview(bytes(8)), timeout_s=WAIT_S)
    with pytest.raises(PeerError, match="worker 1 sent bytes 8 to 16 of its slot, expected 0 to 8"):
        rounds.run(BARRIER, Deadline.after(WAIT_S), [Round(nothing, nothing, lambda source, to: (0, 8))])
    own.end("the test is over")
    wire.close()


def test_a_worker_may_be_some_rounds_ahead_and_no_more() -> None:
    rounds, own, wire = worker_and_wire()
    found: list[int] = []

    def take(slots: Sequence[Tensor]) -> None:
        found.append(int(slots[1][0]))

    for number in range(1, 5):
        wire.send(piece_of(number, 0), memoryview(bytes([number] * 8)), timeout_s=WAIT_S)
    steps = [Round(nothing, take, lambda source, to: (0, 8))] * 4
    rounds.run(BARRIER, Deadline.after(WAIT_S), steps)
    assert found == [1, 2, 3, 4]
    for number in range(5, 10):
        wire.send(piece_of(number, 0), memoryview(bytes(8)), timeout_s=WAIT_S)
    with pytest.raises(PeerError, match="it sent a piece of round 9, expected round 9, after 4"):
        own.wait(lambda: [1], "all_reduce", Deadline.after(WAIT_S))
    own.end("the test is over")
    wire.close()


def test_a_worker_whose_messages_are_not_taken_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MOST_WAITING_BYTES", 1000)
    _, own, wire = worker_and_wire()
    for _ in range(3):
        wire.send(header(5), memoryview(bytes(900)), timeout_s=WAIT_S)
    assert own.take([1], 5, "receive", Deadline.after(WAIT_S))[1][1].nbytes == 900
    assert own.take([1], 5, "receive", Deadline.after(WAIT_S))[1][1].nbytes == 900
    assert own.take([1], 5, "receive", Deadline.after(WAIT_S))[1][1].nbytes == 900
    assert own._num_waiting_bytes[1] == 0
    own.end("the test is over")
    wire.close()


def test_messages_that_each_have_a_tag_of_their_own_leave_nothing_when_they_are_taken() -> None:
    _, own, wire = worker_and_wire()
    for tag in range(1000):
        wire.send(header(tag), timeout_s=WAIT_S)
        own.take([1], tag, "receive", Deadline.after(WAIT_S))
    assert not own._messages
    assert own._num_waiting_bytes[1] == 0
    own.end("the test is over")
    wire.close()


def test_what_waits_counts_with_all_the_memory_that_it_takes() -> None:
    """Tags of their own and no bodies: so a worker that sends these has this one keep no more than a gigabyte."""
    _, own, wire = worker_and_wire()
    tracemalloc.start()
    try:
        for tag in range(2000):
            wire.send(header(tag), timeout_s=WAIT_S)
        with own.news:
            assert own.news.wait_for(lambda: own.has_message(1, 1999), WAIT_S)
            assert tracemalloc.get_traced_memory()[0] <= own._num_waiting_bytes[1]
    finally:
        tracemalloc.stop()
    own.end("the test is over")
    wire.close()


# -- who may take part -----------------------------------------------------------------------------------------------


def called_by(offer: Offer, caller: FarAccess, identity: bytes) -> Connection:
    """The connection that a process has made to a worker that listens for others of its group."""
    wire = caller.transport.connect(offer.told.far, identity, timeout_s=WAIT_S)
    try:
        return offer._listeners[-1].accept(timeout_s=WAIT_S)
    finally:
        wire.close()


def test_a_worker_with_the_certificate_of_another_one_is_refused_at_both_ends() -> None:
    awaiting, impostor = Offer.make(None, far_access("tls", 0)), far_access("tls", 1, 2)
    connection = called_by(awaiting, impostor, awaiting.told.key.encode() + encode(impostor.hello))
    with pytest.raises(PeerError, match="it calls itself worker 1, but its certificate is for worker-2"):
        awaiting._identify(connection, {1: impostor.hello})
    listening, caller = Offer.make(None, far_access("tls", 0, 3)), Offer.make(None, far_access("tls", 1))
    with pytest.raises(AuthenticationFailed, match="should be worker 0, but its certificate is for worker-3"):
        caller.accept(1, [listening.told, caller.told], WAIT_S)
    connection.close()
    awaiting.close()
    listening.close()


@pytest.mark.parametrize("mistake", ["key", "life", "role", "nothing told"])
def test_a_process_that_is_not_the_worker_awaited_is_not_taken_for_it(mistake: str) -> None:
    offers = [Offer.make(None, far_access("tcp", rank)) for rank in range(2)]
    told, hello = [offer.told for offer in offers], offers[1].told.hello
    key = b"x" * 32 if mistake == "key" else told[0].key.encode()
    said = {"life": encode(replace(hello, incarnation=1)), "role": encode(replace(hello, role="server"))}
    identity = b"" if mistake == "nothing told" else key + said.get(mistake, encode(hello))
    stranger = far_access("tcp", 1).transport.connect(told[0].far, identity, timeout_s=WAIT_S)
    groups: dict[int, Peers] = {}

    def accept(rank: int) -> None:
        groups[rank], exchange = offers[rank].accept(rank, told, WAIT_S)
        exchange.barrier(BARRIER, Deadline.after(WAIT_S))

    start_and_join([threading.Thread(target=accept, args=(rank,)) for rank in range(2)])
    for rank in range(2):
        groups[rank].end("the test is over")
    stranger.close()


def test_what_a_worker_tells_in_the_store_is_checked() -> None:
    for text in ("", "no", '{"machine": 3}', '{"hello": {"role": "worker"}}'):
        with pytest.raises(PeerError, match="has told the others of its group"):
            MemberAddresses.read(text)


# -- jobs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every thread be on a machine of its own, and Gloo carry nothing."""
    monkeypatch.setattr(meeting, "_this_machine", lambda: f"machine {threading.get_ident()}")
    monkeypatch.setattr(group_module, "connect_gloo", pytest.fail)


@pytest.mark.usefixtures("apart")
def test_calls_of_a_job_between_machines_go_over_its_carrier(tmp_path: Path) -> None:
    def work(worker: Session) -> list[Any]:
        mine = torch.full((3,), float(worker.rank + 1))
        calls: list[Any] = [
            paceline.all_reduce(mine).tolist(),
            paceline.broadcast(mine, root=1).tolist(),
            torch.stack(paceline.all_gather(mine)).tolist(),
            paceline.all_reduce(mine.to_sparse()).to_dense().tolist(),
        ]
        if worker.rank == 0:
            paceline.send(torch.arange(4), to=1)
        elif worker.rank == 1:
            calls.append(paceline.receive(source=0).tolist())
        model = nn.Linear(2, 1, bias=False)
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = paceline.distributed(plain, strategy="all-reduce", model=model)
        with torch.no_grad():
            model.weight.zero_()
        model(torch.full((1, 2), float(worker.rank))).sum().backward()
        optimizer.step()
        calls.append(model.weight.tolist())
        return calls

    found = run_job(tmp_path, work, workers=3, carrier="tls")
    common = [[6.0] * 3, [2.0] * 3, [[1.0] * 3, [2.0] * 3, [3.0] * 3], [6.0] * 3]
    assert found[0] == [*common, [[-0.5, -0.5]]]
    assert found[1] == [*common, [0, 1, 2, 3], [[-0.5, -0.5]]]


@pytest.mark.usefixtures("apart")
def test_a_worker_that_fails_between_machines_is_named(tmp_path: Path) -> None:
    told: dict[int, str] = {}

    def work(worker: Session) -> None:
        paceline.all_reduce(torch.ones(1))
        if worker.rank == 1:
            raise ArithmeticError
        with pytest.raises(PeerError) as error:
            paceline.all_reduce(torch.ones(1))
        told[worker.rank] = str(error.value)

    with pytest.raises(ArithmeticError):
        run_job(tmp_path, work, workers=3, carrier="tls")
    assert all("worker 1 has ended with an error" in words for words in told.values())
    assert len(told) == 2


def test_a_process_without_a_job_is_reached_from_its_own_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "open_session", lambda: None)
    assert paceline._find_far_access() is None


@pytest.mark.usefixtures("apart")
def test_the_backend_of_torch_joins_machines_where_workers_have_certificates() -> None:
    store, found = HashStore(), [0.0, 0.0]

    def live(rank: int) -> None:
        group = connect(store, rank, 2, TIMEOUT, lambda: far_access("tls", rank))
        found[rank] = reduce_all(group, torch.ones(2))[0].item()
        group.shutdown()

    with nothing_left_behind():
        start_and_join([threading.Thread(target=live, args=(rank,)) for rank in range(2)])
    assert found == [2.0, 2.0]
