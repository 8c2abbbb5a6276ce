"""On which node each process of a server runs, where servers have replicas; and on which other one once a node is gone.

A server has two places (`launch/replicas.py`), each on a node. The process that starts those of a node is its first
worker, and shows that it lives as workers do. When a node is gone and a server lacks a replica for that, the next node
that lives takes the place: it claims the number of the next process there. A claim is a file that can be made once, so
of several nodes that believe another gone one starts that process, and the one that was believed gone starts none.

A node that is about to leave says so by a file. Then the next node that stays takes its places as well: a replica there
is made before the one here ends, and a process here that serves has its replica serve.

The node that has started the first process in a place is the home of that place. A node that comes again gets back the
places that it is the home of: it claims their next processes, and asks what serves elsewhere to hand over to those.

A spare is a node without workers that comes while the job runs, with a number behind the others. It takes places that
come to it; and where it is told to, it makes itself the home of servers, which then move to it as to a node that has
come again. Once it is gone or leaves, their home is the one before.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final, final

from paceline.job.addresses import process_name
from paceline.job.folders import make_once, names_in
from paceline.job.views import FIRST, NO_PROCESS, NUM_PLACES, View, Views
from paceline.launch.rendezvous.liveness_lock import LifeWatch, LivenessLock, indices_in
from paceline.stopwatch import Stopwatch

ROLE: Final = "node"
LEAVING: Final = ".leaving"  # of the names of files by which nodes say that they are about to leave
HANDOVER: Final = ".handover-"  # of the names of files by which a server is asked to have its replica serve, by view
MAX_SPARES: Final = 1000  # that come at one moment
SETTLED_S: Final = 30.0  # a node has lived that takes part for good
SILENCE_S: Final = 15.0  # as long as a cut is waited for; a node that was believed gone too early costs a process


@final
class PlaceClaims:
    """Which node has started, or is about to start, each process of one server.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     claims = PlaceClaims(Path(folder), 0)
    ...     print(claims.claim(0, node=0), claims.claim(1, node=2), claims.claim(1, node=0), claims.claim(3, node=2))
    ...     print(claims.newest(place=1), claims.node_of(3))
    ...     print(claims.move_home(5, known=[0]), claims.homes(place=0), claims.homes(place=1))
    True True False True
    3 2
    True [0, 5] [2]
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Of the server with this rank; reads and writes nothing yet."""
        self._run_dir = run_dir
        self._prefix = f"{process_name(rank, 0)}.claim-"
        self._home_prefix = f"{process_name(rank, 0)}.home-"

    def claim(self, process: int, node: int) -> bool:
        """Have this node start a process unless another has claimed it; return whether it is to. Raises OSError."""
        return make_once(self._run_dir / f"{self._prefix}{process}", str(node).encode())

    def node_of(self, process: int) -> int:
        """Return the node that has claimed a process. Raises OSError where none has."""
        return int((self._run_dir / f"{self._prefix}{process}").read_text())

    def homes(self, place: int) -> list[int]:
        """Return the nodes that have come to be the home of one of the two places, in this order. Raises OSError."""
        first = self.node_of(place)
        if place != FIRST.head:
            return [first]
        num_moves = sum(name.startswith(self._home_prefix) for name in names_in(self._run_dir))
        moves = (self._run_dir / f"{self._home_prefix}{number}" for number in range(num_moves))
        return [first, *(int(move.read_text()) for move in moves)]

    def move_home(self, node: int, known: list[int]) -> bool:
        """Make a node the home of the place in which the server has begun to serve, after those that are `known`.

        Return whether no other node was faster. Raises OSError.
        """
        return make_once(self._run_dir / f"{self._home_prefix}{len(known) - 1}", str(node).encode())

    def newest(self, place: int) -> int:
        """Return the latest process that was claimed in one of the two places; the first one where none was."""
        names = (name for name in names_in(self._run_dir) if name.startswith(self._prefix))
        claimed = (int(name.removeprefix(self._prefix)) for name in names)
        return max((process for process in claimed if process % NUM_PLACES == place), default=place)


@final
class NodePlaces:
    """The places of servers that this node has, and comes to have. Used by the process that starts them.

    Args:
        run_dir: the folder of the job, which all nodes see.
        node: the number of this node; None for a spare, once all nodes with workers have come.
        num_servers: of the job.
    """

    def __init__(self, run_dir: Path, node: int | None, num_servers: int) -> None:
        """Show other nodes from now on that this one lives; raises UsageError when another process has its number."""
        self._run_dir = run_dir
        behind = len(indices_in(run_dir, ROLE))
        self._life = LivenessLock.acquire(run_dir, ROLE, node, MAX_SPARES, SILENCE_S, first=behind)
        self.node: Final = self._life.index
        self._ran = Stopwatch()
        (run_dir / _leaving_name(self.node)).unlink(missing_ok=True)  # of an earlier life
        self._life.start_heartbeat()
        self._claimed = set[tuple[int, int]]()  # in this life
        self._brought_home = set[tuple[int, int]]()  # of these, by servers: those that brought a place back to its home
        self._watches: dict[int, LifeWatch] = {}  # of the nodes that have come
        self._claims = [PlaceClaims(run_dir, rank) for rank in range(num_servers)]
        self._views = [Views(run_dir, rank) for rank in range(num_servers)]

    def claim(self, rank: int, process: int) -> bool:
        """Return whether this node is to start a process of a server: it stays, and no other has. Raises OSError."""
        if self.node in leaving_nodes(self._run_dir):
            return False
        self._claimed.add((rank, process))  # before it can be seen: a claim of this node that is not here is of before
        if self._claims[rank].claim(process, self.node):
            return True
        self._claimed.discard((rank, process))
        return False

    def make_home(self, num_servers: int) -> list[int] | None:
        """Make this node the home of so many servers, or of all; return which. They move here by and by.

        Each is taken from the node that is the home of most. None while some server has no process yet. Raises OSError.
        """
        staying = self._staying(leaving_nodes(self._run_dir))
        while True:
            try:
                known = [claims.homes(FIRST.head) for claims in self._claims]
            except FileNotFoundError:
                return None
            homes = [_last_staying(nodes, staying) for nodes in known]
            here = [rank for rank, home in enumerate(homes) if home == self.node]
            if len(here) >= min(num_servers, len(homes)):
                return here
            counts = Counter(home for home in homes if home != self.node)
            fullest = max(counts, key=lambda node: (counts[node], -node))
            rank = homes.index(fullest)
            self._claims[rank].move_home(self.node, known[rank])  # another spare may be faster: all are looked at again

    def _home(self, rank: int, process: int, staying: dict[int, bool]) -> int:
        """Return the home of the place of this process. Raises OSError."""
        return _last_staying(self._claims[rank].homes(process % NUM_PLACES), staying)

    def take_over(self) -> list[tuple[int, int]]:
        """Claim the places that have come to this node; return by server the processes to start. Raises OSError.

        Servers that are to serve here again are asked to hand over. Call it every second or so.
        """
        leaving = leaving_nodes(self._run_dir)
        staying = self._staying(leaving)
        # Not before: while a server moves home, its one copy is here.
        is_settled = staying[self.node] and self._ran.elapsed_s() >= SETTLED_S
        for rank in range(len(self._views)) if is_settled else ():
            self._ask_for_handover(rank, staying)
        taken: list[tuple[int, int]] = []
        for rank in range(len(self._views)):
            try:
                process = self._due(rank, staying, leaving)
                if process is not None and self._take(rank, process, staying):
                    taken.append((rank, process))
            except OSError:
                if not taken:
                    raise
                break  # what is claimed has to be started; the next look meets the problem again
        return taken

    def _take(self, rank: int, process: int, staying: dict[int, bool]) -> bool:
        """Claim a process of a server, and note whether that brings its place home; return whether it is claimed."""
        is_home = self._home(rank, process, staying) == self.node  # first: behind a claim nothing may fail
        is_claimed = self.claim(rank, process)
        if is_claimed and is_home:
            self._brought_home.add((rank, process))
        return is_claimed

    def has_brought_home(self, rank: int, process: int) -> bool:
        """Return whether this node has claimed a process as its place came home."""
        return (rank, process) in self._brought_home

    def _staying(self, leaving: set[int]) -> dict[int, bool]:
        """Return for each node whether it lives, and is not about to leave; one that has just come may be missing."""
        for node in indices_in(self._run_dir, ROLE) - self._watches.keys():
            self._watches[node] = LifeWatch(self._run_dir, ROLE, node, SILENCE_S)
        living = {node: watch.is_taken() for node, watch in self._watches.items()}
        living[self.node] = True  # whatever a file server says of it
        return {node: lives and node not in leaving for node, lives in living.items()}

    def _due(self, rank: int, staying: dict[int, bool], leaving: set[int]) -> int | None:
        """Return the process of a server that this node is to start in the place of one of another node, if any."""
        view, claims = self._views[rank].newest(), self._claims[rank]
        if view is None:
            return None
        place, head = (view.head + FIRST.replica) % NUM_PLACES, claims.node_of(view.head)
        latest = claims.newest(place)
        holder = claims.node_of(latest)
        if head == self.node:  # the two processes of a server are on two nodes
            return None
        if holder == self.node and (rank, latest) not in self._claimed:  # its process went with an earlier life
            return latest + NUM_PLACES
        if holder != self.node and self._home(rank, place, staying) == self.node:
            return latest + NUM_PLACES
        if staying.get(holder, True) and holder != head:  # it starts another process itself
            return None
        if view.replica != NO_PROCESS and claims.node_of(view.replica) not in leaving:  # it may serve yet
            return None
        return latest + NUM_PLACES if next_node(head, staying) == self.node else None

    def _ask_for_handover(self, rank: int, staying: dict[int, bool]) -> None:
        """Ask a process to have its replica serve where that brings a place home.

        That is so where the replica has brought a place home that serves from the start; and where the place of what
        serves elsewhere is of this node, which can have it once it is that of a replica.
        """
        view, claims = self._views[rank].newest(), self._claims[rank]
        if view is None or view.replica == NO_PROCESS:
            return
        serves_again = view.replica % NUM_PLACES == FIRST.head and (rank, view.replica) in self._brought_home
        head, replica = claims.node_of(view.head), claims.node_of(view.replica)
        home_of_replica = self._home(rank, view.replica, staying)
        is_settled = replica == home_of_replica or not staying.get(home_of_replica, True)
        is_apart = self.node not in (head, replica) and is_settled
        comes_back = self._home(rank, view.head, staying) == self.node and is_apart
        if serves_again or comes_back:
            ask_for_handover(self._run_dir, rank, view)

    def leave(self) -> None:
        """Have this node's places move to others, as it is about to leave. Raises OSError."""
        make_once(self._run_dir / _leaving_name(self.node), b"")

    def is_needed(self) -> bool:
        """Return whether a process of this node serves, or is a replica that another node can have. Raises OSError."""
        staying = self._staying(leaving_nodes(self._run_dir))
        for views, claims in zip(self._views, self._claims, strict=True):
            view = views.newest()
            if view is None:
                continue
            head = claims.node_of(view.head)
            is_replica = view.replica != NO_PROCESS and claims.node_of(view.replica) == self.node
            if head == self.node or (is_replica and next_node(head, staying) is not None):
                return True
        return False

    def close(self) -> None:
        """Have other nodes take this one for gone. May be repeated."""
        self._life.release()


