"""Two servers of their own that stand in for each other: one is lost, and no acknowledged push with it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.leaks import nothing_left_behind
from tests.nodes.test_successors import Fate, KillableServer, Killed
from tests.serve.daemon import JOIN_S, Daemon, daemon
from tests.serve.test_clients import together
from tests.serve.test_command import add_one, open_sum

import paceline
from paceline.api.session import Session
from paceline.errors import Refused
from paceline.serve import namespace as namespaces
from paceline.serve import replicas
from paceline.serve.namespace import Namespace
from paceline.server import replica


@dataclass
class Both:
    """Two servers, and what both have been told."""

    folder: Path
    servers: list[Daemon]

    def connect(self, name: str = "job", **settings: Any) -> Session:
        """Connect with the addresses of both."""
        ports = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        token = self.servers[0].state / "token"
        return paceline.connect(f"paceline://{ports}/{name}", **{"token": token, **settings})

    def wait_repaired(self) -> None:
        """Wait until a server has said that the namespace has a replica."""
        for server in self.servers:
            server.told.lines[:] = [line for line in server.told.lines if "again" not in line]


@contextmanager
def pair(folder: Path, **settings: Any) -> Iterator[Both]:
    """Two servers that see a folder of views."""
    with nothing_left_behind(), ExitStack() as undo:
        yield Both(folder, [undo.enter_context(one(folder, number, **settings)) for number in range(2)])


@contextmanager
def one(folder: Path, number: int, **settings: Any) -> Iterator[Daemon]:
    """One of two servers; the second has the token of the first."""
    state = folder / f"state-{number}"
    if number and not state.exists():
        state.mkdir(mode=0o700)
        shutil.copy(folder / "state-0" / "token", state / "token")
    with daemon(state, views=folder / "views", **settings) as served:
        yield served


@pytest.fixture
def fate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fate]:
    """What ends the server of a namespace that has a replica, in the middle of what it does."""
    found = Fate(0)

    class WatchedServer(KillableServer):
        @property
        def fate(self) -> Fate:  # type: ignore[override]
            return found if self.follows is None and self.replica.is_connected else Fate(0)

    live: Callable[[Namespace], None] = Namespace._live

    def watched(self: Namespace) -> None:
        try:
            live(self)
        except Killed:
            self.unsaved = ""  # it is another server's by now

    monkeypatch.setattr(namespaces, "ServerNode", WatchedServer)
    monkeypatch.setattr(Namespace, "_live", watched)
    monkeypatch.setattr(replica, "_IDLE_LOOK_S", 0.0)
    monkeypatch.setattr(replicas, "_LOOK_S", 0.01)
    return found


NUM_CLOCKS = 12


@pytest.mark.parametrize("consistency", ["bsp", "asynchronous"])
def test_servers_are_killed_one_after_the_other_and_each_push_counts_once(
    consistency: str, tmp_path: Path, fate: Fate
) -> None:
    seen: dict[int, torch.Tensor] = {}

    def work(both: Both) -> None:
        with both.connect(workers=2) as ps:
            slots = ps.table(
                "slots", shape=(2, NUM_CLOCKS), update=paceline.update.Add(), consistency=consistency, scale="sum"
            )
            users = ps.table("users", rows=2, update=paceline.update.Add(), consistency=consistency, scale="sum")
            for clock in range(NUM_CLOCKS):
                ones = torch.zeros(2, NUM_CLOCKS)
                ones[ps.rank, clock] = 1.0
                slots.push(ones)
                users.push([clock, 99], torch.ones(2, 2))
                ps.clock()
                values = slots.pull()
                assert ((values == 0.0) | (values == 1.0)).all(), values
                assert (values[ps.rank, : clock + 1] == 1.0).all(), values
            ps.barrier()
            seen[ps.rank] = torch.cat([slots.pull().flatten(), users.pull([0, 99]).flatten()])

    with pair(tmp_path) as both:
        fate.stride = 61
        together(lambda: work(both), lambda: work(both))
        fate.stride = 0
    assert fate.num_kills > 2
    expected = torch.tensor([1.0] * 2 * NUM_CLOCKS + [2.0, 2.0] + [2.0 * NUM_CLOCKS] * 2)
    assert seen.keys() == {0, 1}
    assert all(torch.equal(values, expected) for values in seen.values()), seen
