"""A process that serves is killed, or a newer one takes over: clients go on, and no push is lost or counts twice."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.serve.daemon import Daemon, daemon
from tests.serve.test_command import DEADLINE_S, add_one, address_in, open_sum, serving

import paceline
from paceline.errors import PacelineError, UsageError
from paceline.serve import supervise
from paceline.serve.command import check_offer
from paceline.serve.namespace import NamespaceMemory
from paceline.serve.orders import (
    HAND_OVER,
    LISTENER,
    LOCK,
    TAKEN,
    ServeOffer,
    ServeOrders,
    ServeVersion,
    read_version,
    ready,
)
from paceline.serve.state import StateFolder
from paceline.serve.supervise import (
    ASK_TIMEOUT_S,
    CONTROL_NAME,
    FRUITFUL_S,
    RESTART_PAUSE_S,
    RepeatedDeaths,
    ServeProcess,
    ServeSupervisor,
    take_from,
)
from paceline.transport.lasting_memory import LastingMemory, MemoryHolder


def offer_of(state: Path) -> ServeOffer:
    """What the supervisor of this folder says of its processes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(str(state / CONTROL_NAME))
        end.send(ready())
        return msgspec.json.decode(end.recv(1 << 16), type=ServeOffer)


def wait_for_successor(state: Path) -> ServeOffer:
    """Wait until a process is ready to go on in the place of the one that serves."""
    give_up, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while not ((found := offer_of(state)).serving and found.waiting):
        assert time.monotonic() < give_up
        pause.wait(0.05)
    return found


def test_clients_go_on_when_the_server_is_killed_and_when_a_newer_one_takes_over(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state, "--snapshot-every", "1000") as (process, line):
        with paceline.connect(address_in(line, "job"), token=state / "token") as ps:
            table = open_sum(ps)
            sums = [add_one(ps, table) for _ in range(3)]
            found = wait_for_successor(state)
            os.kill(found.serving, signal.SIGKILL)
            sums += [add_one(ps, table) for _ in range(3)]
            with serving(state, "--take-over") as (newer, told):
                assert told.split(" with ")[0] == line.split(" with ")[0]
                assert process.wait(DEADLINE_S) == 0
                sums += [add_one(ps, table) for _ in range(3)]
                assert sums == [float(number) for number in range(1, 10)]
                assert offer_of(state).serving not in (0, found.serving, found.waiting)
                newer.send_signal(signal.SIGTERM)
                _, stderr = newer.communicate(timeout=DEADLINE_S)
                assert (newer.returncode, stderr) == (0, "paceline: saving, and ending\n")
                ps.close(politely=False)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    told_lines = [text for text in stderr.splitlines() if "turned away" not in text]
    killed = f"the process that serves (pid {found.serving}) was killed by SIGKILL"
    assert told_lines == [
        f"paceline: {killed}; another process goes on in its place",
        "paceline: another process has taken over",
    ]
    with daemon(state) as served, served.connect("job") as ps:
        assert float(open_sum(ps).pull()[0]) == 9.0


def test_memory_is_kept_until_a_process_comes_to_serve(tmp_path: Path) -> None:
    state, views, away = tmp_path / "state", tmp_path / "views", tmp_path / "away"
    with serving(state, "--snapshot-every", "1000", "--views", str(views)) as (process, line):
        with paceline.connect(address_in(line, "job"), token=state / "token") as ps:
            table = open_sum(ps)
            assert add_one(ps, table) == 1.0
            found = wait_for_successor(state)
            views.rename(away)  # as that of a file server that is away
            views.touch()
            os.kill(found.serving, signal.SIGKILL)
            assert process.stderr is not None
            assert any("before it served" in told for told in process.stderr)
            views.unlink()
            away.rename(views)
            assert add_one(ps, table) == 2.0
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_one_that_cannot_have_its_port_for_metrics_takes_nothing_over(tmp_path: Path) -> None:
    with socket.socket() as taken, supervisor(tmp_path / "state") as (found, _):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        orders = replace(found.orders, metrics=port)
        for served, is_refused in (("", True), ("9464", True), (f"127.0.0.1:{port}", False), (None, False)):
            offer = ServeOffer(found.orders.address, metrics=served)
            with pytest.raises(UsageError, match="--metrics") if is_refused else nullcontext():
                check_offer(orders, None, offer)
        with pytest.raises(UsageError, match="every address of this machine"):
            check_offer(replace(orders, views="/views", metrics=""), None, ServeOffer("tcp://0.0.0.0:7"))


