"""A whole job as threads of the test's process, over any carrier: servers, workers, and a deadline for each of them."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from msgspec.structs import replace
from tests.leaks import nothing_left_behind

from paceline.api.join import join
from paceline.api.script import bind
from paceline.api.session import Session
from paceline.job.carriers import listen_address, make_transport
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import KEYS_NAME, Holder
from paceline.job.environment import Place
from paceline.job.spec import ClusterSpec, write_token
from paceline.launch.server import server_settings
from paceline.observe.trace import Trace
from paceline.server.node import ServerNode
from paceline.transport.base import Transport
from paceline.transport.memory import MemoryTransport

DEADLINE_S = 100.0
CARRIERS = ("memory", "shm", "tcp")  # and "tls"

Result = TypeVar("Result")


@dataclass
class Job:
    """Servers that run, and what a worker needs to join them."""

    spec: ClusterSpec
    transport: Transport
    servers: list[ServerNode]
    _failures: list[BaseException] = field(default_factory=list)

    def join(self, rank: int, incarnation: int = 0) -> Session:
        place = Place(Path(self.spec.run_dir) / "cluster.json", rank, rank, incarnation)
        return join(self.spec, place, self.transport)

    def kill(self, worker: Session, incarnation: int = 0) -> None:
        """End a worker without a word, and report its death as the launcher does."""
        worker.close(politely=False)
        self.report_death(worker.rank, incarnation)

    def report_death(self, rank: int, incarnation: int = 0) -> None:
        for server in self.servers:
            server.report_death(rank, incarnation, "the test ended it")

    def run(self, work: Callable[[Session], Result]) -> list[Result]:
        """Run `work` as every worker at once; return what each returned, or raise what went wrong first."""
        results: dict[int, Result] = {}

        def live(rank: int) -> None:
            torch.set_num_threads(1)  # a property of the thread: another number would add in another order
            try:
                with self.join(rank) as joined:
                    bind(joined)
                    results[rank] = work(joined)
            except BaseException as error:
                self._failures.append(error)
                self.report_death(rank)

        start_and_join(
            [
                threading.Thread(
                    target=contextvars.Context().run, args=(live, rank), name=f"test-worker-{rank}", daemon=True
                )
                for rank in range(self.spec.num_workers)
            ]
        )
        if self._failures:
            raise self._failures[0]
        return [results[rank] for rank in range(self.spec.num_workers)]


@contextmanager
def job(
    directory: Path,
    *,
    workers: int = 1,
    servers: int = 1,
    carrier: str = "memory",
    traces: Sequence[Trace] = (),
    **settings: Any,
) -> Iterator[Job]:
    """Start the servers of a job, with a trace for each if so.

    Afterwards they are stopped, and no thread or descriptor is left.
    """
    os.chmod(directory, 0o700)
    spec = ClusterSpec(
        job="test",
        num_workers=workers,
        num_servers=servers,
        transport="tcp" if carrier == "tls" else carrier,  # pyright: ignore[reportArgumentType]
        encrypted=carrier == "tls",
        run_dir=str(directory),
        **{"wait_timeout_s": DEADLINE_S / 2, **settings},
    )
    with nothing_left_behind():
        transport = _transport(spec, directory)
        listeners = [transport.listen(_address(spec, rank)) for rank in range(servers)]
        addresses = tuple(listener.address for listener in listeners)
        nodes = [
            ServerNode(
                server_settings(spec, rank),
                listener,
                transport,
                lambda: addresses,
                traces[rank] if traces else Trace(None),
                checks_memory=True,
            )
            for rank, listener in enumerate(listeners)
        ]
        running = [threading.Thread(target=node.run, name="test-server", daemon=True) for node in nodes]
        for thread in running:
            thread.start()
        try:
            yield Job(replace(spec, addresses=addresses), transport, nodes)
        finally:
            for node in nodes:
                node.stop()
            join_all(running)


def run_job(directory: Path, work: Callable[[Session], Result], **settings: Any) -> list[Result]:
    """Run `work` as every worker of a job of its own."""
    with job(directory, **settings) as started:
        return started.run(work)


def start_and_join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    join_all(threads)


def join_all(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            pytest.fail(f"{thread.name} did not end within {DEADLINE_S:g} s")


def _transport(spec: ClusterSpec, directory: Path) -> Transport:
    if spec.transport == "memory":
        return MemoryTransport()
    if spec.transport == "tcp":
        write_token(directory)
    if spec.encrypted:
        (directory / KEYS_NAME).mkdir(mode=0o700)
        Authority.make(spec.job).issue(directory / KEYS_NAME, Holder("any"))
    return make_transport(spec, Holder("any"), pytest.fail)


def _address(spec: ClusterSpec, rank: int) -> str:
    return f"memory://server-{rank}" if spec.transport == "memory" else listen_address(spec, rank)
