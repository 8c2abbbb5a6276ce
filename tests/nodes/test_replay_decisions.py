"""What a server decides by the time, or by what is read, is done again as well: merging by a quorum, rows that go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nodes.cluster import Cluster, address_of, make_transport, open_table, read_values, table
from tests.nodes.own_functions import HERE as OWN_FUNCTIONS

from paceline.core.settings import ServerSettings
from paceline.errors import PacelineError
from paceline.job.addresses import SPEC_NAME
from paceline.job.spec import ClusterSpec
from paceline.launch.replaying import ValueNotFinite, replay_server, tensors_of
from paceline.observe.trace import Trace
from paceline.server.node import ServerNode
from paceline.server.record_file import RecordFile, digests, read_frames, record_path
from paceline.server.record_follower import Moment
from paceline.server.replay import Diverged
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_messages import CODEC, Looked
from paceline.update.named_rules import SGD, Merging
from paceline.update.rows.spec import Lifecycle, RowTableSpec
from paceline.wire.requests import SaveState
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable
from paceline.worker.table_calls import TableCalls

NUM_WORKERS = 3
NUM_CLOCKS = 12
LEASE_S = 60.0
KILLED_AT = 5  # clocks that the worker has finished which is killed
NUMEL = 65

Work = Callable[[WorkerNode, int], None]


class Killed(BaseException):
    """Ends the thread of a server before it takes its next item."""


class RecordedServer(ServerNode):
    """A server that is killed once it has been told so many things, and says what its tables were then.

    It is killed between two items of its queue: within one, a user's function, which may raise anything, would stop the
    kill, and tables are half changed.
    """

    kill_after: int = 0
    num_told: int = 0
    left: dict[str, str] | None = None

    def _handle_item(self, item: object | None) -> bool:
        if 0 < self.kill_after <= self.num_told:
            self.left = digests(self._tables, self._core.clock_of)
            raise Killed
        return super()._handle_item(item)

    def _write_down(self, written: Any, now: float) -> None:
        self.num_told += 1
        super()._write_down(written, now)

    def live(self) -> None:
        try:
            self.run()
        except Killed:
            assert self.left is not None


@dataclass
class Job:
    """Workers of a job whose servers are recorded; worker 1 is killed, and comes back, if nothing else is."""

    servers: Cluster
    nodes: list[RecordedServer]
    lost: list[BaseException] = field(default_factory=list[BaseException])

    def run(self, work: Work) -> None:
        threads = [threading.Thread(target=self._live, args=(rank, work), daemon=True) for rank in range(NUM_WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LEASE_S)
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"
        assert not self.lost, self.lost

    def _live(self, rank: int, work: Work) -> None:
        try:
            if rank == 1:
                self._live_twice(work)
            else:
                with self.servers.joined(rank) as node:
                    for clock in range(NUM_CLOCKS):
                        work(node, clock)
                    node.leave()
        except PacelineError as error:
            if not any(node.kill_after for node in self.nodes):
                self.lost.append(error)
        except BaseException as error:
            self.lost.append(error)

    def _live_twice(self, work: Work) -> None:
        with self.servers.joined(1) as node:  # which does not leave
            for clock in range(KILLED_AT):
                work(node, clock)
        for server in self.nodes:
            server.report_death(1, 0, "its process ended")
        with self.servers.joined(1, incarnation=1) as node:
            for clock in range(KILLED_AT, NUM_CLOCKS):
                work(node, clock)
            node.leave()


@contextmanager
def recorded(run_dir: Path, kill_after: tuple[int, ...]) -> Iterator[Job]:
    """Run a server for each number, which is killed when it has been told so many things; 0: not at all."""
    run_dir.mkdir(mode=0o700)
    num = len(kill_after)
    spec = ClusterSpec(job="nodes", num_workers=NUM_WORKERS, num_servers=num, transport="shm", run_dir=str(run_dir))
    spec.write(run_dir / SPEC_NAME)
    transport, told = make_transport("shm", run_dir), list[str]()
    listeners = [transport.listen(address_of("shm", run_dir, rank)) for rank in range(num)]
    addresses = tuple(listener.address for listener in listeners)
    nodes: list[RecordedServer] = []
    for rank, listener in enumerate(listeners):
        settings = ServerSettings(rank, num, workers=tuple(range(NUM_WORKERS)), lease_s=LEASE_S, retry_s=0.05)
        record = ReplicaLink(record=RecordFile(record_path(run_dir, rank), 1 << 30, told.append))
        node = RecordedServer(
            settings, listener, transport, lambda: addresses, Trace(None), checks_memory=True, replica=record
        )
        node.kill_after = kill_after[rank]
        nodes.append(node)
    threads = [threading.Thread(target=node.live, daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        reconnect_s = 1.0 if any(kill_after) else LEASE_S
        yield Job(Cluster(transport, [*nodes], addresses, LEASE_S, reconnect_s=reconnect_s), nodes)
    finally:
        for node in nodes:
            node.stop()
        for thread in threads:
            thread.join(LEASE_S)
        assert not any(thread.is_alive() for thread in threads), "a server hangs"
    assert told == [], "a record has ended early"


def merging(grace_s: float, node: WorkerNode, clock: int) -> None:
    """Push to a table that merges by a quorum, read it, and look at it otherwise: each may find that a merge is due."""
    rule = Merging(SGD(lr=0.1, momentum=0.9), quorum=2, num_workers=NUM_WORKERS, grace_s=grace_s)
    spec = table("merged", NUMEL, "asynchronous", rule=rule)
    if "merged" not in node._tables:
        open_table(node, spec, torch.linspace(-1, 1, NUMEL))
    rank, seen = node.settings.sender.worker, torch.empty(NUMEL)
    read_values(node, "merged", seen)
    generator = torch.Generator().manual_seed(100 * rank + clock)
    for _ in range(1 + rank):
        node.client("merged").push(seen * 0.5 + torch.randn(NUMEL, generator=generator), count=1.0)
    node.tick()
    if clock % 4 == rank:
        node.rpc.call_all(lambda number: SaveState(number, "merged"), "the state")
    if clock % 5 == rank:
        TableCalls(node, "merged").call(f"{OWN_FUNCTIONS}:halve", {}, exact=False)


def rows(policy: str, life: Lifecycle, node: WorkerNode, clock: int) -> None:
    """Push to rows that come and go, and read others, some from the cache: what is read stays longer."""
    spec = RowTableSpec("rows", 2, "float32", SGD(lr=0.1, momentum=0.5), policy, "sum", "reject", life=life)
    if "rows" not in node._tables:
        RowClient.open(node.context, spec, CacheOptions(keep=True))
    client = node.client("rows")
    assert isinstance(client, RowClient)
    mine = RowTable(spec, client, node, StepMetrics(Trace(None), 0))
    generator = torch.Generator().manual_seed(100 * node.settings.sender.worker + clock)
    ids = torch.randint(-20, 20, (12,), generator=generator)
    mine.push(ids[:6], torch.randn(6, 2, generator=generator))
    node.tick()
    mine.pull(ids[4:10])
    mine.pull(ids[8:])


LIVES = {
    "expiring": Lifecycle(expire_after=2, floor=4),
    "least recently used": Lifecycle(max_rows=9, evict="lru"),
    "least often used": Lifecycle(max_rows=9, evict="lfu", admit_after=2),
    "admitted": Lifecycle(admit_after=2, expire_after=3),
}


def test_a_look_at_values_merges_nothing(tmp_path: Path) -> None:
    with recorded(tmp_path / "run", (0,)) as job:
        job.run(partial(merging, 0.004))
    num_kept: list[int] = []

    def look(moment: Moment) -> str:
        if "merged" in moment.tables:
            num_kept.append(moment.tables["merged"].num_kept)
            tensors_of(moment, "merged")
            assert moment.tables["merged"].num_kept == num_kept[-1]
        return ValueNotFinite().met(moment)

    assert replay_server(tmp_path / "run", 0, look).is_proved
    assert max(num_kept) > 0


def check(work: Work, run_dir: Path, kill_after: tuple[int, ...]) -> list[list[object]]:
    """Compare replays with servers, and return what these were told."""
    with recorded(run_dir, kill_after) as job:
        job.run(work)
    for rank, node in enumerate(job.nodes):
        replayed = replay_server(run_dir, rank)
        assert replayed.digests, "no table"
        if kill_after[rank]:
            assert node.left is not None, "it was not killed"
            assert (replayed.is_proved, replayed.digests) == (False, node.left)
        elif not any(kill_after):
            assert replayed.is_proved
    return [
        [CODEC.decode(header) for header, _, _ in read_frames(record_path(run_dir, rank), with_bodies=False)]
        for rank in range(len(kill_after))
    ]


@pytest.mark.parametrize("grace_s", [0.0, 0.004])
def test_merges_by_a_quorum_are_done_again_where_a_worker_is_killed(grace_s: float, tmp_path: Path) -> None:
    check(partial(merging, grace_s), tmp_path / "run", (0, 0))


@pytest.mark.parametrize("kill_after", [40, 67, 90])
def test_merges_by_a_quorum_are_done_again_up_to_where_a_server_is_killed(kill_after: int, tmp_path: Path) -> None:
    check(partial(merging, 0.004), tmp_path / "run", (kill_after,))


@pytest.mark.parametrize("policy", ["bsp", "ssp:2", "essp:2", "asynchronous"])
@pytest.mark.parametrize("life", LIVES)
def test_rows_that_go_are_gone_again_where_a_worker_is_killed(policy: str, life: str, tmp_path: Path) -> None:
    told = check(partial(rows, policy, LIVES[life]), tmp_path / "run", (0, 0))
    assert all(any(isinstance(frame, Looked) for frame in frames) for frames in told)


def test_rows_in_files_are_the_same_again_and_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    life = Lifecycle(expire_after=3, memory_bytes=9 << 20, spill=str(spill))
    check(partial(rows, "ssp:2", life), tmp_path / "run", (0, 0))
    spill.rmdir()
    with pytest.raises(Diverged, match=r"'rows' of the head cannot be declared here: .*No such file or directory"):
        replay_server(tmp_path / "run", 0)


@pytest.mark.parametrize("kill_after", [50, 77, 100])
def test_rows_that_go_are_gone_again_up_to_where_a_server_is_killed(kill_after: int, tmp_path: Path) -> None:
    check(partial(rows, "ssp:2", LIVES["expiring"]), tmp_path / "run", (kill_after,))
