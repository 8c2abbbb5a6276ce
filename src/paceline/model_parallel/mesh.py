"""Process groups of the workers that hold one model together, as a torch mesh; torch allows one a process."""

from __future__ import annotations

import sys
import threading
import time
import zlib
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Final
from weakref import WeakMethod

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from paceline.collective.collectives import Collectives
from paceline.collective.failures import LEFT, STAY_ADVICE, FailureReports, names
from paceline.collective.group import NEVER, WorkerSet, connect_members
from paceline.collective.process_group import OwnGroup
from paceline.collective.signature import NUM_WORDS, CallSignature
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.job.mesh import MeshPosition, MeshShape
from paceline.torch_private import PrefixStore, ProcessGroupGloo, Store, tree_leaves
from paceline.transport.memory import MemoryTransport
from paceline.wire.requests import Barrier
from paceline.worker.node import HAS_LEFT
from paceline.worker.waits import About, OpenWait

AXES: Final = ("pipeline", "data", "tensor")
BACKEND: Final = "paceline"
_NAME: Final = "mesh"
_ABORT_TAG: Final = 7
_WRAPPINGS: Final = ("failed to run forward", "Failed to run stage backward")
_GRACE_S: Final = 1.0
_POLL_INTERVAL_S: Final = 0.01
_SAMPLED: Final = 4096  # numbers of a tensor that digests are of, so that large batches cost no time
_HALF: Final = 1 << 31  # of a digest