@pytest.mark.campaign
def test_a_process_that_is_started_anew_takes_over_at_a_signal(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(state, "--snapshot-every", "1000") as (process, line):
        with paceline.connect(address_in(line, "job"), token=state / "token") as ps:
            table, sums, done = open_sum(ps), [1.0], threading.Event()
            add_one(ps, table)
            before = wait_for_successor(state)
            process.send_signal(signal.SIGUSR2)
            give_up = time.monotonic() + DEADLINE_S
            while offer_of(state).serving in (0, before.serving):
                assert time.monotonic() < give_up
                sums.append(add_one(ps, table))
                done.wait(0.01)
            sums.append(add_one(ps, table))
            assert sums == [float(number + 1) for number in range(len(sums))]
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=DEADLINE_S)
        takes_over = f"paceline: a process of paceline {paceline.__version__} takes over"
        told = [text for text in stderr.splitlines() if "turned away" not in text]
        assert (process.returncode, told) == (0, [takes_over, "paceline: saving, and ending"])


@contextmanager
def supervisor(state: Path) -> Iterator[tuple[ServeSupervisor, socket.socket]]:
    """A supervisor that runs no process yet, and the socket where it is asked."""
    folder = StateFolder(state)
    with MemoryHolder() as memory, socket.socket() as listener:
        memory.start()
        memory.adopt(LISTENER, listener.fileno())
        memory.adopt(LOCK, folder.lock)
        orders = ServeOrders(
            state=str(state), address="tcp://127.0.0.1:7", keys=None, snapshot_every_s=1.0, allow=(), or_previous=False
        )
        with ServeSupervisor(orders, state, memory) as found, supervise._control_socket(state) as control:
            yield found, control
        folder.close()


def asked(found: ServeSupervisor, control: socket.socket) -> tuple[threading.Thread, list[bool]]:
    """Have it answer in a thread."""
    answers = list[bool]()
    thread = threading.Thread(target=lambda: answers.append(found._answer(control)))
    thread.start()
    return thread, answers


def test_memory_and_socket_of_a_server_go_to_the_one_that_takes_over(tmp_path: Path) -> None:
    state, checked = tmp_path / "state", list[ServeOffer]()
    with supervisor(state) as (found, control), MemoryHolder() as newer:
        found.orders = replace(found.orders, metrics="9464")
        thread, answers = asked(found, control)
        assert take_from(state, newer, checked.append) == "tcp://127.0.0.1:7" == checked[0].address
        assert checked[0].metrics == "9464"
        thread.join(DEADLINE_S)
        assert answers == [True]
        assert sorted(newer.names()) == [LISTENER, LOCK]
    assert int((state / "lock").read_text()) == os.getpid()


def test_a_server_goes_on_where_none_can_take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"

    def refuse(offer: ServeOffer) -> None:
        raise UsageError(f"not {offer.address}")

    with supervisor(state) as (found, control), MemoryHolder() as newer:
        thread, answers = asked(found, control)
        with pytest.raises(UsageError, match=r"not tcp://127\.0\.0\.1:7"):
            take_from(state, newer, refuse)
        thread.join(DEADLINE_S)
        thread, answers = asked(found, control)
        monkeypatch.setattr(supervise, "ready", lambda: ready(ServeVersion(format=0, program="0.0.1")))
        with pytest.raises(UsageError, match=r"paceline 0\.0\.1 cannot go on with what the server keeps in memory"):
            take_from(state, newer, lambda _: None)
        thread.join(DEADLINE_S)
        assert (answers, newer.names()) == ([False], [])
        assert sorted(found.memory.names()) == [LISTENER, LOCK]
    for folder in (state, tmp_path / "missing", state / "lock"):
        with MemoryHolder() as newer, pytest.raises(UsageError, match=f"in {folder}: start one without --take-over"):
            take_from(folder, newer, lambda _: None)


