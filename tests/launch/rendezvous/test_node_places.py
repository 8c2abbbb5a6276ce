"""Which node starts another process of a server once the one that had its place is gone."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.job.views import FIRST, Views
from paceline.launch.rendezvous import node_places
from paceline.launch.rendezvous.node_places import NodePlaces, PlaceClaims, is_to_hand_over

NUM_NODES = 4


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[NodePlaces]]:
    """Four nodes, each with a server of its own and the replica of the one before."""
    with ExitStack() as running:
        found = [NodePlaces(tmp_path, node, NUM_NODES) for node in range(NUM_NODES)]
        for node in found:
            running.callback(node.close)
            Views(tmp_path, node.node).change(FIRST)
            assert node.claim(node.node, FIRST.head)
            assert node.claim((node.node - 1) % NUM_NODES, FIRST.replica)
        yield found


def taken(nodes: list[NodePlaces]) -> dict[int, list[tuple[int, int]]]:
    """What each node is to start by now, without those that start nothing."""
    return {node.node: due for node in nodes if (due := node.take_over())}


def again(folder: Path, node: int) -> NodePlaces:
    """A node that comes again, and tries to start the processes that it began with, which are claimed."""
    found = NodePlaces(folder, node, NUM_NODES)
    assert not found.claim(node, FIRST.head)
    assert not found.claim((node - 1) % NUM_NODES, FIRST.replica)
    return found


def test_the_next_node_that_lives_takes_the_places_of_one_that_is_gone(nodes: list[NodePlaces], tmp_path: Path) -> None:
    assert taken(nodes) == {}
    nodes[1].close()
    left = [nodes[0], *nodes[2:]]
    assert taken(left) == {}, "its replicas may serve yet, and its servers go on alone"
    assert Views(tmp_path, 0).dismiss(FIRST.number)
    assert Views(tmp_path, 1).promote(FIRST.number)
    assert taken(left) == {2: [(0, 3)], 3: [(1, 2)]}
    assert taken(left) == {}, "they start another by themselves from now on"


def test_a_node_that_lives_starts_the_next_process_itself(nodes: list[NodePlaces], tmp_path: Path) -> None:
    assert Views(tmp_path, 0).dismiss(FIRST.number)
    assert taken(nodes) == {}
    assert nodes[1].claim(0, 3)
    assert taken(nodes) == {}


def test_a_node_that_was_believed_gone_starts_no_other_process(
    nodes: list[NodePlaces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Views(tmp_path, 0).dismiss(FIRST.number)
    monkeypatch.setattr(node_places, "SILENCE_S", 0.0)
    hasty = NodePlaces(tmp_path, 4, NUM_NODES)  # to which all others are silent
    try:
        assert hasty.take_over() == [(0, 3)]
    finally:
        hasty.close()
    assert not nodes[1].claim(0, 3)
    assert PlaceClaims(tmp_path, 0).node_of(3) == 4


def test_places_move_on_as_long_as_two_nodes_are_left(nodes: list[NodePlaces], tmp_path: Path) -> None:
    views = Views(tmp_path, 0)
    for gone, process in ((1, 3), (2, 5)):
        nodes[gone].close()
        view = views.newest()
        assert view is not None
        assert views.dismiss(view.number)
        assert (0, process) in taken([nodes[0], *nodes[gone + 1 :]])[gone + 1]
        assert views.enlist(view.number + 1, process)
    nodes[3].close()
    view = views.newest()
    assert view is not None
    assert views.dismiss(view.number)
    assert taken([nodes[0]]) == {}, "there is no other node"


def test_the_places_of_a_node_that_leaves_move_while_its_processes_live(
    nodes: list[NodePlaces], tmp_path: Path
) -> None:
    nodes[1].leave()
    assert nodes[1].is_needed()
    assert taken(nodes) == {2: [(0, 3)]}, "its replica; of the server that it has the replica is elsewhere"
    assert not nodes[1].claim(0, 5)
    assert is_to_hand_over(tmp_path, 1, FIRST.head)
    assert not is_to_hand_over(tmp_path, 0, FIRST.head)
    assert Views(tmp_path, 0).enlist(FIRST.number, 3)
    assert nodes[1].is_needed(), "one serves there yet"
    assert Views(tmp_path, 1).promote(FIRST.number)
    assert taken(nodes) == {3: [(1, 2)]}
    assert not nodes[1].is_needed()
    assert all(node.is_needed() for node in (nodes[0], *nodes[2:]))


def test_a_server_does_not_leave_for_a_node_that_leaves_as_well(nodes: list[NodePlaces], tmp_path: Path) -> None:
    nodes[1].leave()
    nodes[2].leave()
    assert not is_to_hand_over(tmp_path, 1, FIRST.head)
    assert taken(nodes) == {3: [(0, 3), (1, 3)]}
    assert Views(tmp_path, 1).enlist(FIRST.number, 3)
    assert is_to_hand_over(tmp_path, 1, FIRST.head)


def test_a_node_that_leaves_keeps_a_replica_that_no_other_can_have_only_as_long_as_it_likes(
    nodes: list[NodePlaces], tmp_path: Path
) -> None:
    for node in nodes[1:]:
        node.leave()
    assert taken(nodes) == {0: [(1, 3), (2, 3)]}, "of server 0 it has the process that serves"
    for rank in (1, 2, 3):
        view = FIRST if rank == 3 else FIRST.repaired(3)
        assert rank == 3 or Views(tmp_path, rank).enlist(FIRST.number, 3)
        assert Views(tmp_path, rank).promote(view.number)
    assert not any(node.is_needed() for node in nodes[1:])


def test_a_node_that_comes_again_gets_back_what_it_had_one_place_after_the_other(
    nodes: list[NodePlaces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [Views(tmp_path, rank) for rank in range(2)]
    nodes[1].leave()
    assert is_to_hand_over(tmp_path, 1, FIRST.head)
    nodes[1].close()
    assert views[0].dismiss(FIRST.number)
    assert views[1].promote(FIRST.number)
    left = [nodes[0], *nodes[2:]]
    assert taken(left) == {2: [(0, 3)], 3: [(1, 2)]}
    assert views[0].enlist(2, 3)
    assert views[1].enlist(2, 2)
    nodes[1] = again(tmp_path, 1)
    try:
        assert not is_to_hand_over(tmp_path, 1, FIRST.replica), "it does not leave any more"
        assert taken(nodes) == {1: [(0, 5), (1, 4)]}
        assert nodes[1].has_brought_home(1, 4)
        assert not nodes[2].has_brought_home(0, 3)
        assert taken(nodes) == {}
        assert not is_to_hand_over(tmp_path, 1, FIRST.replica), "its own process has not come"
        assert views[1].enlist(3, 4)
        assert taken(nodes) == {}
        assert not is_to_hand_over(tmp_path, 1, FIRST.replica), "it may be gone again soon"
        monkeypatch.setattr(node_places, "SETTLED_S", 0.0)
        assert taken(nodes) == {}
        assert is_to_hand_over(tmp_path, 1, FIRST.replica)
        assert views[1].promote(4)
        assert taken(nodes) == {}, "the one before starts the next replica itself"
        assert not is_to_hand_over(tmp_path, 1, 4)
    finally:
        nodes[1].close()


def test_a_node_that_comes_again_at_once_starts_the_next_processes_in_its_places(
    nodes: list[NodePlaces], tmp_path: Path
) -> None:
    nodes[1].close()
    nodes[1] = again(tmp_path, 1)
    try:
        assert taken(nodes) == {1: [(0, 3)]}, "of server 1 it has what serves, as long as views say so"
        assert Views(tmp_path, 1).promote(FIRST.number)
        assert taken(nodes) == {1: [(1, 2)]}
    finally:
        nodes[1].close()


def test_what_is_claimed_is_started_though_the_disk_is_full_for_the_next_place(
    nodes: list[NodePlaces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes[1:3]:
        node.leave()
    make_once, num_made = node_places.make_once, 0

    def make_one(path: Path, content: bytes) -> bool:
        nonlocal num_made
        if num_made:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_made += 1
        return make_once(path, content)

    with monkeypatch.context() as full:
        full.setattr(node_places, "make_once", make_one)
        assert nodes[3].take_over() == [(0, 3)]
        with pytest.raises(OSError, match="No space left"):
            nodes[3].take_over()
    assert nodes[3].take_over() == [(1, 3)]


def test_the_next_node_takes_the_place_of_a_replica_from_the_node_that_serves(
    nodes: list[NodePlaces], tmp_path: Path
) -> None:
    assert PlaceClaims(tmp_path, 0).claim(3, node=0), "when something else served"
    nodes[1].close()
    assert Views(tmp_path, 0).dismiss(FIRST.number)
    assert taken([nodes[0], *nodes[2:]]) == {2: [(0, 5)]}, "the two processes of a server are on two nodes"


def test_a_place_is_asked_back_once_that_of_the_replica_is_home_or_has_none(
    nodes: list[NodePlaces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server 0 has moved from node 0 to node 2, and its replica from node 1 to node 3."""
    views = Views(tmp_path, 0)
    nodes[0].close()
    assert views.promote(FIRST.number)
    assert taken(nodes[1:])[2] == [(0, 2)]
    assert views.enlist(2, 2)
    assert views.promote(3)
    assert PlaceClaims(tmp_path, 0).claim(3, node=3)
    assert views.enlist(4, 3)
    monkeypatch.setattr(node_places, "SETTLED_S", 0.0)
    nodes[0] = again(tmp_path, 0)
    try:
        nodes[0].take_over()
        assert not is_to_hand_over(tmp_path, 0, 2), "node 1 has its place back before"
        nodes[1].close()
        nodes[0].take_over()
        assert is_to_hand_over(tmp_path, 0, 2)
    finally:
        nodes[0].close()