@dataclass(slots=True, weakref_slot=True)
class Mesh:
    """Process groups of all workers of a job, by stage, replica and tensor rank.

    Attributes:
        devices: the mesh of torch, with the axes "pipeline", "data" and "tensor".
        replica: the group of the workers that hold one model together.
    """

    grid: MeshShape
    worker_set: WorkerSet
    failure_reports: FailureReports
    devices: DeviceMesh
    replica: ProcessGroup
    _num_calls: int = 0
    _failure: str = ""  # reason why the connections ended
    _words: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    # By size: neighbours along "data", as a mesh, and those at the same place among other neighbours.
    _neighbours: dict[int, tuple[DeviceMesh, ProcessGroup]] = field(
        default_factory=dict[int, tuple[DeviceMesh, ProcessGroup]]
    )

    @staticmethod
    def open(exchange: Collectives, grid: MeshShape) -> Mesh:
        """Connect to all other workers; blocks until each has called this. The mesh ends when the worker leaves.

        Raises:
            UsageError: workers that are threads, a script with process groups of its own, or workers on several
            machines
                without permission to connect between them.
            PeerError: a worker has left the job or has died.
            DeadlineExceeded: not all workers have called it in time.
        """
        worker_set = exchange.worker_set
        _require_process(worker_set)
        backend, store = _register_backend(worker_set), worker_set.store(_NAME)
        failure_reports = _meet(worker_set, store)
        patience, hook = timedelta(seconds=worker_set.timeout_s), sys.excepthook
        try:
            dist.init_process_group(
                backend, store=store, rank=worker_set.rank, world_size=worker_set.size, timeout=patience
            )
            devices, replica = _connect(grid, patience)
        except (RuntimeError, ValueError, PeerError) as error:
            raise failure_reports.explain("connecting", worker_set.others, None, str(error)) from error
        finally:
            sys.excepthook = hook  # torch prefixes each line of a traceback with a rank, as the launcher does
        mesh = Mesh(grid, worker_set, failure_reports, devices, replica)
        exchange.when_closed(WeakMethod(mesh.close))
        return mesh

    @property
    def position(self) -> MeshPosition:
        """Position of this worker."""
        return self.grid.position(self.worker_set.rank)

    def axis(self, name: str) -> DeviceMesh:
        """Return the mesh of the workers that differ from this one along one axis only."""
        return self.devices[name]

    def group(self, name: str) -> ProcessGroup:
        """Return the process group of the workers that differ from this one along one axis only.

        Raises:
            PeerError: this worker has left.
        """
        self._require_open(f"the workers along '{name}'")
        return self.devices.get_group(name)

    def neighbours(self, size: int) -> tuple[DeviceMesh, ProcessGroup]:
        """Return the mesh of `size` neighbours along "data", and the group of those at the same place among others.

        The first call for a size makes them, and blocks until all workers call it.

        Args:
            size: number of neighbours, which divides that of the replicas.
        """
        if size not in self._neighbours:
            grid, patience = self.grid, timedelta(seconds=self.worker_set.timeout_s)
            ranks = torch.arange(grid.size).view(grid.pipeline, grid.replicas // size, size, grid.tensor)
            with self.explained(f"connecting groups of {size} workers", dist.group.WORLD):
                own, others = _groups_along([_lines(ranks, 2), _lines(ranks, 1)], patience)
            self._neighbours[size] = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("shard",)), others
        return self._neighbours[size]

    def agree(self, call: CallSignature, what: str) -> list[CallSignature]:
        """Exchange the next call with all workers of this replica, and return those of each.

        All must make the same call; only `weight` may differ, and one half of `digest`: inputs are augmented by each
        worker for itself, for example. Blocks until all have.

        Raises:
            UsageError: another worker makes another call, or has other inputs and other targets; nothing has been sent
            then.
            PeerError: a worker is gone, or has not come in time.
        """
        self._num_calls += 1
        own = replace(call, number=self._num_calls)
        members = self.grid.replica_ranks(self.position.replica)
        self._words = self._words or [torch.zeros(NUM_WORDS, dtype=torch.int64) for _ in members]
        with self.explained(what):
            dist.all_gather(self._words, own.words(), self.replica)
        calls = [CallSignature.read(words) for words in self._words]
        for rank, told in zip(members, calls, strict=True):
            if replace(told, weight=own.weight, digest=own.digest) != own:
                raise UsageError(
                    f"worker {self.worker_set.rank}, {what} {own.number}: expected {own} of every worker of this "
                    f"replica, got {told} from worker {rank} as its {told.number}. All must be given the same batch."
                )
        if _are_unlike([call.digest for call in calls]):
            raise UsageError(
                f"worker {self.worker_set.rank}, {what} {own.number}: {names(members)} hold one model between them, "
                "and were given inputs and targets with other values, expected the same batch. Take batches from "
                "paceline.shard(loader), or draw the same random numbers on all of them: torch.manual_seed(seed), "
                "without the rank."
            )
        return calls

    @contextmanager
    def explained(self, what: str, group: ProcessGroup | None = None, *, apart: bool = False) -> Generator[None]:
        """Explain failed connections in the block; errors of the script are raised unchanged.

        `group`: the workers that wait for each other in it. Default: those that hold one model together.
        `apart`: whether workers do different things in it, so that an error of this one is none of the others. They
        wait for what it would have sent, so it ends all connections.

        Raises:
            PeerError: a worker is gone, or too late, and all connections have ended; or this worker has left.
        """
        self._require_open(what)
        if self._failure:
            raise PeerError(f"worker {self.worker_set.rank}, {what}: an earlier call has failed: {self._failure}")
        waits = self.worker_set.node.waits
        workers = dist.get_process_group_ranks(self.replica if group is None else group)
        about = About(f"mesh {what}", workers=tuple(workers), computes=True)
        wait: OpenWait | None = None
        try:
            with waits.during(what, about, waits.limit_s, self.abort) as wait:
                yield
        except Exception as error:
            found = _unwrapped(error)
            if not _is_of_connections(found):
                if apart:
                    self._end_with(f"{what}: {type(found).__name__}: {found}")
                raise found from None
            late = wait.waited_s if wait is not None and wait.give_up is None else None
            self._failure = f"{what} has failed"
            told = self.failure_reports.explain(what, self._missing(), late, str(found))
            self._failure = str(told)
            raise told from error

    def _end_with(self, failure: str) -> None:
        """End all connections for an error of this worker, which is told to the others."""
        self._failure = failure
        self.failure_reports.write(f"has failed in {failure}")
        self.abort()

    def _require_open(self, what: str) -> None:
        if not dist.is_initialized():
            raise PeerError(f"worker {self.worker_set.rank}, {what}: {HAS_LEFT}")

    def abort(self) -> None:
        """End all connections, so that workers that wait for this one fail at once."""
        for group in self._groups:
            if isinstance(group, OwnGroup):
                group.abort()
                continue
            others = [rank for rank in range(group.size()) if rank != group.rank()]
            for other in others[:1]:
                try:  # a wait that times out makes torch close every connection of the group
                    group.recv([torch.zeros(1)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    def close(self, politely: bool) -> None:
        """End the process groups. May be repeated."""
        if not dist.is_initialized():
            return
        self.failure_reports.write(LEFT if politely else "has ended with an error")
        if not politely:
            self.abort()
        for group in self._groups:
            if isinstance(group, OwnGroup):
                group.shutdown()
        dist.destroy_process_group()

    def _missing(self) -> Sequence[int]:
        """Return the workers that do not notice the end of the connections within a second; all others if each does.

        Among them are workers that have ended and workers that compute; which of them run is checked later.
        """
        store = self.failure_reports.store
        store.set(f"noticed/{self.worker_set.rank}", "")
        self.abort()
        connected = {rank for group in self._groups for rank in dist.get_process_group_ranks(group)}
        silent, deadline_s = connected - {self.worker_set.rank}, time.monotonic() + _GRACE_S
        while silent and time.monotonic() < deadline_s:
            silent = {rank for rank in silent if not store.check([f"noticed/{rank}"])}
            if any(map(self.worker_set.liveness.has_ended, silent)):
                break
            if all(store.check([f"failure/{rank}"]) for rank in silent):
                break
            time.sleep(_POLL_INTERVAL_S)
        return sorted(silent) or self.worker_set.others

    @property
    def _groups(self) -> list[ProcessGroup]:
        more = [group for mesh, others in self._neighbours.values() for group in (mesh.get_group(), others)]
        return [self.replica, *map(self.group, AXES), *more]


def _require_process(worker_set: WorkerSet) -> None:
    if isinstance(worker_set.node.transport, MemoryTransport):
        raise UsageError(
            "pipeline, tensor and fsdp need workers that are processes, as torch has one mesh a process: run with "
            "`paceline run --transport shm` or tcp."
        )
    if dist.is_initialized():
        raise UsageError(
            f"worker {worker_set.rank}: torch.distributed is in use in this process already. Leave "
            "init_process_group to Paceline, or let each worker be a process of its own."
        )


def _meet(worker_set: WorkerSet, store: Store) -> FailureReports:
    """Wait for all workers before torch does, whose error would not name the missing ones."""
    if store.add(f"here/{worker_set.rank}", 1) > 1:
        raise PeerError(
            f"worker {worker_set.rank} held a part of the model in an earlier life: a worker that was started again "
            "cannot join the others. Start the job again."
        )
    worker_set.liveness.start()
    worker_set.node.rpc.call(0, lambda number: Barrier(number, _NAME), "all workers to come to the mesh")
    absent = worker_set.absent(store)
    if absent:
        raise PeerError(
            f"worker {worker_set.rank}: {names(absent)} has left the job or has died before the mesh was made. "
            f"{STAY_ADVICE}"
        )
    return FailureReports(PrefixStore(_NAME, store), worker_set.rank, worker_set.liveness)


def _connect(grid: MeshShape, patience: timedelta) -> tuple[DeviceMesh, ProcessGroup]:
    """Make the groups of each axis and of each replica, without duplicates; return this worker's.

    They have the job's timeout; groups made by a `DeviceMesh` itself would wait for half an hour.
    """
    ranks = torch.arange(grid.size).view(grid.pipeline, grid.replicas, grid.tensor)
    axes = [_lines(ranks, axis) for axis in range(len(AXES))]
    own = _groups_along([*axes, [grid.replica_ranks(index) for index in range(grid.replicas)]], patience)
    return DeviceMesh.from_group(own[:-1], "cpu", ranks, mesh_dim_names=AXES), own[-1]


def _lines(ranks: torch.Tensor, axis: int) -> list[list[int]]:
    """Return the ranks that differ along one axis only, line by line.

    >>> _lines(torch.arange(4).view(2, 2), 0)
    [[0, 2], [1, 3]]
    """
    return ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()


def _groups_along(axes: Sequence[Sequence[Sequence[int]]], patience: timedelta) -> list[ProcessGroup]:
    """Make a group of each line of ranks, those that are equal once; return this worker's, one for each axis."""
    made: dict[tuple[int, ...], object] = {}
    own: list[ProcessGroup] = []
    for line in (tuple(line) for lines in axes for line in lines):
        made[line] = group = made.get(line) or dist.new_group(line, timeout=patience)
        if isinstance(group, ProcessGroup):  # otherwise this worker is not in it
            own.append(group)
    return own


def digest_of(inputs: object, targets: object) -> int:
    """Return a digest of the values of a batch: of its inputs in the lower half, of its targets in the upper one.

    >>> digest_of(torch.ones(2), None) == digest_of((torch.ones(2),), None), digest_of(None, None)
    (True, 0)
    """
    lower, upper = (_checksum(tree_leaves(values)) % _HALF for values in (inputs, targets))
    return upper * _HALF + lower


def _checksum(values: Sequence[object]) -> int:
    found = 0
    for one in values:
        if isinstance(one, torch.Tensor) and one.layout == torch.strided and one.device.type == "cpu":
            flat = one.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
            found = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), found)
    return found


