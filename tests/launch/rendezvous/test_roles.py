"""Where servers are, and which processes start them."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.job.machines import Machine
from paceline.launch.rendezvous.detect import Detected
from paceline.launch.rendezvous.join import settle
from paceline.launch.rendezvous.roles import RoleAssignment, Servers, assign_nodes, assign_role

JOB = Detected(launcher="torchrun", job="a7", rank=0, size=4, local_rank=0, local_size=2, num_nodes=2)


def assignments(asked: str | None) -> list[RoleAssignment]:
    places = [replace(JOB, rank=rank, local_rank=rank % 2, node_rank=rank // 2) for rank in range(4)]
    return [assign_role(place, asked) for place in places]


def test_one_server_beside_rank_0_by_default() -> None:
    assert [list(assignment.sidecars) for assignment in assignments(None)] == [[0], [], [], []]
    assert [assignment.is_founder for assignment in assignments(None)] == [True, False, False, False]
    assert assignments(None)[0].summary == "torchrun, 4 workers on 2 nodes, 1 server beside rank 0"


def test_several_beside_rank_0() -> None:
    assert [list(assignment.sidecars) for assignment in assignments("first:2")] == [[0, 1], [], [], []]
    assert {assignment.num_servers for assignment in assignments("first:2")} == {2}


def test_some_on_each_node() -> None:
    assert [list(assignment.sidecars) for assignment in assignments("node:2")] == [[0, 1], [], [2, 3], []]
    assert {assignment.num_servers for assignment in assignments("node:2")} == {4}
    assert assignments("node:2")[0].summary == "torchrun, 4 workers on 2 nodes, 2 servers on each node"


def test_the_replicas_of_a_node_are_on_the_next() -> None:
    assert [list(assignment.sidecars) for assignment in assignments("node:2+replicas:1")] == [[0, 1], [], [2, 3], []]
    assert [list(assignment.replicas) for assignment in assignments("node:2+replicas:1")] == [[2, 3], [], [0, 1], []]
    summary = "torchrun, 4 workers on 2 nodes, 2 servers on each node, each with a replica on the next"
    assert assignments("node:2+replicas:1")[0].summary == summary
    assert not any(assignment.replicas for assignment in assignments("node:2"))


def test_replicas_may_lag() -> None:
    assert assign_role(JOB, "node:2+replicas:1").replica_lag == 0
    assignment = assign_role(JOB, "node:2+replicas:1+lag:3")
    assert (assignment.has_replicas, assignment.replica_lag) == (True, 3)
    assert assignment.summary.endswith("each with a replica on the next that may lag by 3 clocks")
    with pytest.raises(UsageError, match=r"replicas may lag, and there are none. Take node:M\+replicas:1\+lag:3"):
        assign_role(JOB, "node:1+lag:3")
    for asked in ("node:1+replicas:1+lag:0", "node:1+replicas:1+lag:-1", "node:1+lag:2+replicas:1", "lag:2"):
        with pytest.raises(UsageError, match="expected first:M"):
            assign_role(JOB, asked)


@pytest.mark.parametrize("asked", ["first:1+replicas:1", "ranks:1+replicas:1", "node:1+ranks:1+replicas:1"])
def test_servers_that_have_no_replicas(asked: str) -> None:
    with pytest.raises(UsageError, match=r"replicas are for servers on every node. Take node:M\+replicas:1"):
        assign_role(JOB, asked)


def test_a_replica_takes_another_machine(tmp_path: Path) -> None:
    assignment = assign_role(replace(JOB, num_nodes=1), "node:1+replicas:1")
    with pytest.raises(UsageError, match="all processes of the job are on a, and a replica is for the case"):
        settle(tmp_path, assignment, [Machine("a")], None)


def test_where_the_launcher_counts_no_nodes_each_machine_is_one() -> None:
    machines = [Machine("a"), Machine("b"), Machine("b"), Machine("a", "of another start")]
    places = [replace(JOB, rank=rank, local_rank=None, node_rank=None, counts_nodes=False) for rank in range(4)]
    assert not assign_role(places[1], "node:2").sidecars, "its node is not known yet"
    assert assign_role(places[0], None).summary == "torchrun, 4 workers, 1 server beside rank 0"

    located = [assign_nodes(place, machines, rank) for rank, place in enumerate(places)]

    assert [place.local_rank for place in located] == [0, 0, 1, 0]
    assert [list(assign_role(place, "node:2").sidecars) for place in located] == [[0, 1], [2, 3], [], [4, 5]]
    assert {assign_role(place, "node:2").num_servers for place in located} == {6}
    assert assign_nodes(JOB, machines, 1) == JOB, "what the launcher says is left as it is"


def test_the_last_ranks_instead_of_workers() -> None:
    told = assignments("ranks:2")

    assert [(assignment.role, assignment.index) for assignment in told] == [
        ("worker", 0),
        ("worker", 1),
        ("server", 0),
        ("server", 1),
    ]
    assert {(assignment.num_workers, assignment.num_servers, len(assignment.sidecars)) for assignment in told} == {
        (2, 2, 0)
    }
    assert told[0].summary == "torchrun, 2 workers on 2 nodes, 2 servers as ranks 2 to 3"
    assert assignments("ranks:1")[0].summary == "torchrun, 3 workers on 2 nodes, 1 server as rank 3"


def test_some_beside_workers_and_some_alone() -> None:
    job = replace(JOB, size=5, num_nodes=3)
    machines = [Machine("a"), Machine("b"), Machine("b")]
    places = [replace(job, rank=rank, local_rank=rank % 2, node_rank=rank // 2) for rank in range(5)]
    workers = [assign_nodes(place, machines, rank, anew=True) for rank, place in enumerate(places[:3])]

    told = [assign_role(place, "node:1+ranks:2") for place in [*workers, *places[3:]]]

    assert [(assignment.role, assignment.index) for assignment in told] == [
        *(("worker", rank) for rank in range(3)),
        *(("server", rank) for rank in range(2)),
    ]
    assert [list(assignment.sidecars) for assignment in told] == [[2], [3], [], [], []], "those alone are counted first"
    assert {(assignment.num_workers, assignment.num_serving) for assignment in told} == {(3, 2)}
    assert {assignment.num_servers for assignment in told[:3]} == {4}, (
        "the third node has no workers, as is known by now"
    )
    assert assign_role(places[0], "node:1+ranks:2").summary == (
        "torchrun, 3 workers on 3 nodes, 1 server on each node with workers, 2 servers as ranks 3 to 4"
    )


def test_shares_where_some_servers_have_hosts_to_themselves() -> None:
    a, b, c = Machine("a"), Machine("b"), Machine("c")
    both = Servers.parse("node:1+ranks:1")
    assert both.shares([a, a, b, b], [c]) == (0.5, 0.25, 0.25)
    assert both.shares([a, a, b, b], [b]) == (), "a server that is beside a worker is not alone, however it was started"
    assert Servers.parse("first:2+ranks:1").shares([a, b], [c]) == (0.5, 0.25, 0.25)
    assert Servers.parse("ranks:2").shares([a, b], [c, c]) == ()
    assert Servers.parse("node:2").shares([a, b], []) == ()
    assert Servers("first", 0, 3).shares([a, b], [a, b, c]) == (0.25, 0.25, 0.5), "roles that the launcher has given"


def test_without_local_ranks_all_are_on_one_node() -> None:
    place = Detected(launcher="torch.distributed", job="a", rank=1, size=2)

    assert not assign_role(place, "node:1").sidecars
    assert list(assign_role(replace(place, rank=0), "node:1").sidecars) == [0]


def test_roles_that_the_launcher_has_given() -> None:
    given = Detected(launcher="DMLC", job="a", rank=None, size=2, role="scheduler", num_servers=1)

    assignment = assign_role(given, None)

    assert (assignment.role, assignment.is_founder, assignment.summary) == (
        "scheduler",
        True,
        "DMLC, 2 workers on 1 node, 1 server of its own",
    )
    assert not assign_role(replace(given, role="worker", rank=0), None).is_founder
    with pytest.raises(UsageError, match=r"'first:1', but DMLC has named 1 already"):
        assign_role(given, "first:1")


@pytest.mark.parametrize(
    "asked",
    [
        *("first", "first:0", "first:-1", "last:1", "ranks:two", ":1"),
        *("first:1+node:1", "ranks:1+ranks:1", "node:1+", "node:1+ranks:0", "node:1+replicas:2", "replicas:1"),
    ],
)
def test_what_is_no_placement(asked: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"servers is '{asked}', expected first:M")):
        assign_role(JOB, asked)


def test_servers_that_leave_no_worker() -> None:
    with pytest.raises(UsageError, match="ranks:4 leave no worker of 4 ranks"):
        assign_role(JOB, "ranks:4")
