"""A server tells of a worker that it gives up, where others go on without it."""

from pathlib import Path
from queue import SimpleQueue

from tests.nodes.client import member
from tests.nodes.cluster import cluster

PATIENCE_S = 30.0
LEASE_S = 0.05


def test_a_worker_that_does_not_come_back_is_told_of_once_and_the_last_one_is_not(tmp_path: Path) -> None:
    told: SimpleQueue[tuple[int, str]] = SimpleQueue()
    with cluster("memory", tmp_path, num_servers=1, lease_s=LEASE_S) as servers:
        [server] = servers.servers
        server.note_given_up = lambda worker, reason: told.put((worker, reason))
        with member(servers, 0):
            with member(servers, 1):
                pass
            assert told.get(timeout=PATIENCE_S) == (1, "it did not come back within 0.05 s")
    assert told.empty()


def test_a_worker_whose_next_life_is_there_is_not_told_of(tmp_path: Path) -> None:
    told: SimpleQueue[tuple[int, str]] = SimpleQueue()
    with cluster("memory", tmp_path, num_servers=1) as servers:
        servers.servers[0].note_given_up = lambda worker, reason: told.put((worker, reason))
        with member(servers, 0), member(servers, 1), member(servers, 1, incarnation=1):
            pass
    assert told.empty()