def _are_unlike(digests: Sequence[int]) -> bool:
    """Return whether workers have other inputs and other targets.

    One alone may differ: of inputs that each worker augments for itself, and of targets. Those that only the last stage
    is given are compared with none.

    >>> two = digest_of(torch.ones(2), torch.ones(2)), digest_of(torch.zeros(2), torch.zeros(2))
    >>> _are_unlike(two), _are_unlike((two[0], digest_of(torch.zeros(2), torch.ones(2))))
    (True, False)
    >>> _are_unlike((two[0], digest_of(torch.zeros(2), None)))
    False
    """
    halves = [divmod(digest, _HALF) for digest in digests]
    return all(len(set(half) - {0}) > 1 for half in zip(*halves, strict=True))


def _register_backend(worker_set: WorkerSet) -> str:
    """Register a process group backend for these workers; return its name."""
    name = f"{BACKEND}-mesh-{len(dist.Backend.backend_list)}"
    dist.Backend.register_backend(name, partial(_connected, worker_set), devices=["cpu"])
    return name


def _connected(
    worker_set: WorkerSet, store: Store, rank: int, size: int, timeout: timedelta
) -> OwnGroup | ProcessGroupGloo:
    """Connect the workers of one group; blocks until all have called this."""
    made: Future[OwnGroup | ProcessGroupGloo] = Future()

    def make() -> None:
        try:
            made.set_result(connect_members(worker_set, store, rank, size, NEVER))
        except (RuntimeError, PacelineError) as error:
            made.set_exception(error)

    threading.Thread(target=make, name="paceline-mesh", daemon=True).start()
    try:
        return made.result(timeout.total_seconds())
    except TimeoutError:
        raise RuntimeError(f"not all workers have connected within {timeout.total_seconds():g} s") from None


def _unwrapped(error: BaseException) -> BaseException:
    """Return the error of a layer, without the errors that torch's pipelines wrap around it."""
    while error.__cause__ is not None and any(words in str(error) for words in _WRAPPINGS):
        error = error.__cause__
    return error


def _is_of_connections(error: BaseException) -> bool:
    """Return whether a connection that failed raised this error; most messages of Gloo name a source file of it."""
    return isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in ("gloo", "pair closure"))
    )
