"""Nodes are lost, leave, come again and take places over in every order: a process is started once.

Servers are whole again, and where all nodes are there, on the nodes on which they were at the beginning, but for those
that move to spares. Spares come, and leave or are lost as others.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.job.views import FIRST, NO_PROCESS, NUM_PLACES, View, Views
from paceline.launch.rendezvous import node_places
from paceline.launch.rendezvous.node_places import NodePlaces, is_to_hand_over, on_other_nodes

NUM_NODES = 4
ALL = range(NUM_NODES)  # servers, and nodes at the start: one begins on each, and has its replica on the next
NUM_SPARES = 3
LATER = st.integers(1, NUM_NODES + NUM_SPARES - 1)  # nodes but for the first
ROUNDS = 16  # in which everything that is due happens


class Places(RuleBasedStateMachine):
    """Processes are numbers here, which do what the views of their servers let them do."""

    def __init__(self) -> None:
        super().__init__()
        self.undo = ExitStack()
        self.undo.callback(pytest.MonkeyPatch.undo, patch := pytest.MonkeyPatch())
        patch.setattr(node_places, "SETTLED_S", 0.0)
        self.folder = Path(self.undo.enter_context(TemporaryDirectory()))
        self.nodes = [NodePlaces(self.folder, node, NUM_NODES) for node in ALL]
        self.views = [Views(self.folder, rank) for rank in ALL]
        self.alive, self.leaving, self.lost = set(ALL), set[int](), set[int]()
        self.homes = [[rank] for rank in ALL]  # of servers: where they began, and the spares that they have moved to
        self.running: dict[tuple[int, int], int] = {}  # the node of each process of each server
        for rank in ALL:
            assert self.views[rank].change(FIRST)
            self.begin(rank, FIRST.head, rank)
            self.begin(rank, FIRST.replica, (rank + 1) % NUM_NODES)

    def begin(self, rank: int, process: int, node: int) -> None:
        """Start a process where its node may claim it."""
        if self.nodes[node].claim(rank, process):
            self.note_started(rank, process, node)

    def note_started(self, rank: int, process: int, node: int) -> None:
        assert (rank, process) not in self.running, "a process is started twice"
        assert node in self.alive - self.leaving
        self.running[rank, process] = node
        self.views[rank].published(process).touch()

    def view(self, rank: int) -> View:
        view = self.views[rank].newest()
        assert view is not None
        return view

    def note_ended(self, rank: int) -> None:
        """Have what is left of a server notice that one of its processes has ended."""
        view = self.view(rank)
        has_head, has_replica = ((rank, process) in self.running for process in (view.head, view.replica))
        if not has_head and not has_replica:
            self.lost.add(rank)
        elif not has_head:
            assert self.views[rank].promote(view.number)
        elif view.replica != NO_PROCESS and not has_replica:
            assert self.views[rank].dismiss(view.number)

    @rule(node=LATER)
    def lose(self, node: int) -> None:
        """A node is gone with all that runs there; the first has the folder."""
        if node in self.alive:
            self.alive.discard(node)
            self.nodes[node].close()
            self.running = {process: at for process, at in self.running.items() if at != node}
            for rank in set(ALL) - self.lost:
                self.note_ended(rank)

    @rule(rank=st.sampled_from(ALL), which=st.booleans())
    def kill(self, rank: int, which: bool) -> None:
        """A process that serves or is the replica is killed, and its node starts another, if the place is its own."""
        view = self.view(rank)
        process = view.head if which else view.replica
        node = self.running.pop((rank, process), None)
        if node is not None and rank not in self.lost:
            self.note_ended(rank)
            self.begin(rank, process + NUM_PLACES, node)

    @rule(node=st.one_of(st.just(0), LATER))
    def leave(self, node: int) -> None:
        if node in self.alive:
            self.nodes[node].leave()
            self.leaving.add(node)

    @rule(node=st.integers(1, NUM_NODES - 1))
    def come_again(self, node: int) -> None:
        if node not in self.alive:
            self.nodes[node] = NodePlaces(self.folder, node, NUM_NODES)
            self.alive.add(node)
            self.leaving.discard(node)
            self.begin(node, FIRST.head, node)  # which are claimed
            self.begin((node - 1) % NUM_NODES, FIRST.replica, node)

    @rule(num_servers=st.integers(0, 2))
    def a_spare_comes(self, num_servers: int) -> None:
        if len(self.nodes) < NUM_NODES + NUM_SPARES:
            self.nodes.append(NodePlaces(self.folder, None, NUM_NODES))
            assert self.nodes[-1].node == len(self.nodes) - 1
            self.alive.add(self.nodes[-1].node)
            here = self.nodes[-1].make_home(num_servers)
            assert here is not None
            assert len(here) == num_servers
            for rank in here:
                self.homes[rank].append(self.nodes[-1].node)

    @rule(node=st.one_of(st.just(0), LATER))
    def take_over(self, node: int) -> None:
        if node in self.alive:
            for rank, process in self.nodes[node].take_over():
                self.note_started(rank, process, node)

    @rule(rank=st.sampled_from(ALL))
    def enlist(self, rank: int) -> None:
        """The head gives all to the newest process that has come, which ends the replica before it."""
        view = self.view(rank)
        come = on_other_nodes(self.folder, rank, view.head, self.views[rank].candidates())
        process = next((process for process in come if (rank, process) in self.running), None)
        if rank not in self.lost and process is not None:
            assert self.views[rank].enlist(view.number, process)
            self.running.pop((rank, view.replica), None)

    @rule(rank=st.sampled_from(ALL))
    def hand_over(self, rank: int) -> None:
        view = self.view(rank)
        if rank not in self.lost and is_to_hand_over(self.folder, rank, view.head):
            assert self.views[rank].promote(view.number)
            self.begin(rank, view.head + NUM_PLACES, self.running.pop((rank, view.head)))

    @invariant()
    def the_two_processes_of_a_server_are_on_two_nodes(self) -> None:
        for rank in set(ALL) - self.lost:
            view = self.view(rank)
            assert self.running[rank, view.head] in self.alive
            if view.replica != NO_PROCESS:
                assert self.running[rank, view.replica] != self.running[rank, view.head]

    def teardown(self) -> None:
        """Let everything happen that is due: servers are whole then, on nodes that stay, if there are two."""
        try:
            for _ in range(ROUNDS):
                for node in range(len(self.nodes)):
                    self.take_over(node)
                for index in ALL:
                    self.enlist(index)
                    self.hand_over(index)
            staying = self.alive - self.leaving
            for rank in set(ALL) - self.lost if len(staying) > 1 else ():
                view = self.view(rank)
                homes = {self.running[rank, view.head], self.running[rank, view.replica]}
                assert len(homes) == NUM_PLACES
                assert homes <= staying
                if staying >= set(ALL):
                    home = [node for node in self.homes[rank] if node in staying][-1]
                    assert homes == {home, (rank + 1) % NUM_NODES}, "what came again has what it had"
                assert not any(self.nodes[node].is_needed() for node in self.alive & self.leaving if not self.lost)
        finally:
            for node in self.alive:
                self.nodes[node].close()
            self.undo.close()


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
