"""Two servers of their own that stand in for each other: one is lost, and no acknowledged push with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.data.service.feeders import until
from tests.leaks import nothing_left_behind
from tests.nodes.slow_line import SlowLine, slow_lines
from tests.nodes.test_successors import Fate, KillableServer, Killed
from tests.serve.daemon import Daemon, daemon
from tests.serve.test_clients import together
from tests.serve.test_command import DEADLINE_S, add_one, address_in, open_sum, serving, wait_saved

import paceline
from paceline.api.session import Session
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings
from paceline.errors import ConnectionLost, Refused, UsageError
from paceline.job.credentials.holders import Holder
from paceline.job.credentials.key_store import issue_keys, make_keys
from paceline.job.views import View
from paceline.serve import gateway, replicas
from paceline.serve import namespace as namespaces
from paceline.serve.access import JOB, server_access
from paceline.serve.admission import RESERVED_S, Admission, OpenNamespace
from paceline.serve.command import serve
from paceline.serve.gateway import Namespaces
from paceline.serve.lag import agree_on_lag
from paceline.serve.messages import EnterAccepted, EnterFrame, EnterRequest, NamespaceStanding
from paceline.serve.namespace import Namespace, NamespaceConfig, NamespaceConnection
from paceline.serve.replicas import (
    Companion,
    Companions,
    NamespaceReplicas,
    NamespaceViews,
    PeerTransport,
    ServedElsewhere,
)
from paceline.serve.state import StateFolder
from paceline.server import replica_link
from paceline.transport import MemoryTransport
from paceline.transport.base import Connection, Credentials
from paceline.transport.tcp import TcpTransport
from paceline.version import __version__
from paceline.wire.messages import Hello, encode


@dataclass
class Both:
    """Two servers."""

    servers: list[Daemon]
    keys: Path | None = None

    def connect(self, name: str = "job", **settings: Any) -> Session:
        """Connect with the addresses of both."""
        ports = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        access = {"keys": self.keys} if self.keys else {"token": self.servers[0].state / "token"}
        return paceline.connect(f"paceline://{ports}/{name}", **access, **settings)


@contextmanager
def pair(folder: Path, keys: Path | None = None, lag: int = 0) -> Iterator[Both]:
    """Two servers that see a folder of views; with keys, the second one has those of a server alone."""
    if keys is not None:
        make_keys(keys)
        issue_keys(keys, Holder("server", 0), folder / "carried")
    with nothing_left_behind(), ExitStack() as undo:
        servers = [one(folder, 0, keys, lag), one(folder, 1, keys and folder / "carried", lag)]
        yield Both([undo.enter_context(server) for server in servers], keys)


@contextmanager
def one(folder: Path, number: int, keys: Path | None = None, lag: int = 0, **settings: Any) -> Iterator[Daemon]:
    """One of two servers; the second has the token of the first."""
    state = folder / f"state-{number}"
    if number and keys is None and not state.exists():
        state.mkdir(mode=0o700)
        shutil.copy(folder / "state-0" / "token", state / "token")
    with daemon(state, keys, views=folder / "views", lag=lag, **settings) as served:
        yield served


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Fate:
    """What ends the server of a namespace that has a replica, in the middle of what it does."""
    found = Fate(0)

    class WatchedServer(KillableServer):
        @property
        def fate(self) -> Fate:  # type: ignore[override]
            return found if self.follows is None and self.replica.is_connected else Fate(0)

    live: Callable[[Namespace], None] = Namespace._live

    def watched(self: Namespace) -> None:
        try:
            live(self)
        except Killed:
            self.unsaved = ""  # it is another server's by now

    forget: Callable[[Namespaces, Namespace], None] = Namespaces._forget

    def forget_ended(self: Namespaces, namespace: Namespace) -> None:
        namespace.wait_end(DEADLINE_S)  # a snapshot may be on its way yet; then it is known that it was killed
        forget(self, namespace)

    monkeypatch.setattr(Namespaces, "_forget", forget_ended)
    monkeypatch.setattr(namespaces, "ServerNode", WatchedServer)
    monkeypatch.setattr(Namespace, "_live", watched)
    monkeypatch.setattr(replica_link, "_IDLE_LOOK_S", 0.05)
    monkeypatch.setattr(replicas, "_LOOK_S", 0.05)
    return found


NUM_CLOCKS = 150


@pytest.mark.parametrize(("consistency", "encrypted"), [("bsp", False), ("asynchronous", True)])
def test_servers_are_killed_one_after_the_other_and_each_push_counts_once(
    consistency: str, encrypted: bool, tmp_path: Path, fate: Fate
) -> None:
    train(consistency, 141, fate, tmp_path, tmp_path / "keys" if encrypted else None)
    assert fate.num_kills > 2


@pytest.mark.usefixtures(slow_lines.__name__)
@pytest.mark.parametrize(("consistency", "lag"), [("bsp", 1), ("asynchronous", 2)])
def test_clients_say_again_what_a_replica_lacks_that_comes_to_serve(
    consistency: str, lag: int, tmp_path: Path, fate: Fate
) -> None:
    train(consistency, 141, fate, tmp_path, lag=lag)
    assert fate.num_kills > 2
    assert SlowLine.num_lost > 0


@pytest.mark.campaign
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "essp:2", "asynchronous"])
@pytest.mark.parametrize("stride", range(20, 300, 7))
@pytest.mark.usefixtures(slow_lines.__name__)
def test_each_push_counts_once_wherever_servers_are_killed_whose_replicas_lag(
    consistency: str, stride: int, tmp_path: Path, fate: Fate
) -> None:
    train(consistency, stride, fate, tmp_path, lag=1 + stride % 3)
    assert fate.num_kills > 0


@pytest.mark.campaign
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "essp:2", "asynchronous"])
@pytest.mark.parametrize("stride", range(20, 300, 7))
def test_each_push_counts_once_wherever_servers_are_killed(
    consistency: str, stride: int, tmp_path: Path, fate: Fate
) -> None:
    train(consistency, stride, fate, tmp_path)
    assert fate.num_kills > 0


def train(consistency: str, stride: int, fate: Fate, folder: Path, keys: Path | None = None, lag: int = 0) -> None:
    """Have two workers push into slots of their own and into rows, while servers are killed, and check what counts."""
    seen: dict[int, torch.Tensor] = {}

    def work(both: Both) -> None:
        with both.connect(workers=2) as ps:
            slots = ps.table(
                "slots", shape=(2, NUM_CLOCKS), update=paceline.update.Add(), consistency=consistency, scale="sum"
            )
            users = ps.table("users", rows=2, update=paceline.update.Add(), consistency=consistency, scale="sum")
            for clock in range(NUM_CLOCKS):
                ones = torch.zeros(2, NUM_CLOCKS)
                ones[ps.rank, clock] = 1.0
                slots.push(ones)
                users.push([clock, -1], torch.ones(2, 2))
                ps.clock()
                values = slots.pull()
                assert ((values == 0.0) | (values == 1.0)).all(), values
                assert (values[ps.rank, : clock + 1] == 1.0).all(), values
            ps.barrier()
            seen[ps.rank] = torch.cat([slots.pull().flatten(), users.pull([0, -1]).flatten()])

    with pair(folder, keys, lag) as both:
        fate.stride = stride
        together(lambda: work(both), lambda: work(both))
        fate.stride = 0
    expected = torch.tensor([1.0] * 2 * NUM_CLOCKS + [2.0, 2.0] + [2.0 * NUM_CLOCKS] * 2)
    assert seen.keys() == {0, 1}
    assert all(torch.equal(values, expected) for values in seen.values()), seen


def test_a_server_that_is_told_to_end_hands_over_and_what_its_clients_left_is_saved_on_both(tmp_path: Path) -> None:
    with nothing_left_behind(), one(tmp_path, 0) as first:
        with one(tmp_path, 1) as second:
            both = Both([first, second])
            with ExitStack() as undo:
                ps = undo.enter_context(both.connect())
                table = open_sum(ps)
                assert add_one(ps, table) == 1.0
                first.told.wait("namespace 'job' has a replica")
                assert add_one(ps, table) == 2.0
            first.wait_empty("job")
            second.wait_empty("job")
            assert "job" in second.namespaces._state.names()
        assert not [line for line in second.told.lines if "only this server" in line]
        with one(tmp_path, 1) as second, second.connect("job") as ps:  # the other one is asked first this time
            table = open_sum(ps)
            assert add_one(ps, table) == 3.0
            with pytest.raises(Refused, match=r"worker 0 .* is there already"):
                first.connect("job", rank=0)  # is sent to the other one
            second.told.wait("namespace 'job' has a replica")
            assert add_one(ps, table) == 4.0
            second.gateway.stop()
            first.told.wait("namespace 'job' is served by its replica from now on")
            assert add_one(ps, table) == 5.0


def test_a_server_that_comes_to_serve_saves_at_once_as_its_memory_ends_with_its_process(tmp_path: Path) -> None:
    with nothing_left_behind(), ExitStack() as undo:
        first = undo.enter_context(one(tmp_path, 0, snapshot_every_s=1000.0))
        second = undo.enter_context(one(tmp_path, 1, snapshot_every_s=1000.0))
        ps = undo.enter_context(Both([first, second]).connect())
        table = open_sum(ps)
        assert add_one(ps, table) == 1.0
        first.told.wait("namespace 'job' has a replica")
        assert add_one(ps, table) == 2.0
        first.gateway.stop()
        second.told.wait("namespace 'job' goes on from its newest snapshot if this process is killed while no other")
        wait_saved(second.state, 2.0)


def test_what_one_server_alone_has_is_given_to_one_that_comes_though_no_client_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_FILL_S", 0.05)
    with nothing_left_behind(), one(tmp_path, 0) as first:
        with first.connect("job") as ps:
            assert add_one(ps, open_sum(ps)) == 1.0
        first.wait_empty("job")
        with one(tmp_path, 1) as second:
            first.told.wait("namespace 'job' has a replica")
            first.wait_empty("job")
            second.wait_empty("job")
        first.gateway.stop()
        with one(tmp_path, 1) as second, second.connect("job", token=second.state / "token") as ps:
            assert add_one(ps, open_sum(ps)) == 2.0


def test_no_client_waits_for_a_file_server_that_does_not_say_what_one_server_alone_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked, answers = threading.Event(), threading.Event()

    def is_alone(_: NamespaceReplicas) -> bool:
        is_asked.set()
        assert answers.wait(DEADLINE_S)
        return False

    with nothing_left_behind(), one(tmp_path, 0) as first:
        with first.connect("job") as ps:
            assert add_one(ps, open_sum(ps)) == 1.0
        first.wait_empty("job")
        monkeypatch.setattr(NamespaceReplicas, "is_alone", property(is_alone))
        filling = threading.Thread(target=first.namespaces.fill, args=((Companion(1, "tcp://127.0.0.1:7"),),))
        filling.start()
        try:
            assert is_asked.wait(DEADLINE_S)
            with first.connect("other") as ps:
                assert add_one(ps, open_sum(ps)) == 1.0
        finally:
            answers.set()
            filling.join(DEADLINE_S)


def test_what_only_one_server_has_is_not_served_by_the_other(tmp_path: Path) -> None:
    with nothing_left_behind():
        with one(tmp_path, 0) as first:
            with first.connect("job") as ps:
                assert add_one(ps, open_sum(ps)) == 1.0
            first.wait_empty()
        assert first.told.lines[-1].startswith("only this server has what is newest of job: others refuse")
        with one(tmp_path, 1) as second:
            expected = rf"namespace 'job' is with another server, .*: 127.0.0.1:{first.port}\. Start it"
            with pytest.raises(Refused, match=expected):
                second.connect("job", token=first.state / "token")
        with one(tmp_path, 0) as again, again.connect("job") as ps:
            assert add_one(ps, open_sum(ps)) == 2.0


@pytest.mark.parametrize(("lag", "is_noted"), [(0, True), (2, False)])
def test_a_replica_that_is_told_to_end_notes_that_it_has_saved_all_where_it_cannot_lag(
    lag: int, is_noted: bool, tmp_path: Path
) -> None:
    with nothing_left_behind(), one(tmp_path, 0, lag=lag) as first, first.connect("job") as ps:
        table = open_sum(ps)
        with one(tmp_path, 1, lag=lag) as second:
            first.told.wait("namespace 'job' has a replica")
            assert add_one(ps, table) == 1.0
        assert (second.namespaces._state.saved_view("job") > 0) == is_noted
        assert add_one(ps, table) == 2.0


@pytest.mark.usefixtures(slow_lines.__name__)
def test_a_server_that_is_told_to_end_tells_a_replica_that_lags_all_before_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowLine, "share", 0.0)
    with pair(tmp_path, lag=3) as both, both.connect() as ps:
        table = open_sum(ps)
        both.servers[0].told.wait("namespace 'job' has a replica")
        assert add_one(ps, table) == 1.0
        both.servers[0].gateway.stop()
        both.servers[1].told.wait("namespace 'job' is served by its replica from now on")
        assert SlowLine.num_lost == 0
        assert add_one(ps, table) == 2.0


@pytest.mark.parametrize("lag", [0, 2])
def test_a_server_that_is_told_to_end_as_it_comes_to_serve_saves_what_was_acknowledged(
    lag: int, tmp_path: Path, fate: Fate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending, begin = list[threading.Thread](), Namespace._begin_to_serve

    def begin_at_the_end(self: Namespace) -> None:
        ending.append(threading.Thread(target=self.close))
        ending[0].start()
        until(lambda: self._node is not None and self._node._acceptor.num_waiting() > 1)  # to save, and to stop
        begin(self)

    monkeypatch.setattr(Namespace, "_begin_to_serve", begin_at_the_end)
    with pair(tmp_path, lag=lag) as both:
        first, second = both.servers
        with both.connect() as ps:
            assert add_one(ps, open_sum(ps)) == 1.0
            first.told.wait("namespace 'job' has a replica")
            assert add_one(ps, open_sum(ps)) == 2.0
            fate.stride = 1
            ps.close(politely=False)
        second.told.wait("namespace 'job' is served by its replica from now on")
        second.wait_empty("job")
        fate.stride = 0
        with second.connect("job") as ps:
            assert add_one(ps, open_sum(ps)) == 3.0
        [closing] = ending
        closing.join(DEADLINE_S)


@pytest.mark.parametrize("lag", [0, 2])
def test_an_admission_is_in_the_replica_before_it_is_told(
    lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, admit = list[bool](), Namespace._admit

    def admit_and_look(self: Namespace, *asked: Any) -> EnterAccepted:
        accepted = admit(self, *asked)
        assert self._node is not None
        known.append(self._node.replica.has_received(may_lag=False))
        return accepted

    monkeypatch.setattr(Namespace, "_admit", admit_and_look)
    with pair(tmp_path, lag=lag) as both, both.connect() as ps:
        assert add_one(ps, open_sum(ps)) == 1.0
        both.servers[0].told.wait("namespace 'job' has a replica")
        with both.connect(rank=5):
            pass
    assert known == [True, True]


def test_a_replica_keeps_no_account_of_pushes_whose_workers_another_server_answers(tmp_path: Path) -> None:
    with pair(tmp_path, lag=2) as both, both.connect() as ps:
        table = open_sum(ps)
        both.servers[0].told.wait("namespace 'job' has a replica")
        for _ in range(8):
            add_one(ps, table)
        node = both.servers[1].namespaces._open["job"]._node
        assert node is not None
        assert node.replica.lag is not None
        assert node.replica.lag.take_received(None) == {}


def test_a_reader_of_rows_is_told_at_once_that_a_replica_serves_none_until_it_does(tmp_path: Path) -> None:
    with pair(tmp_path) as both, both.connect() as ps:
        first, second = both.servers
        rows = ps.table("rows", rows=1, update=paceline.update.Add())
        first.told.wait("namespace 'job' has a replica")
        rows.push(torch.tensor([7]), torch.ones(1, 1))
        ps.clock()
        with paceline.subscribe(second.address("job"), token=first.state / "token") as reader:
            with pytest.raises(Refused, match="or another server serves them"):
                reader.table("rows", timeout_s=0.5)
            first.gateway.stop()
            second.told.wait("namespace 'job' is served by its replica from now on")
            with reader.table("rows", timeout_s=DEADLINE_S) as there:
                assert there.pull([7], timeout_s=DEADLINE_S).item() == 1.0


def test_servers_of_a_folder_agree_on_the_lag(tmp_path: Path) -> None:
    views = tmp_path / "views"
    agree_on_lag(views, 2)
    agree_on_lag(views, 2)
    with pytest.raises(UsageError, match=r"--lag is 0, and '2' for the servers that came before, as .*/views/lag says"):
        agree_on_lag(views, 0)
    with pytest.raises(UsageError, match=r"--lag is -1, expected a number of clocks from 0 to 9999"):
        agree_on_lag(tmp_path / "others", -1)
    assert not (tmp_path / "others").exists()


def test_a_server_that_does_not_start_decides_on_no_lag(tmp_path: Path) -> None:
    state, views = tmp_path / "state", tmp_path / "views"
    with pytest.raises(UsageError, match="is every address of this machine"):
        serve(state=state, listen="0.0.0.0:0", views=views, lag=7)
    agree_on_lag(views, 2)
    with pytest.raises(UsageError, match=r"--lag is 7, and '2' for the servers that came before"):
        serve(state=state, views=views, lag=7)


def test_a_folder_of_views_without_room_is_named_to_clients_and_to_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with nothing_left_behind(), one(tmp_path, 0) as served:
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", fail)
            with pytest.raises(Refused, match=rf"namespace 'job': {tmp_path}/views/.*: No space left .*; free some"):
                served.connect("job")
        assert any(f"namespace 'job': {tmp_path}/views/" in line for line in served.told.lines), served.told.lines
        with served.connect("job") as ps:
            assert add_one(ps, open_sum(ps)) == 1.0


def test_a_folder_of_views_that_is_not_to_be_read_is_told_once_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_LOOK_S", 0.01)
    monkeypatch.setattr(replicas, "_FILL_S", 0.01)
    looked, folder = threading.Semaphore(0), tmp_path / "views" / "servers"
    look: Callable[[Companions], None] = Companions._look

    def watched(self: Companions) -> None:
        try:
            look(self)
        finally:
            looked.release()

    monkeypatch.setattr(Companions, "_look", watched)
    with nothing_left_behind(), one(tmp_path, 0) as served:
        shutil.rmtree(folder)
        folder.touch()
        served.told.wait(
            f"the folder of --views cannot be used, no namespace gets a replica: {folder}: Not a directory"
        )
        while looked.acquire(blocking=False):
            pass
        for _ in range(3):
            assert looked.acquire(timeout=DEADLINE_S)
    assert len([line for line in served.told.lines if "--views cannot be used" in line]) == 1


@pytest.fixture
def views(tmp_path: Path) -> tuple[NamespaceViews, NamespaceViews]:
    """The views of a namespace, as two servers see them."""
    return NamespaceViews(tmp_path / "views", 1), NamespaceViews(tmp_path / "views", 2)


def never(view: View) -> bool:
    raise AssertionError(view)


def test_a_server_serves_from_disk_in_its_own_view_or_in_one_that_it_has_saved(
    views: tuple[NamespaceViews, NamespaceViews],
) -> None:
    ours, theirs = views
    assert ours.take(0, never) == View(1, 1)
    assert theirs.take(1, never) is None
    assert ours.enlist(1, 2)
    assert not ours.enlist(1, 2), "that view is over"
    assert theirs.take(1, never) is None, "it has saved an earlier view"
    assert theirs.take(2, never) == View(3, 2)
    assert ours.take(2, never) is None
    assert theirs.take(0, never) == View(3, 2), "it is alone"


def test_one_that_ended_badly_asks_its_replica_first(views: tuple[NamespaceViews, NamespaceViews]) -> None:
    ours, theirs = views
    ours.take(0, never)
    ours.enlist(1, 2)
    asked: list[View] = []

    def promoted(view: View) -> bool:
        asked.append(view)
        return theirs.promote(view.number)

    assert ours.take(0, promoted) is None
    assert asked == [View(2, 1, 2)]
    theirs.enlist(3, 1)
    assert theirs.take(0, lambda _: False) == View(5, 2)


def test_of_a_head_and_a_replica_that_believe_the_other_gone_one_goes_on(
    views: tuple[NamespaceViews, NamespaceViews],
) -> None:
    ours, theirs = views
    ours.take(0, never)
    ours.enlist(1, 2)
    assert ours.dismiss(2)
    assert not theirs.promote(2)
    assert ours.newest() == View(3, 1)


NUMBER = 2  # of the server that has the replica


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[Namespaces, NamespaceReplicas]]:
    """A server whose namespace has just ended badly, while another one has the replica in view 2."""
    state = StateFolder(tmp_path / "state")
    companions = Companions(tmp_path / "views", state, "tcp://127.0.0.1:1", MemoryTransport(), print)
    views = companions.views("job")
    views.take(0, never)
    assert views.enlist(1, NUMBER)
    yield (
        Namespaces(state, MemoryTransport(), NamespaceConfig(tell=print), companions),
        NamespaceReplicas("job", companions),
    )
    state.close()


@pytest.fixture
def promoted(left: tuple[Namespaces, NamespaceReplicas], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The replica begins to serve as soon as the server whose namespace has ended has looked at the view once."""
    theirs, look = NamespaceViews(left[1].views._folder, NUMBER), NamespaceViews.newest

    def look_first(self: NamespaceViews) -> View | None:
        view = look(self)
        if self.own != NUMBER:
            theirs.promote(2)
        return view

    monkeypatch.setattr(NamespaceViews, "newest", look_first)
    yield
    assert look(theirs) == View(3, NUMBER)


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of views cannot be used."""

    def fail(_: NamespaceViews) -> View | None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(NamespaceViews, "newest", fail)


@pytest.mark.parametrize("meanwhile", ["promoted", "unreadable"])
def test_a_client_that_the_replica_may_serve_is_not_refused(
    meanwhile: str, left: tuple[Namespaces, NamespaceReplicas], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(meanwhile)
    transport = MemoryTransport()
    listener = transport.listen("memory://gateway")
    client = transport.connect(listener.address, b"", timeout_s=DEADLINE_S)
    frame = EnterFrame("job", encode(Hello("worker", 0, 0, 1)))
    left[0].hand_over("job", NamespaceConnection(listener.accept(timeout_s=DEADLINE_S), frame))
    with pytest.raises(ConnectionLost):  # without a refusal before it
        client.receive(timeout_s=DEADLINE_S)
    listener.close()


@pytest.mark.parametrize(
    ("standing", "serves"),
    [
        (None, False),
        (NamespaceStanding(is_head=False, follows=True, saved=0), False),
        (NamespaceStanding(is_head=False, follows=False, saved=2), False),
        (NamespaceStanding(is_head=False, follows=False, saved=1), True),
    ],
    ids=["says nothing", "follows yet", "has saved all", "has ended"],
)
def test_a_server_that_ended_badly_serves_from_disk_where_its_replica_cannot_have_more(
    standing: NamespaceStanding | None,
    serves: bool,
    left: tuple[Namespaces, NamespaceReplicas],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Companions, "standing", lambda *_: standing)
    if serves:
        left[1].take()
    else:
        with pytest.raises(ServedElsewhere):
            left[1].take()
    assert left[1].is_alone == serves


def test_a_client_that_the_server_before_has_admitted_has_its_rank_for_a_while(tmp_path: Path) -> None:
    held: Any = SimpleNamespace(core=ServerCore(ServerSettings(0, 1), started=0.0))
    ask, clock = EnterRequest(None, None, __version__), [5.0]  # of another machine, whose time is another
    before = Admission("job", 1, None, now=lambda: 1e6)
    assert before.admit(held, ask, None).rank == 0
    after = Admission("job", 1, None, now=lambda: clock[0])
    after.take_over(OpenNamespace.decode(before.opened().encode()).reserved_anew(clock[0]))
    assert after.admit(held, ask, None).rank == 1
    clock[0] += RESERVED_S
    assert after.admit(held, ask, None).rank == 0


@pytest.mark.usefixtures("promoted")
def test_a_server_whose_replica_begins_to_serve_does_not_say_that_it_does_itself(
    left: tuple[Namespaces, NamespaceReplicas],
) -> None:
    assert not left[1].standing(is_served=False, is_followed=False).is_head


def test_views_of_long_ago_are_forgotten(
    views: tuple[NamespaceViews, NamespaceViews], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_KEPT_VIEWS", 3)
    ours, _ = views
    ours.take(0, never)
    for number in range(1, 5):
        assert ours.enlist(number, 2)
    assert ours.newest() == View(5, 1, 2)
    assert len(list((tmp_path / "views").iterdir())) == 3


def test_a_server_that_cannot_be_asked_from_here_is_told_of_once(tmp_path: Path) -> None:
    state, told = StateFolder(tmp_path / "state"), list[str]()
    transport = server_access("127.0.0.1", state.path, None).transport()
    others = Companions(tmp_path / "views", state, "tcp://127.0.0.1:1", transport, told.append)
    (tmp_path / "views" / "servers" / "2").write_text("tcp://10.0.0.2:7700")
    for _ in range(2):
        assert others.standing(2, "job") is None
    start = "this server and another one that sees its --views have no replicas of each other: 10.0.0.2 is not a "
    assert [line.startswith(start) for line in told] == [True], told
    state.close()


def test_processes_are_killed_one_after_the_other(tmp_path: Path) -> None:
    states = [tmp_path / "state-0", tmp_path / "state-1"]
    options = ("--alone", "--snapshot-every", "1000", "--views", str(tmp_path / "views"))
    with serving(states[0], *options) as (first, line):
        states[1].mkdir(mode=0o700)
        shutil.copy(states[0] / "token", states[1] / "token")
        with serving(states[1], *options) as (second, other):
            addresses = f"{address_in(line, '')[:-1]},{address_in(other, 'job').removeprefix('paceline://')}"
            with paceline.connect(addresses, token=states[0] / "token") as ps:
                table = open_sum(ps)
                sums = [add_one(ps, table)]
                wait_told(first, "has a replica")
                sums.append(add_one(ps, table))
                first.kill()
                first.wait(DEADLINE_S)
                sums.append(add_one(ps, table))
                wait_told(second, "is served by its replica from now on")
                port = address_in(line, "").rpartition(":")[2].rstrip("/")
                with serving(states[0], *options, "--listen", f"127.0.0.1:{port}") as (third, _):
                    wait_told(second, "has a replica")
                    sums.append(add_one(ps, table))
                    second.kill()
                    second.wait(DEADLINE_S)
                    sums.append(add_one(ps, table))
                    wait_told(third, "is served by its replica from now on")
                    ps.close(politely=False)
    assert sums == [1.0, 2.0, 3.0, 4.0, 5.0]


def wait_told(process: subprocess.Popen[str], text: str) -> None:
    """Wait until a process has written a line with this text on stderr."""
    assert process.stderr is not None
    assert any(text in line for line in process.stderr), text


def head_of(served: Daemon, name: str, workers: int | None = None) -> Connection:
    """The connection of a head that looks for a replica of a namespace, and says nothing more."""
    transport = TcpTransport(Credentials((served.state / "token").read_bytes(), JOB))
    connects = PeerTransport(name, EnterRequest(None, workers, __version__), transport)
    return connects.connect(f"tcp://127.0.0.1:{served.port}", encode(Hello("head", 0, 0, 1)), timeout_s=DEADLINE_S)


def test_heads_have_no_more_namespaces_followed_than_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MAX_NAMESPACES", 2)
    with nothing_left_behind(), one(tmp_path, 0) as served:
        followed = [head_of(served, "a"), head_of(served, "b")]
        for each in followed:
            assert each.receive(timeout_s=DEADLINE_S).header  # it is there still
        for refused in (head_of(served, "c"), head_of(served, "d", gateway.MOST_WORKERS + 1)):
            with pytest.raises(ConnectionLost):
                refused.receive(timeout_s=DEADLINE_S)
            refused.close()
        for each in followed:
            each.close()