def test_servers_move_to_a_spare_that_is_made_their_home_and_back_once_it_leaves(
    nodes: list[NodePlaces], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_places, "SETTLED_S", 0.0)
    spare = NodePlaces(tmp_path, None, NUM_NODES)
    try:
        assert spare.make_home(1) == [0]
        views = Views(tmp_path, 0)
        assert taken([spare]) == {}
        assert is_to_hand_over(tmp_path, 0, FIRST.head)
        assert views.promote(FIRST.number)
        assert taken([*nodes, spare]) == {spare.node: [(0, 2)]}
        assert spare.has_brought_home(0, 2)
        assert views.enlist(2, 2)
        assert taken([spare]) == {}
        assert is_to_hand_over(tmp_path, 0, FIRST.replica)
        assert views.promote(3)
        spare.leave()
        assert nodes[1].claim(0, 3)
        assert views.enlist(4, 3)
        assert is_to_hand_over(tmp_path, 0, 2)
        assert views.promote(5)
        assert taken([*nodes, spare]) == {0: [(0, 4)]}
        assert nodes[0].has_brought_home(0, 4)
        assert not spare.is_needed()
    finally:
        spare.close()


def test_spares_take_servers_from_the_nodes_that_have_most(tmp_path: Path) -> None:
    """Of four servers node 0 has three."""
    with ExitStack() as running:
        nodes = [NodePlaces(tmp_path, node, NUM_NODES) for node in range(2)]
        for node in nodes:
            running.callback(node.close)
        spares = [NodePlaces(tmp_path, None, NUM_NODES) for _ in range(2)]
        for spare in spares:
            running.callback(spare.close)
        assert spares[0].make_home(1) is None, "no server has begun"
        for rank in range(NUM_NODES):
            assert nodes[rank == 3].claim(rank, FIRST.head)
        assert spares[0].make_home(1) == [0]
        assert spares[1].make_home(2) == [1, 2], "one of node 0, which has two, and then of the first of those with one"
        assert spares[1].make_home(2) == [1, 2]
        assert spares[0].make_home(9) == list(range(NUM_NODES))


def test_of_two_spares_that_choose_the_same_server_one_has_it(nodes: list[NodePlaces], tmp_path: Path) -> None:
    claims = PlaceClaims(tmp_path, 0)
    known = claims.homes(FIRST.head)
    assert claims.move_home(4, known)
    assert not claims.move_home(5, known)
    assert claims.homes(FIRST.head) == [0, 4]
    assert claims.homes(FIRST.replica) == [1]
    assert nodes[0].claim(0, 2)
