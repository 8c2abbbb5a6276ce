"""Whatever a reader misses, it gets the very bytes; what training has changed takes fewer where it is compressed."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from tests.jobs import Job, job
from tests.versions.publishing import wait_seen
from tests.versions.relaying import PATIENCE_S, TOKEN, relaying
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.versions.places import PublishingServers, ReaderRole, VersionPlaces
from paceline.versions.subscription import VersionSubscription

NUMEL = 20_000
NUM_VERSIONS, KEEP = 10, 2
DTYPES = ("float32", "bfloat16")


class Trained:
    """A worker that trains a table of each dtype and publishes it, and what each version has."""

    def __init__(self, ps: Session) -> None:
        self.ps = ps
        self.draw = torch.Generator().manual_seed(0)
        self.values: dict[tuple[str, int], Tensor] = {}
        rule = paceline.update.Adam(lr=1e-3)
        self.tables = {
            dtype: ps.table(dtype, shape=(NUMEL,), update=rule, dtype=dtype, init=0.05 * self.gradient())
            for dtype in DTYPES
        }

    def gradient(self) -> Tensor:
        return torch.randn(NUMEL, generator=self.draw)

    def publish(self, num_clocks: int) -> int:
        """Train some clocks, and publish both tables."""
        number = 0
        for _ in range(num_clocks):
            for table in self.tables.values():
                table.push(self.gradient())
            number = self.ps.clock()
        for dtype, table in self.tables.items():
            self.values[dtype, number] = table.pull().clone()
            wait_seen(self.ps, self.ps.models.publish(table, dtype, keep=KEEP))
        return number


@dataclass(slots=True)
class Reader:
    """A reader of one table: `way` says how it reads, `since` from which version on, `last` which it had last."""

    way: str
    dtype: str
    since: int
    subscription: VersionSubscription
    last: int


def of_job(started: Job, role: ReaderRole = "reader", *, compress: bool) -> VersionPlaces:
    servers = PublishingServers(started.transport, started.spec.addresses, role=role)
    return VersionPlaces("the job", (lambda: servers,), compress)


@pytest.mark.parametrize("carrier", ["memory", "shm", "tcp", "tls"])
def test_readers_get_the_bytes_however_many_versions_they_miss(carrier: str, tmp_path: Path) -> None:
    rng, received, happened = Random(2), Counter[tuple[str, str]](), Counter[str]()
    with ExitStack() as opened:
        started = opened.enter_context(job(tmp_path, carrier=carrier, servers=2))
        trained = Trained(opened.enter_context(started.join(0)))
        relay = opened.enter_context(relaying(of_job(started, "relay", compress=True), *DTYPES))
        readers = list[Reader]()
        for at in range(NUM_VERSIONS):
            number = trained.publish(rng.choice((1, 1, 4)))
            for dtype in DTYPES if at in (0, 4) else ():  # some come late
                for way, compress in (("plain", False), ("compressed", True)):
                    subscription = VersionSubscription(dtype, of_job(started, compress=compress))
                    readers.append(Reader(way, dtype, at, opened.enter_context(subscription), at))
                behind = paceline.subscribe(relay.address, name=dtype, compress=True, token=TOKEN)
                readers.append(Reader("relayed", dtype, at, opened.enter_context(behind), at))
            misses = {since: rng.random() < 0.4 for since in (0, 4)}  # those of one beginning have one history
            for reader in readers:
                if misses[reader.since] and at != reader.since:
                    continue
                if at % 3 == 2:
                    reader.subscription._servers.drop()
                    happened["a lost line"] += 1
                happened["a lost base"] += at - reader.last >= KEEP
                with reader.subscription.wait(number, timeout_s=PATIENCE_S) as version:
                    assert torch.equal(version[reader.dtype], trained.values[reader.dtype, number])
                    assert version.verify()
                    if at != reader.since:
                        received[reader.way, reader.dtype] += version.received_bytes
                reader.last = at
    assert happened["a lost line"]
    assert happened["a lost base"]
    most = {"float32": 0.75, "bfloat16": 0.6}  # of the bytes without
    for dtype in DTYPES:
        if carrier == "shm":  # where bytes are mapped
            assert not received["plain", dtype] + received["compressed", dtype]
        else:
            assert received["compressed", dtype] < most[dtype] * received["plain", dtype]
        assert received["relayed", dtype], "as a relay is reached over tcp"
