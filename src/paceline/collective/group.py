"""Process groups of torch among all workers of a job, with deadlines and errors that name the failed worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from paceline.collective.failures import LEFT, STAY_ADVICE, FailureReports, Liveness, names
from paceline.collective.meeting import FarAccess, MemberAddresses, Offer, can_meet
from paceline.collective.process_group import OwnGroup
from paceline.collective.signature import NUM_WORDS, CallSignature, require_same
from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.job.carriers import CARRIERS
from paceline.job.machines import LOOPBACK
from paceline.torch_private import FileStore, HashStore, PrefixStore, ProcessGroupGloo, Store, gloo_backend, group_over
from paceline.wire.messages import Hello
from paceline.wire.requests import Barrier
from paceline.worker.node import WorkerNode
from paceline.worker.waits import About


def meeting_address(server: str, *, plain: bool = False) -> str:
    """Return this machine's address on the route to a server, so that calls use the network that pushes use.

    Args:
        server: its address.
        plain: whether collective calls, which are neither encrypted nor authenticated, may leave the machine.

    Raises:
        UsageError: they would leave the machine, and may not.

    >>> meeting_address("tcp://127.0.0.1:40123"), meeting_address("shm:///run/job/server-0.sock")
    ('127.0.0.1', '127.0.0.1')
    """
    if not server.startswith("tcp://"):
        return LOOPBACK
    host, _, port = server.removeprefix("tcp://").rpartition(":")
    there = ip_address(host.strip("[]"))
    with socket.socket(socket.AF_INET if there.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.connect((str(there), int(port)))  # sends nothing
        own = ip_address(str(probe.getsockname()[0]))
    if own.is_loopback:
        return str(own) if own.version == 4 else LOOPBACK
    if not plain:
        raise UsageError(
            "collective calls (all-reduce, fsdp, stages and tensor ranks of a model, patterns) are between machines "
            f"here, from {own} on, and Gloo, which carries them, does not encrypt: others on the network could "
            "read and change them. Give the job certificates and do not ask for Gloo, let a parameter server carry the "
            "updates, or set PACELINE_PLAIN_COLLECTIVES=1 where all of the network is trusted"
        )
    return str(own)


STORE_NAME: Final = "collectives.store"
NEVER: Final = timedelta(days=10_000)  # torch's timeouts count time in which a job is suspended; ours do not
_HEADER_TAG: Final = 1
_ABORT_TAG: Final = 2


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of a job, as one of them sees it.

    Args:
        run_dir: the folder of the job; None for a worker that is alone.
        plain: whether collective calls may travel between machines, unencrypted.
        apart: why workers cannot call each other, and what to do; empty where they can.
        gloo: whether collective calls go over Gloo on one machine, too.
    """

    rank: int
    size: int
    node: WorkerNode
    run_dir: Path | None
    plain: bool = False
    apart: str = ""
    gloo: bool = False
    liveness: Liveness = field(init=False)

    def __post_init__(self) -> None:
        """Create the liveness files of the workers."""
        object.__setattr__(self, "liveness", Liveness(self.run_dir, self.rank))

    @property
    def timeout_s(self) -> float:
        """The deadline of a wait, in seconds."""
        return self.node.waits.limit_s

    @property
    def address(self) -> str:
        """The address for connections of the others; raises UsageError if they may not travel between machines."""
        return meeting_address(self.node.addresses[0], plain=self.plain)

    @property
    def far_access(self) -> FarAccess | None:
        """How workers on other machines reach this one; None where the carrier of the job joins those of one machine.

        Listening there fails where it would have to be encrypted, and the job has no certificates.
        """
        carrier, sender = CARRIERS.get(self.node.transport.name), self.node.settings.sender
        if carrier is None or self.run_dir is None or not self.node.addresses[0].startswith("tcp://"):
            return None
        host = meeting_address(self.node.addresses[0], plain=True)
        hello = Hello("worker", self.rank, sender.incarnation, sender.generation)
        return FarAccess(self.node.transport, carrier.free_address(host, str(self.run_dir), "group"), hello)

    @property
    def others(self) -> list[int]:
        """The ranks of the others."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def store(self, group: str) -> Store:
        """Return the store in which the members of a group find each other: a file in the folder of the job.

        Raises:
            UsageError: the workers cannot call each other.
        """
        if self.apart:
            raise UsageError(f"worker {self.rank} has no other workers to call: {self.apart}")
        store = HashStore() if self.run_dir is None else FileStore(str(self.run_dir / STORE_NAME), -1)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return PrefixStore(group, store)

    def absent(self, store: Store) -> list[int]:
        """Return the ranks that have not connected to a group."""
        return [rank for rank in range(self.size) if not store.check([f"here/{rank}"])]


@dataclass(slots=True)
class Group:
    """Connections between all workers, for one call at a time.

    A failure ends the group for good: all connections are closed, so that no worker waits in vain.
    """

    worker_set: WorkerSet
    name: str
    failure_reports: FailureReports
    process_group: ProcessGroup
    _words: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Allocate memory for the signatures of all workers."""
        self._words = [torch.zeros(NUM_WORDS, dtype=torch.int64) for _ in range(self.worker_set.size)]

    @staticmethod
    def connect(worker_set: WorkerSet, name: str) -> Group:
        """Connect to all other workers; blocks until each has called this too.

        Raises:
            UsageError: connections would be between machines, and may not; or the workers were not started as one job.
            PeerError: a worker has left the job or has died, or was restarted after it had connected.
            DeadlineExceeded: not all workers have connected in time.
        """
        store = worker_set.store(name)
        if store.add(f"here/{worker_set.rank}", 1) > 1:
            raise PeerError(
                f"worker {worker_set.rank} was among those of '{name}' in an earlier life: a worker that was started "
                "again cannot join the collective calls of the others. Start the job again."
            )
        worker_set.liveness.start()
        rank, size, timeout = worker_set.rank, worker_set.size, timedelta(seconds=worker_set.timeout_s)
        connected = connect_members(
            worker_set, store, rank, size, timeout, lambda: _meet(worker_set, store, name), at_once=True
        )
        reports = FailureReports(store, rank, worker_set.liveness)
        return Group(worker_set, name, reports, group_of(connected, store, rank, size))

    def agree(self, call: CallSignature, deadline_s: float) -> list[CallSignature]:
        """Exchange signatures of a call with all workers and return them by rank; blocks until all have arrived.

        Receives from each worker separately, so that errors name the missing ones.

        Args:
            call: the call of this worker.
            deadline_s: the deadline, in seconds that this worker has run.

        Raises:
            UsageError: another worker makes another call. The group stays usable.
            PeerError: a worker is gone, or too late; the group has failed.
        """
        words, began_s = call.words(), self.worker_set.node.waits.ran_s
        if isinstance(self.process_group, OwnGroup):
            with self._explained(call, deadline_s):
                self._words = self.process_group.agree(words)
            return self._same(call)
        self._words[self.worker_set.rank].copy_(words)
        missing: dict[int, str] = {}
        under_way: list[tuple[int, Work]] = []
        for rank in self.worker_set.others:
            try:
                under_way.append((rank, self.process_group.recv([self._words[rank]], rank, _HEADER_TAG)))
                under_way.append((rank, self.process_group.send([words], rank, _HEADER_TAG)))
            except RuntimeError as error:
                missing[rank] = str(error)
        with self._waiting(call, deadline_s):
            for rank, work in under_way:
                try:
                    work.wait(NEVER)
                except RuntimeError as error:
                    missing.setdefault(rank, str(error))
        if missing:
            waited_s = deadline_s - began_s if self.worker_set.node.waits.ran_s >= deadline_s else None
            raise self.failure_reports.explain(call.where, sorted(missing), waited_s, next(iter(missing.values())))
        return self._same(call)

    def _same(self, call: CallSignature) -> list[CallSignature]:
        """Return the calls of all workers; raises UsageError unless all are the same."""
        calls = [CallSignature.read(told) for told in self._words]
        require_same(call, calls, self.worker_set.rank)
        return calls

    def run(
        self, begin: Callable[[ProcessGroup, timedelta], Work | None], call: CallSignature, deadline_s: float
    ) -> None:
        """Run a collective of torch, which `begin` starts; blocks until this worker's part is done.

        Raises:
            PeerError: a worker has died, or is suspended; the group has failed.
        """
        with self._explained(call, deadline_s):
            work = begin(self.process_group, NEVER)
            if work is not None:
                work.wait(NEVER)

    @contextmanager
    def _explained(self, call: CallSignature, deadline_s: float) -> Generator[None]:
        """Wait in a block for other workers, and explain connections that fail meanwhile."""
        began_s, group = self.worker_set.node.waits.ran_s, self.process_group
        try:
            with self._waiting(call, deadline_s):
                yield
        except (RuntimeError, PeerError) as error:
            late = self.worker_set.node.waits.ran_s >= deadline_s
            suspects = list(group.peers.missing) if isinstance(group, OwnGroup) else []
            detail = "" if suspects else str(error)
            raise self.failure_reports.explain(
                call.where, suspects or self.worker_set.others, deadline_s - began_s if late else None, detail
            ) from error

    def _waiting(self, call: CallSignature, deadline_s: float) -> AbstractContextManager[object]:
        """Return a context that counts as a wait, and closes all connections at the deadline."""
        waits = self.worker_set.node.waits
        about = About(f"{self.name} {call.pattern}", workers=tuple(self.worker_set.others))
        return waits.during(f"{self.name}, {call.where}", about, deadline_s - waits.ran_s, self.abort)

    def leave(self, *, politely: bool) -> None:
        """Report that this worker leaves, and close all connections; Gloo closes its own with the last reference."""
        self.failure_reports.write(LEFT if politely else "has ended with an error")
        if isinstance(self.process_group, OwnGroup):
            self.process_group.shutdown()
        elif not politely:
            self.abort()

    def abort(self) -> None:
        """Close all connections, so that calls waiting on other threads fail at once."""
        if isinstance(self.process_group, OwnGroup):
            self.process_group.abort()
            return
        for other in self.worker_set.others[:1]:
            try:  # torch closes every connection of a group when a wait times out
                self.process_group.recv([torch.zeros(1)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return


def _meet(worker_set: WorkerSet, store: Store, name: str) -> None:
    """Wait until all workers have come to a group."""
    try:
        worker_set.node.rpc.call(0, lambda number: Barrier(number, f"group {name}"), f"all workers to come to '{name}'")
    except DeadlineExceeded as error:
        raise DeadlineExceeded(f"{error}: {names(worker_set.absent(store))} did not come") from error
    absent = worker_set.absent(store)
    if absent:
        raise PeerError(
            f"worker {worker_set.rank}: {names(absent)} has left the job or has died before it came to '{name}'. "
            f"{STAY_ADVICE}"
        )


def connect_members(
    worker_set: WorkerSet,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    meet: Callable[[], None] = lambda: None,
    *,
    at_once: bool = False,
) -> OwnGroup | ProcessGroupGloo:
    """Connect a group of workers, between machines by the carrier of the job, else by Gloo. Blocks until all have.

    Args:
        worker_set: all workers.
        store: of the group.
        rank: of this worker in the group.
        size: of the group.
        timeout: of Gloo's calls; ours are ended by their callers.
        meet: blocks until all workers have come.
        at_once: make calls in the thread of their caller, where that is to be chosen.

    Raises:
        UsageError: connections would be between machines and neither encrypted nor allowed in plain.
        PeerError: a worker is gone, or has not come in time.
    """
    folder = None if worker_set.gloo else worker_set.run_dir
    offer = Offer() if folder is None else Offer.make(folder, worker_set.far_access)
    try:
        store.set(f"offer/{rank}", offer.told.text)
        if offer.told == MemberAddresses():
            _ = worker_set.address  # which may be refused: before the others wait
        meet()
        told = [MemberAddresses.read(store.get(f"offer/{other}").decode()) for other in range(size)]
        if can_meet(told):
            return OwnGroup(*offer.accept(rank, told, worker_set.timeout_s), NEVER.total_seconds(), at_once=at_once)
    finally:
        offer.close()
    return connect_gloo(store, rank, size, worker_set.address, timeout)


def connect_gloo(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> ProcessGroupGloo:
    """Return Gloo's connections between all members, at an address of this machine; blocks until all are connected."""
    try:
        return gloo_backend(store, rank, size, address, timeout)
    except RuntimeError as error:
        raise PeerError(f"worker {rank} could not connect to all other workers: {error}") from error


def group_of(backend: OwnGroup | ProcessGroupGloo, store: Store, rank: int, size: int) -> ProcessGroup:
    """Return a process group that is not registered globally: a process may have several."""
    if isinstance(backend, OwnGroup):
        return backend
    return group_over(backend, store, rank, size)
