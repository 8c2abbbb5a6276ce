"""What the launcher tells the actors of a job, and what it keeps to itself."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest

from paceline.errors import PeerError
from paceline.job.credentials.certificates import request
from paceline.job.credentials.holders import Holder
from paceline.job.spec import ClusterSpec, write_token
from paceline.job.views import FIRST, Views
from paceline.launch.output import Console
from paceline.launch.plan import DEFAULT_PROGRAMS, LocalRun, plan_launches
from paceline.launch.rendezvous.liveness_lock import VERSION
from paceline.launch.replicas import MAX_FAILURES
from paceline.ray.actor import plan, write_into
from paceline.ray.messages import ActorCommand, ActorReady, News
from paceline.ray.options import RayOptions
from paceline.ray.registry import RayRegistry, RemoteProcess
from paceline.ray.replicas import ReplicatedServers

RUN = LocalRun(script=Path("train.py"), num_workers=3, num_servers=2)
OPTIONS = RayOptions(address="auto")
PROCESSES = [("server", 0), ("server", 1), ("worker", 0), ("worker", 1), ("worker", 2)]


def registry_of(run_dir: Path, where: str, here: str = "a") -> RayRegistry:
    """The desk of a job whose processes are on these nodes, one letter for each."""
    run_dir.mkdir()
    (run_dir / "trace").mkdir()
    write_token(run_dir)
    return RayRegistry(RUN, OPTIONS, run_dir, dict(zip(PROCESSES, where, strict=True)), here)


def orders_of(registry: RayRegistry, folder: Path) -> list[ActorCommand]:
    """The orders for actors that arrive one after the other, each with a folder of its own."""
    orders: list[ActorCommand] = []
    for launch, (role, rank) in zip(plan_launches(RUN, DEFAULT_PROGRAMS, folder, {}), PROCESSES, strict=True):
        own = folder / f"{role}-{rank}"
        own.mkdir(parents=True)
        asked = request(own, Holder("server" if role == "server" else "worker", rank)) if registry.encrypted else b""
        orders.append(registry.command_for(launch, ActorReady(f"10.0.0.{len(orders)}", str(own), VERSION, asked)))
    return orders


def test_on_the_launchers_node_all_share_its_folder(tmp_path: Path) -> None:
    orders = orders_of(registry_of(tmp_path / "run", "aaaaa"), tmp_path / "apart")

    assert {order.folder for order in orders} == {str(tmp_path / "run")}
    assert not any(order.files or order.is_followed for order in orders)
    assert {order.host for order in orders} == {"127.0.0.1"}
    assert [order.local_rank for order in orders[2:]] == [0, 1, 2]


def test_on_another_node_all_share_the_folder_of_server_0(tmp_path: Path) -> None:
    registry = registry_of(tmp_path / "run", "bbbbb")

    assert registry.awaits_folder
    orders = orders_of(registry, tmp_path / "apart")

    assert {order.folder for order in orders} == {str(tmp_path / "apart" / "server-0")}
    assert all(order.is_followed and set(order.files) == {"spec.json", "token"} for order in orders)
    assert "token" not in repr(orders)


def test_on_several_nodes_each_has_a_certificate_that_names_it(tmp_path: Path) -> None:
    registry = registry_of(tmp_path / "run", "abbab")

    orders = orders_of(registry, tmp_path / "apart")

    assert [Path(order.folder).name for order in orders] == [f"{role}-{rank}" for role, rank in PROCESSES]
    assert [order.host for order in orders] == [f"10.0.0.{number}" for number in range(5)]
    assert [order.local_rank for order in orders[2:]] == [0, 0, 1]
    assert not any(b"PRIVATE" in content for order in orders for content in order.files.values())
    last = orders[-1]
    assert set(last.files) == {"spec.json", "token", "keys/authority.pem", "keys/worker-2.pem"}
    spec = msgspec.json.decode(last.files["spec.json"], type=ClusterSpec)
    assert (spec.transport, spec.encrypted) == ("tcp", True)


def test_a_job_may_have_more_servers_than_workers(tmp_path: Path) -> None:
    run = LocalRun(script=Path("train.py"), num_workers=1, num_servers=3)
    launches = plan_launches(run, DEFAULT_PROGRAMS, tmp_path, {})
    nodes = {(launch.role, launch.rank): "a" for launch in launches}
    (tmp_path / "run").mkdir()
    registry = RayRegistry(run, OPTIONS, tmp_path / "run", nodes, "a")

    orders = [registry.command_for(launch, ActorReady("10.0.0.1", str(tmp_path), VERSION, b"")) for launch in launches]

    assert [(order.name, order.local_rank) for order in orders] == [
        ("server 0", 0),
        ("server 1", 0),
        ("server 2", 0),
        ("worker 0", 0),
    ]


def test_an_actor_of_another_version_is_refused(tmp_path: Path) -> None:
    [launch, *_] = plan_launches(RUN, DEFAULT_PROGRAMS, tmp_path, {})

    with pytest.raises(PeerError, match=r"server 0 is on 10\.0\.0\.1, where paceline 0\.0\.1 is installed"):
        registry_of(tmp_path / "run", "aaaaa").command_for(launch, ActorReady("10.0.0.1", "", "0.0.1", b""))


def test_what_processes_tell_lies_in_the_launchers_folder(tmp_path: Path) -> None:
    registry, launches = registry_of(tmp_path / "run", "bbbbb"), plan_launches(RUN, DEFAULT_PROGRAMS, tmp_path, {})
    assert registry.book.missing() == ["server 0", "server 1"]

    for launch in launches[:2]:
        registry.store_news(launch, News([], f"tcp://10.0.0.{launch.rank}:7", b"{}\n", None))
        registry.store_news(launch, News([], "", b"{}\n", None))

    registry.close()
    assert registry.book.poll()
    assert (tmp_path / "run" / "trace" / "server-1.jsonl").read_bytes() == b"{}\n{}\n"
    (tmp_path / "there").mkdir()
    for name, content in registry.read_file("cluster.json").items():
        write_into(tmp_path / "there", name, content)
    spec = ClusterSpec.read(tmp_path / "there" / "cluster.json")
    assert (spec.addresses, spec.run_dir) == (("tcp://10.0.0.0:7", "tcp://10.0.0.1:7"), str(tmp_path / "there"))


def test_data_servers_have_places_too_and_workers_hear_where_one_listens_later(tmp_path: Path) -> None:
    run = LocalRun(script=Path("train.py"), num_workers=1, num_servers=1, num_data_servers=1)
    launches = plan_launches(run, DEFAULT_PROGRAMS, tmp_path, {})
    for folder in ("run/trace", "apart"):
        (tmp_path / folder).mkdir(parents=True)
    write_token(tmp_path / "run")
    nodes = {("server", 0): "a", ("data", 0): "b", ("worker", 0): "a"}
    registry = RayRegistry(run, OPTIONS, tmp_path / "run", nodes, "a")
    asked = request(tmp_path / "apart", Holder("data", 0))
    [data] = [launch for launch in launches if launch.role == "data"]

    order = registry.command_for(data, ActorReady("10.0.0.2", str(tmp_path / "apart"), VERSION, asked))

    assert "keys/data-0.pem" in order.files
    planned = plan(order, tmp_path)
    assert planned.command[2:] == ("paceline.launch.data_server", str(tmp_path / "spec.json"), "0", "10.0.0.2")
    assert registry.book.missing() == ["server 0", "data server 0"]
    for port in (7, 8):
        registry.store_news(data, News([], f"tcp://10.0.0.2:{port}", b"", None))
        assert registry.data_addresses() == {"data-0.address": b"tcp://10.0.0.2:%d" % port}
    assert RayRegistry(run, OPTIONS, tmp_path / "run", dict.fromkeys(nodes, "b"), "a").data_addresses() == {}


def test_processes_of_servers_with_replicas_have_folders_of_their_own_and_all_that_is_decided(tmp_path: Path) -> None:
    run = LocalRun(script=Path("train.py"), num_workers=1, num_servers=1)
    (tmp_path / "run" / "trace").mkdir(parents=True)
    write_token(tmp_path / "run")
    nodes = {("server", 0): "a", ("replica", 0): "a", ("worker", 0): "a"}
    registry = RayRegistry(run, RayOptions(replicas=1, lag=2), tmp_path / "run", nodes, "a")
    servers = ReplicatedServers(tmp_path / "run", 1)
    head, replica, _ = servers.equip(plan_launches(run, DEFAULT_PROGRAMS, tmp_path, {}))
    (tmp_path / "apart").mkdir()
    asked = request(tmp_path / "apart", Holder("server", 0))

    order = registry.command_for(replica, ActorReady("10.0.0.2", str(tmp_path / "apart"), VERSION, asked))
    spec = msgspec.json.decode(order.files["spec.json"], type=ClusterSpec)
    assert (spec.has_replicas, spec.replica_lag, spec.launcher_decides, spec.encrypted) == (True, 2, True, True)
    assert order.files["server-0.view-1"] == b"0 1"
    assert plan(order, tmp_path).command[3:] == (str(tmp_path / "spec.json"), "0", "10.0.0.2", "1")
    assert registry.take_server_files() == {"server-0.view-1": b"0 1"}
    assert registry.missing() == ["server 0", "server 0.1"]

    for launch in (head, replica):
        registry.store_news(launch, News([], f"tcp://10.0.0.{launch.process}:7", b"", None))
    assert registry.missing() == []
    registry.store_news(head, News([], "", b"", -9))
    assert servers.objection(0) == "", "its replica is left"
    registry.store_news(replica, News([], "", b"", None, [(2, 1, -1), (2, 0, -1)]))
    assert registry.take_server_files() == {
        "server-0.1.address": b"tcp://10.0.0.1:7",
        "server-0.address": b"tcp://10.0.0.0:7",
        "server-0.ended": b"was killed by SIGKILL",
        "server-0.view-2": b"1 -1",
    }
    assert registry.take_server_files() == {}

    following = servers.following(head, -9)
    assert following is not None
    assert (following.name, following.process, following.incarnation) == ("server 0.2", 2, 1)
    assert [servers.is_spare(launch) for launch in (head, replica, following)] == [True, False, True]
    registry.note_end(replica, 1)
    assert servers.objection(0) == "no process of it is left to serve"


def test_processes_that_come_to_nothing_one_after_the_other_are_not_followed_for_ever(tmp_path: Path) -> None:
    assert Views(tmp_path, 0).change(FIRST)
    servers = ReplicatedServers(tmp_path, 1)
    [launch, *_] = plan_launches(RUN, DEFAULT_PROGRAMS, tmp_path, {})
    for number in range(1, MAX_FAILURES):
        following = servers.following(launch, 1)
        assert following is not None
        assert following.process == 2 * number
        launch = following

    assert servers.following(launch, 1) is None


def test_a_process_is_started_as_the_next_life_that_it_is(tmp_path: Path) -> None:
    orders = orders_of(registry_of(tmp_path / "run", "abbab"), tmp_path / "apart")
    again = plan(msgspec.structs.replace(orders[-1], incarnation=3), tmp_path)

    assert again.command[1:] == ("-m", "paceline.launch.worker", str(Path.cwd() / "train.py"))
    assert (again.incarnation, again.variables["PACELINE_RANK"]) == (3, "2")
    server = plan(orders[1], tmp_path)
    assert server.command[1:] == ("-m", "paceline.launch.server", str(tmp_path / "spec.json"), "1", "10.0.0.1")


def test_a_first_life_that_does_not_begin_is_a_mistake_and_a_later_one_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry, killed = registry_of(tmp_path / "run", "aaaaa"), []
    launch = plan_launches(RUN, DEFAULT_PROGRAMS, tmp_path, {})[-1]
    lives = [
        RemoteProcess(life, MagicMock(), registry, Console(), killed.append, 7.0) for life in (launch, launch.again())
    ]

    assert [life.is_late(6.9) for life in lives] == [False, False]
    assert [life.is_late(7.0) for life in lives] == [True, True]
    for life in lives:
        life.mark_lost("no such node")

    assert [life.reap() for life in lives] == [126, -9]
    assert len(killed) == 2
    assert not lives[0].is_late(8.0)
    assert capsys.readouterr().err.splitlines() == ["[worker 2] no such node"] * 2
