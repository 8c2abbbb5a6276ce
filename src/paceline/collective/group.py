"""A process group of torch among all workers of a job: made when it is first used, and ended with the worker."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, ProcessGroupGloo, Store
from torch.distributed import ProcessGroup, Work

from paceline.collective.failures import FailureReports, names
from paceline.collective.liveness import Liveness
from paceline.collective.signature import NUM_WORDS, CallSignature, require_same
from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.wire.requests import Barrier
from paceline.worker.node import WorkerNode
from paceline.worker.waits import About

LOOPBACK: Final = "127.0.0.1"


def meeting_address(server: str, *, plain: bool = False) -> str:
    """Return the own address that leads to a server, so that calls take the line that pushes take.

    Args:
        server: its address.
        plain: whether what travels in calls may leave the machine, though it is neither encrypted nor authenticated.

    Raises:
        UsageError: it would, and may not.

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
            f"here, from {own} on, and Gloo, which carries them, does not encrypt: whoever is on the network could "
            "read and change them. Let a parameter server carry the updates, or set PACELINE_PLAIN_COLLECTIVES=1 where "
            "everybody on the network is trusted"
        )
    return str(own)


STORE_NAME: Final = "collectives.store"
NEVER: Final = timedelta(days=10_000)  # torch's own deadlines count time in which a job is stopped; ours do not
_HEADER_TAG: Final = 1
_ABORT_TAG: Final = 2


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers of a job, and how one of them meets the others.

    Args:
        run_dir: the folder of the job; None for a worker that is alone.
        plain: whether what they tell each other may travel between machines, unencrypted.
        together: whether somebody has started them as one job.
    """

    rank: int
    size: int
    node: WorkerNode
    run_dir: Path | None
    plain: bool = False
    together: bool = True
    liveness: Liveness = field(init=False)

    def __post_init__(self) -> None:
        """Find where workers see of each other whether they still run."""
        object.__setattr__(self, "liveness", Liveness(self.run_dir, self.rank))

    @property
    def patience_s(self) -> float:
        """How long a wait may take."""
        return self.node.waits.limit_s

    @property
    def address(self) -> str:
        """Where this worker meets the others; raises UsageError when that is between machines, and may not be."""
        return meeting_address(self.node.addresses[0], plain=self.plain)

    @property
    def others(self) -> list[int]:
        """The ranks of the others."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def store(self, group: str) -> Store:
        """Return where the members of a group find each other: a file in the folder of the job.

        Raises:
            UsageError: nobody has started them as one job, so they have none.
        """
        if not self.together:
            raise UsageError(
                f"worker {self.rank} has no other workers to call: clients of a server of its own know the server "
                "alone. Use tables and strategies of the parameter server, or start the workers as one job (`paceline "
                "run`, torchrun, srun, mpirun)."
            )
        store = HashStore() if self.run_dir is None else FileStore(str(self.run_dir / STORE_NAME), -1)
        store.set_timeout(timedelta(seconds=self.patience_s))
        return PrefixStore(group, store)

    def absent(self, store: Store) -> list[int]:
        """Return the ranks of those who have not come to the meeting of a group."""
        return [rank for rank in range(self.size) if not store.check([f"here/{rank}"])]