@pytest.mark.parametrize("makes_room", [False, True])
def test_a_process_that_makes_room_is_not_said_to_have_been_killed(
    makes_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr(supervise, "tell", told.append)
    ours, theirs = socket.socketpair()
    with theirs, supervisor(tmp_path / "state") as (found, _):
        process = ServeProcess(subprocess.Popen(["sleep", "100"]), ours, makes_room=makes_room)
        process.process.kill()
        found._on_killed(process, process.end())
    assert ["was killed by SIGKILL" in line for line in told] == [True] * (not makes_room)


class SlowToTakeOver(socket.socket):
    """The end of one that takes over, and needs a minute for all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.said = [HAND_OVER, TAKEN]

    def send(self, *_: Any) -> int:
        return 0

    def sendmsg(self, *_: Any) -> int:
        return 0

    def recv(self, *_: Any) -> bytes:
        said, timeout_s = self.said.pop(0), self.gettimeout()
        if said == TAKEN and timeout_s is not None and timeout_s < 60.0:
            raise TimeoutError("timed out")
        return said


def test_one_that_takes_long_to_take_all_over_is_waited_for(tmp_path: Path) -> None:
    with supervisor(tmp_path / "state") as (found, _), SlowToTakeOver() as asking:
        asking.settimeout(ASK_TIMEOUT_S)
        assert found._offer(asking, read_version(ready())), "two servers go on with the same memory"


def test_a_server_goes_on_where_the_process_that_is_to_wait_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    told = list[str]()
    monkeypatch.setattr(supervise, "tell", told.append)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with supervisor(tmp_path / "state") as (found, _):
        found.orders = replace(found.orders, greets=False)
        for _ in range(2):
            found._next_at, began_s = 0.0, time.monotonic()
            found._advance()
            assert (found._next, found._next_at >= began_s + RESTART_PAUSE_S) == (None, True)
        [line] = told
        assert "no other process can be started to go on if this server is killed" in line
        assert "Resource temporarily unavailable" in line
        found.orders, found._next_at = replace(found.orders, greets=True), 0.0
        with pytest.raises(BlockingIOError):
            found._advance()


def test_a_supervisor_that_is_killed_while_another_takes_over_leaves_it_nothing_half(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with supervisor(state) as (_, control), MemoryHolder() as newer:

        def vanish() -> None:
            asking, _ = control.accept()
            with asking:
                asking.recv(1 << 16)
                asking.send(msgspec.json.encode(ServeOffer("tcp://127.0.0.1:7")))
                assert asking.recv(1 << 16) == HAND_OVER

        thread = threading.Thread(target=vanish)
        thread.start()
        with pytest.raises(PacelineError, match="has not let go of it"):
            take_from(state, newer, lambda _: None)
        thread.join(DEADLINE_S)
        assert newer.names() == []


def test_a_process_that_is_killed_again_and_again_is_not_followed_for_ever() -> None:
    with MemoryHolder() as memory:
        deaths = RepeatedDeaths()
        assert [deaths.note(memory, 1.0) for _ in range(6)] == [False] * 5 + [True]
        assert not deaths.note(memory, FRUITFUL_S)
        assert not deaths.note(memory, 1.0)


def assert_opened(served: Daemon, name: str, generation: int, incarnations: dict[int, int]) -> None:
    """What another process would find of a namespace; nothing refers to its memory afterwards."""
    memory = served.namespaces._open[name]._memory
    opened = None if memory is None else memory.opened
    assert opened is not None
    assert (opened.generation, opened.workers, opened.incarnations) == (generation, None, incarnations)


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_kept_is_told_and_a_namespace_that_has_ended_leaves_no_memory(tmp_path: Path) -> None:
    merging = paceline.update.Merging(paceline.update.Add(), quorum=1, num_workers=1)
    with MemoryHolder() as holder:
        holder.start()
        memory = LastingMemory.connect(holder.theirs)
        with daemon(tmp_path / "state", memory=memory, snapshot_every_s=1000.0) as served:
            with served.connect("job") as ps:
                add_one(ps, open_sum(ps))
                assert_opened(served, "job", 1, {0: 0})
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(NamespaceMemory, "note", fail)
                    with served.connect("job"):
                        assert not served.namespaces._open["job"].can_be_succeeded
                with served.connect("job"):
                    assert served.namespaces._open["job"].can_be_succeeded
                with served.connect("merged") as other:
                    other.table("w", shape=(2,), update=merging, consistency="asynchronous")
                    assert not served.namespaces._open["merged"].can_be_succeeded
                served.told.wait(
                    "namespace 'merged' goes on from its newest snapshot if this process is killed: table 'w'"
                )
            served.wait_empty()
            assert holder.names() == []