def _last_staying(homes: list[int], staying: dict[int, bool]) -> int:
    """Return the last of the homes of a place that stays; the first one where none does."""
    return next((home for home in reversed(homes) if staying.get(home, True)), homes[0])


def leaving_nodes(run_dir: Path) -> set[int]:
    """Return the nodes that are about to leave."""
    found = (name for name in names_in(run_dir) if name.endswith(LEAVING))
    return {int(name.removeprefix(f"{ROLE}-").removesuffix(LEAVING)) for name in found}


def ask_for_handover(run_dir: Path, rank: int, view: View) -> None:
    """Ask the process that serves in this view to have its replica serve; in another view it means nothing."""
    make_once(run_dir / _handover_name(rank, view.number), b"")


def is_to_hand_over(run_dir: Path, rank: int, process: int) -> bool:
    """Return whether a process that serves is to have its replica serve.

    It is where its node is about to leave, and that of its replica is not, or a node wants a place back. Raises
    OSError.
    """
    view, claims = Views(run_dir, rank).newest(), PlaceClaims(run_dir, rank)
    if view is None or view.head != process or view.replica == NO_PROCESS:
        return False
    if _handover_name(rank, view.number) in names_in(run_dir):
        return True
    leaving = leaving_nodes(run_dir)
    return bool(leaving) and claims.node_of(process) in leaving and claims.node_of(view.replica) not in leaving


def on_other_nodes(run_dir: Path, rank: int, process: int, others: list[int]) -> list[int]:
    """Return which of the other processes of a server are not on the node of this one. Raises OSError."""
    claims = PlaceClaims(run_dir, rank)
    return [other for other in others if claims.node_of(other) != claims.node_of(process)]


def _leaving_name(node: int) -> str:
    return f"{ROLE}-{node}{LEAVING}"


def _handover_name(rank: int, view: int) -> str:
    return f"{process_name(rank, 0)}{HANDOVER}{view}"


def next_node(node: int, living: dict[int, bool]) -> int | None:
    """Return the first node after this one, in a circle, that lives; None where no other does.

    >>> next_node(1, {0: True, 1: True, 2: False}), next_node(0, {0: True, 1: False, 2: False})
    (0, None)
    """
    others = sorted(other for other in living if other != node and living[other])
    return next((other for other in others if other > node), others[0] if others else None)
