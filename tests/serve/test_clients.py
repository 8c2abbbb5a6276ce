"""Clients of a server of its own: which workers they are there, what they share, and what is kept of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.serve.daemon import Daemon, daemon

import paceline
from paceline.api.session import Session
from paceline.core.messages import Left, WorkerRefused
from paceline.errors import PeerError, Refused, UsageError
from paceline.serve.access import ClientCredentials, ServeUrl
from paceline.serve.client import NamespaceTransport, addresses_of
from paceline.serve.messages import EnterFrame, NamespaceStanding, decode_answer
from paceline.serve.namespace import Namespace
from paceline.server.connections import Connections
from paceline.transport.base import Connection
from paceline.versions.places import find_places
from paceline.wire.messages import Hello, encode
from paceline.wire.versions import FindVersions, ReaderRefused, VersionsFound, decode
from paceline.wire.versions import encode as encode_request
from paceline.worker.table import Table


def open_weights(ps: Session, consistency: str = "bsp", lr: float = 0.5) -> Table:
    update = paceline.update.SGD(lr=lr, momentum=0.5)
    return ps.table("w", shape=(3,), update=update, consistency=consistency, scale="sum", init=1.0)


def train(ps: Session, num_clocks: int, consistency: str = "bsp") -> torch.Tensor:
    weights = open_weights(ps, consistency)
    for clock in range(num_clocks):
        weights.push(torch.full((3,), float(ps.rank + clock)))
        ps.clock()
    return weights.pull()


def together(*calls: Callable[[], None]) -> None:
    """Make calls at once, and raise what one of them raised."""
    failures: list[BaseException] = []

    def make(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if failures:
        raise failures[0]


def test_clients_that_are_counted_train_as_workers_of_a_job_do(served: Daemon) -> None:
    found: dict[int, torch.Tensor] = {}

    def work() -> None:
        with served.connect("job", workers=2) as ps:
            assert ps.size == 2
            found[ps.rank] = train(ps, 3)
            ps.barrier()

    together(work, work)
    served.wait_empty()
    together(work, work)  # each begins as in a new job, and waits for the other
    assert found.keys() == {0, 1}
    value, velocity = torch.ones(3), torch.zeros(3)
    for clock in (0, 1, 2, 0, 1, 2):
        velocity = 0.5 * velocity + (2 * clock + 1)
        value = value - 0.5 * velocity
    assert torch.equal(found[0], value)
    assert torch.equal(found[1], value)


def test_a_namespace_goes_on_where_its_last_client_left_it(served: Daemon) -> None:
    adagrad = paceline.update.Adagrad(lr=0.5)
    with served.connect("job") as ps:
        first = train(ps, 2)
        users = ps.table("users", rows=2, update=adagrad)
        users.push([7, -3], [[1.0, 2.0], [3.0, 4.0]])
        ps.clock()
        rows = users.pull([7, -3, 8])
        assert ps.node.clock == 3
    served.wait_empty()
    with served.connect("job") as ps:
        assert ps.node.clock == 3
        assert torch.equal(open_weights(ps).pull(), first)  # the init of worker 0 is not for a table that has values
        assert torch.equal(ps.table("users", rows=2, update=adagrad).pull([7, -3, 8]), rows)
    with served.connect("job") as ps, pytest.raises(Refused, match=r"(?s)other settings than this worker.*0\.25"):
        open_weights(ps, lr=0.25)


def test_an_optimizer_goes_on_as_if_it_had_never_been_away(tmp_path: Path) -> None:
    torch.manual_seed(1)
    inputs, model, alone = torch.randn(4, 2), torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    alone.load_state_dict(model.state_dict())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer | paceline.training.strategy.Distributed) -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    for _ in range(2):  # each time another server process, as it were
        with daemon(tmp_path / "state") as served, paceline.init(served.connect()):
            optimizer = paceline.distributed(torch.optim.Adam(model.parameters(), lr=0.1))
            for _ in range(2):
                step(model, optimizer)
        with torch.no_grad():
            kept = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.zero_()  # those of the server count
    single = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(4):
        step(alone, single)
    for ours, theirs in zip(kept, alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())


def test_ranks_are_the_first_free_ones_or_those_that_were_asked_for(served: Daemon) -> None:
    with served.connect() as zero, served.connect(rank=2) as two, served.connect() as one:
        assert [zero.rank, one.rank, two.rank] == [0, 1, 2]
        assert [zero.size, two.size, one.size] == [1, 3, 3]
        with pytest.raises(Refused, match="worker 2 of namespace 'default' is there already"):
            served.connect(rank=2)
        with pytest.raises(UsageError, match="speaks to a session already, as worker 0"):
            paceline.init(zero) and paceline.init(one)
        with pytest.raises(Refused, match=r"workers=3 .*others are with as many workers as come"):
            served.connect(workers=3)
        open_weights(zero, "asynchronous")
        two.close(politely=False)  # killed: it comes again as a new life of the same worker
        with served.connect(rank=2) as again:
            assert again.rank == 2
            again.node._connections[0]._post.connection.close()  # the line is cut, and made again
            assert open_weights(again, "asynchronous").push(torch.ones(3)).result(30.0).applied


def test_clients_that_are_counted_must_agree_on_how_many(served: Daemon) -> None:
    with served.connect("two", workers=2), served.connect("two", workers=2):
        with pytest.raises(Refused, match="workers=3 in namespace 'two', where others are with workers=2"):
            served.connect("two", workers=3)
        with pytest.raises(Refused, match="there is no worker 2 in namespace 'two', which has 2"):
            served.connect("two", workers=2, rank=2)
        with pytest.raises(Refused, match="all 2 workers of namespace 'two' are there already"):
            served.connect("two", workers=2)


def test_a_killed_client_holds_up_no_other_and_the_last_one_leaves_all_on_disk(tmp_path: Path) -> None:
    with daemon(tmp_path / "state", lease_s=0.2) as served:
        zero, one = served.connect(), served.connect()
        weights = open_weights(zero)
        open_weights(one).push(torch.ones(3))
        one.close(politely=False)
        weights.push(torch.ones(3))
        zero.clock()
        values = weights.pull()
        assert torch.equal(values, torch.full((3,), 0.5))  # what the other pushed was of a clock that it did not finish
        zero.close(politely=False)
        served.wait_empty()
        with served.connect() as ps:
            assert torch.equal(open_weights(ps).pull(), values)


def test_a_script_that_fails_leaves_at_once(served: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    zero, one = (served.connect("job", rank=rank, workers=2) for rank in range(2))
    open_weights(zero)
    held = open_weights(one).push(torch.ones(3))
    one.clock()
    sys.excepthook(ValueError, ValueError("it has failed"), None)  # what was pushed waits for the clock of the other
    assert "ValueError: it has failed" in capsys.readouterr().err
    assert one.closed
    assert zero.closed  # they are of one script
    assert isinstance(held.exception(0.0), PeerError)


def test_a_fault_in_one_namespace_ends_that_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the fault is ours
    with daemon(tmp_path / "state", num_unsaved=1) as served, served.connect("good") as good:
        with served.connect("bad") as bad:
            values = train(bad, 1)
        served.wait_empty("bad")
        bad = served.connect("bad")
        weights = open_weights(bad)
        node = served.namespaces._open["bad"]._node
        assert node is not None
        node.do(lambda held: held.core.tables["nowhere"] and None)
        with pytest.raises(PeerError, match="namespace 'bad' has ended since it joined: connect again"):
            weights.push(torch.ones(3)).result(30.0)
        bad.close(politely=False)
        served.told.wait("'bad' has failed, and goes on from its newest snapshot")
        train(good, 2)
        with served.connect("bad") as again:
            assert torch.equal(open_weights(again).pull(), values)


def test_namespaces_have_plain_names_and_are_limited(served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("..", "a/b", "-x", "n" * 65):
        with pytest.raises(UsageError, match="cannot be the name of a namespace"):
            served.connect(name)
    monkeypatch.setattr("paceline.serve.gateway.MAX_NAMESPACES", 2)
    too_many = "there are 2 namespaces already, and no more than 2 may be"
    with served.connect("A"), served.connect("b"), pytest.raises(Refused, match=too_many):
        served.connect("c")


def test_a_namespace_has_a_number_of_workers_that_can_be_expected(served: Daemon) -> None:
    with pytest.raises(Refused, match="a namespace has 4096 workers at most, and it asks for 4097"):
        served.connect(workers=4097)
    with served.connect(workers=4096) as ps:
        assert ps.size == 4096


def test_clients_are_no_group_that_calls_each_other(served: Daemon) -> None:
    with served.connect() as ps:
        future = ps.exchange.all_reduce(torch.ones(2), "sum", None)
        with pytest.raises(UsageError, match="clients of a server of its own know the server alone"):
            future.result(30.0)


def test_code_and_folders_that_the_server_was_not_told_of_are_left_alone(tmp_path: Path) -> None:
    with daemon(tmp_path / "state") as served, served.connect() as ps:
        weights = open_weights(ps)
        with pytest.raises(Refused, match="own_functions"):
            weights.call("tests.nodes.own_functions:increment")
        life = paceline.Lifecycle(memory_bytes=1 << 20, spill=str(tmp_path))
        with pytest.raises(Refused, match="does not let workers choose where it writes"):
            ps.table("users", rows=2, update=paceline.update.Add(), life=life)


def test_a_namespace_that_another_thread_puts_away_as_the_server_ends_is_put_away_once(served: Daemon) -> None:
    ending = Mock(spec=Namespace, unsaved="x was not saved", is_over=False)
    ending.name = "x"

    def close_beside_another_thread() -> None:
        ending.is_over = True
        served.namespaces.run_due_work()

    ending.close.side_effect = close_beside_another_thread
    served.namespaces._open["x"] = ending
    assert served.namespaces.close() == ["x was not saved"]
    served.namespaces._lost.clear()


def test_what_is_not_saved_in_time_at_the_end_is_told(served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.namespace.SAVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("paceline.serve.namespace._END_TIMEOUT_S", 0.1)
    busy = threading.Event()
    with served.connect("job") as ps:
        train(ps, 1)
        [namespace] = served.namespaces._open.values()
        assert namespace._node is not None
        namespace._node.do(lambda _: busy.wait(60.0) and None)
        namespace.close()
        ps.close(politely=False)
    assert served.told.lines == [namespace.unsaved]
    assert namespace.unsaved == (
        "namespace 'job' could not be saved, no snapshot of it is there: namespace 'job' was busy for 0.1 s"
    )
    busy.set()
    namespace.wait_end(60.0)


def test_what_the_disk_does_not_take_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()
    full.set()

    def fail(*_: object) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.snapshots.folder.sync", fail)
    with daemon(tmp_path / "state", snapshot_every_s=0.01) as served:
        with served.connect() as ps:
            values = train(ps, 1)
        served.told.wait("could not be saved, no snapshot of it is there: No space left on device; free some space")
        with served.connect() as ps:  # it could not be put away, so it is still there
            assert torch.equal(open_weights(ps).pull(), values)
        full.clear()
        served.wait_empty()
        full.set()
        with served.connect() as ps:
            assert torch.equal(open_weights(ps).pull(), values)
            values = train(ps, 1)
        served.told.wait("could not be saved, the snapshot before it counts: No space left on device; free some space")
        full.clear()
        served.wait_empty()
    with daemon(tmp_path / "state") as served, served.connect() as ps:
        assert torch.equal(open_weights(ps).pull(), values)


def test_a_namespace_goes_on_where_the_system_has_no_thread_to_save_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(tmp_path / "state", snapshot_every_s=3600.0) as served:
        with served.connect("job") as ps:
            values = train(ps, 1)
            [namespace] = served.namespaces._open.values()
            with monkeypatch.context() as patched:
                refusing(patched, "paceline-snapshot")
                namespace._due_s = 0.0
                namespace._ask(namespace._look, 60.0)
            [line] = served.told.lines
            assert "namespace 'job' could not be saved, no snapshot of it is there" in line
            assert torch.equal(open_weights(ps).pull(), values)
        served.wait_empty()
    with daemon(tmp_path / "state") as served, served.connect("job") as ps:
        assert torch.equal(open_weights(ps).pull(), values)


def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have the system refuse threads whose names begin like this."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_server_without_a_thread_for_a_client_goes_on(served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.answer_lines.tell", served.told)
    location, key = ServeUrl.parse(served.address("job")), served.state / "token"
    transport = NamespaceTransport(
        location, ClientCredentials(key).access(location, None).transport(), lambda: addresses_of(location)
    )
    with monkeypatch.context() as patched:
        refusing(patched, "paceline-gateway")
        asking = transport.open_connection(EnterFrame("job", seeks=True), 60.0)
        served.told.wait("a client waits for its answer: can't start new thread")
    with monkeypatch.context() as patched:
        refusing(patched, "paceline-namespace")
        with pytest.raises(Refused, match="namespace 'job' cannot be opened: can't start new thread"):
            served.connect("job")
    assert decode_answer(asking.receive(timeout_s=60.0).header) == NamespaceStanding(is_head=True)
    asking.close()
    with served.connect("job") as ps:
        train(ps, 1)


def reader_of(served: Daemon, name: str) -> Connection:
    """The connection of a reader of this namespace, which has asked for nothing yet."""
    [find] = find_places(served.address(name), ClientCredentials(served.state / "token")).finders
    servers = find()
    return servers.transport.connect(servers.address_of(0), encode(Hello("reader", 0, 0, 0)), timeout_s=60.0)


def test_readers_of_namespaces_that_never_were_make_room(served: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.gateway.MAX_NAMESPACES", 1)
    first = reader_of(served, "never")
    first.send(encode_request(FindVersions(1, "w", (), 0.0)), timeout_s=60.0)
    assert decode(first.receive(timeout_s=60.0).header) == VersionsFound(1, (), "")
    refused = reader_of(served, "job")
    assert decode(refused.receive(timeout_s=60.0).header) == ReaderRefused(-1, "readers wait for 1 namespaces already")
    refused.close()
    [thread] = served.namespaces._readers["never"]._serving.values()
    first.close()
    thread.join(60.0)
    second = reader_of(served, "job")
    second.send(encode_request(FindVersions(1, "w", (), 0.0)), timeout_s=60.0)
    assert decode(second.receive(timeout_s=60.0).header) == VersionsFound(1, (), "")
    assert [*served.namespaces._readers] == ["job"]
    second.close()


def test_a_namespace_without_clients_that_the_disk_does_not_take_is_not_tried_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    full.set()

    def fail(*_: object) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("paceline.snapshots.folder.sync", fail)
    with daemon(tmp_path / "state", snapshot_every_s=3600.0) as served:
        with served.connect("job") as ps:
            train(ps, 1)
        served.told.wait("No space left")
        [namespace] = served.namespaces._open.values()
        for _ in range(10):
            namespace._ask(namespace._look, 60.0)
        assert len(served.told.lines) == 1
        full.clear()
        assert namespace._due_s < time.monotonic() + 11.0  # not an hour
        namespace._due_s = 0.0
        served.wait_empty()


def test_a_client_has_left_though_the_answer_is_lost_and_its_namespace_has_ended(
    served: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, lost = Connections.send_worker, list[object]()

    def lose(self: Connections, worker: int, incarnation: int, message: object, *body: Any) -> None:
        connection = self.connection_of(worker, incarnation)
        if isinstance(message, Left | WorkerRefused) and connection is not None:
            lost.append(message)
            self.drop(connection)
        else:
            send(self, worker, incarnation, message, *body)

    with served.connect() as ps:
        train(ps, 1)
        monkeypatch.setattr(Connections, "send_worker", lose)
    assert Left() in lost
