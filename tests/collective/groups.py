"""Groups of workers that are threads, over any of the ways by which collective calls travel."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from tests.jobs import start_and_join
from tests.leaks import nothing_left_behind
from torch.distributed import HashStore, Store

from paceline.collective.group import connect_gloo
from paceline.collective.meeting import FarAccess, MemberAddresses, Offer
from paceline.collective.process_group import OwnGroup
from paceline.collective.torch_backend import connect
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.transport.base import Credentials, Transport
from paceline.transport.memory import MemoryTransport
from paceline.transport.tcp import TcpTransport
from paceline.wire.messages import Hello

# Ours in shared memory, over connections by carrier, and on two machines with every other worker each, over tcp.
OWN = ("paceline", "memory", "tls", "machines")
BACKENDS = ("gloo", *OWN)
TIMEOUT = timedelta(seconds=30)
CREDENTIALS = Credentials(token=bytes(range(32)), job="contract")

Work = Callable[[Any, int], object]
_KEYS = threading.Lock()


def keys() -> tempfile.TemporaryDirectory[str]:
    """A folder with a certificate for each of some workers, of one authority for all threads."""
    with _KEYS:
        return _keys()


@cache
def _keys() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="paceline-keys-")
    authority = Authority.make(CREDENTIALS.job)
    for rank in range(4):
        authority.issue(Path(folder.name), Holder("worker", rank))
    return folder


def far_access(carrier: str, rank: int, holder: int | None = None) -> FarAccess:
    """How a worker is reached from other machines; with the certificate of another one, if so."""
    hello = Hello("worker", rank, 0, 1)
    if carrier == "memory":
        return FarAccess(_MEMORY, f"memory://group-{rank}-{threading.get_ident()}", hello)
    own = Holder("worker", rank if holder is None else holder)
    tls = tls_settings(Path(keys().name), own) if carrier == "tls" else None
    transport: Transport = TcpTransport(CREDENTIALS, tls=tls)
    return FarAccess(transport, "tcp://127.0.0.1:0", hello)


_MEMORY = MemoryTransport()


def meet(
    backend: str,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta = TIMEOUT,
    *,
    machines: Sequence[str] = "abab",
) -> OwnGroup:
    """Connect one worker of a group whose members are on several machines, or said to be.

    With the backend "machines" they are on those of these names, by rank.
    """
    folder = Path(tempfile.mkdtemp(prefix="paceline-test-")) if backend == "machines" else None
    offer = Offer.make(folder, far_access("tcp" if backend == "machines" else backend, rank))
    try:
        if folder is not None:
            offer.told = replace(offer.told, machine=machines[rank])
        store.set(f"offer/{rank}", offer.told.text)
        told = [MemberAddresses.read(store.get(f"offer/{other}").decode()) for other in range(size)]
        return OwnGroup(*offer.accept(rank, told, timeout.total_seconds()), timeout.total_seconds())
    finally:
        offer.close()
        if folder is not None:
            shutil.rmtree(folder)


def run_group(
    backend: str, num_workers: int, work: Work, timeout: timedelta = TIMEOUT, machines: Sequence[str] = ""
) -> list[Any]:
    """Run `work` as every worker of a group; return what each returned or raised."""
    store, results = HashStore(), [None] * num_workers

    def live(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            if backend == "gloo":
                results[rank] = work(connect_gloo(store, rank, num_workers, "127.0.0.1", timeout), rank)
                return
            if backend == "paceline":
                group = connect(store, rank, num_workers, timeout)
            else:
                group = meet(backend, store, rank, num_workers, timeout, machines=machines or "abab")
            try:
                results[rank] = work(group, rank)
            finally:
                group.shutdown()
        except Exception as error:
            results[rank] = error.with_traceback(None)  # its frames hold the memory of the group

    with nothing_left_behind():
        start_and_join([threading.Thread(target=live, args=(rank,)) for rank in range(num_workers)])
    return results


def succeed(backend: str, num_workers: int, work: Work) -> list[Any]:
    """Run `work` as every worker; return what each returned, or raise what one of them raised."""
    results = run_group(backend, num_workers, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