@dataclass(slots=True)
class Group:
    """Connections between all workers, over which calls go one after the other.

    What fails ends the group for good: the connections are closed, so that nobody waits for nothing.
    """

    worker_set: WorkerSet
    name: str
    failure_reports: FailureReports
    process_group: ProcessGroup
    _words: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Have memory for what the others tell."""
        self._words = [torch.zeros(NUM_WORDS, dtype=torch.int64) for _ in range(self.worker_set.size)]

    @staticmethod
    def meet(worker_set: WorkerSet, name: str) -> Group:
        """Connect to all other workers; blocks until each has come here too.

        Raises:
            UsageError: they would connect between machines, and may not; or nobody has started them as one job.
            PeerError: a worker has left the job or has died, or was in the group in an earlier life.
            DeadlineExceeded: not all have come in time.
        """
        address, store = worker_set.address, worker_set.store(name)
        if store.add(f"here/{worker_set.rank}", 1) > 1:
            raise PeerError(
                f"worker {worker_set.rank} was among those of '{name}' in an earlier life: a worker that was started "
                "again cannot join the collective calls of the others. Start the job again."
            )
        worker_set.liveness.begin()
        try:
            worker_set.node.calls.ask(
                0, lambda number: Barrier(number, f"group {name}"), f"all workers to come to '{name}'"
            )
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}: {names(worker_set.absent(store))} did not come") from error
        absent = worker_set.absent(store)
        if absent:
            raise PeerError(
                f"worker {worker_set.rank}: {names(absent)} has left the job or has died before it came to '{name}'"
            )
        return Group(
            worker_set,
            name,
            FailureReports(store, worker_set.rank, worker_set.liveness),
            connect(worker_set, store, address),
        )

    def agree(self, call: CallSignature, deadline_s: float) -> list[CallSignature]:
        """Tell all others of a call and hear theirs, by rank; blocks until all have come to it.

        Each is heard by itself, so that it is known who is missing.

        Args:
            call: what this worker means to do.
            deadline_s: by when all have to have come, in seconds that this worker has run.

        Raises:
            UsageError: another worker means another call. The group can be used on.
            PeerError: a worker is gone, or has not come in time; the group is over.
        """
        words, began_s = call.words(), self.worker_set.node.waits.ran_s
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
        calls = [CallSignature.read(told) for told in self._words]
        require_same(call, calls, self.worker_set.rank)
        return calls

    def do(
        self, begin: Callable[[ProcessGroup, timedelta], Work | None], call: CallSignature, deadline_s: float
    ) -> None:
        """Have a collective of torch done; blocks until this worker's part in it is over.

        Raises:
            PeerError: a worker has died meanwhile, or is stopped; the group is over.
        """
        began_s = self.worker_set.node.waits.ran_s
        try:
            with self._waiting(call, deadline_s):
                work = begin(self.process_group, NEVER)
                if work is not None:
                    work.wait(NEVER)
        except RuntimeError as error:
            late = self.worker_set.node.waits.ran_s >= deadline_s
            waited_s = deadline_s - began_s if late else None
            raise self.failure_reports.explain(call.where, self.worker_set.others, waited_s, str(error)) from error

    def _waiting(self, call: CallSignature, deadline_s: float) -> AbstractContextManager[object]:
        """Return a context in which this worker waits for the others: at the deadline all connections are ended."""
        waits = self.worker_set.node.waits
        about = About(f"{self.name} {call.pattern}", workers=tuple(self.worker_set.others))
        return waits.during(f"{self.name}, {call.where}", about, deadline_s - waits.ran_s, self.abort)

    def leave(self, *, politely: bool) -> None:
        """Say that this worker is leaving; if it is not polite, end all connections at once."""
        self.failure_reports.give("has left the job" if politely else "has ended with an error")
        if not politely:
            self.abort()

    def abort(self) -> None:
        """End all connections, so that whatever waits for them fails at once. For another thread than theirs."""
        for other in self.worker_set.others[:1]:
            try:  # a wait that runs out of time has torch close every connection of the group
                self.process_group.recv([torch.zeros(1)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return


def connect(worker_set: WorkerSet, store: Store, address: str) -> ProcessGroup:
    """Return a process group of all workers, of which torch knows nothing globally: there may be several a process."""
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - newer ones have two names
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=worker_set.patience_s)
    try:
        backend = ProcessGroupGloo(store, worker_set.rank, worker_set.size, options)
    except RuntimeError as error:
        raise PeerError(f"worker {worker_set.rank} could not connect to all other workers: {error}") from error
    group = ProcessGroup(store, worker_set.rank, worker_set.size)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group
