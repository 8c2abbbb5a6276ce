"""A server of its own as a thread of the test, and its clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.leaks import nothing_left_behind

import paceline
from paceline.api.session import Session
from paceline.serve.access import server_access
from paceline.serve.gateway import Gateway, Namespaces
from paceline.serve.namespace import NamespaceConfig
from paceline.serve.replicas import Companions
from paceline.serve.state import StateFolder

JOIN_S = 150.0


@dataclass
class Told:
    """What was told to the operator."""

    lines: list[str] = field(default_factory=list[str])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(text in line for line in self.lines), JOIN_S), self.lines


@dataclass
class Daemon:
    """Where it is, what lets clients in, and what it has told."""

    state: Path
    namespaces: Namespaces
    port: int
    told: Told
    gateway: Gateway

    def address(self, name: str = "default") -> str:
        return f"paceline://127.0.0.1:{self.port}/{name}"

    def connect(self, name: str = "default", **settings: Any) -> Session:
        return paceline.connect(self.address(name), **{"token": self.state / "token", **settings})

    def wait_empty(self, name: str = "") -> None:
        """Wait until this namespace, or none at all, is served any more: all clients have left, and it is on disk."""
        for namespace in list(self.namespaces._open.values()):
            if name in ("", namespace.name):
                namespace._thread.join(JOIN_S)
                assert namespace.is_over


@contextmanager
def daemon(
    state: Path,
    keys: Path | None = None,
    *,
    num_unsaved: int = 0,
    views: Path | None = None,
    lag: int = 0,
    **settings: Any,
) -> Iterator[Daemon]:
    """Serve while entered; afterwards no thread and no descriptor is left, and as many namespaces were not saved.

    `views`: folder of several servers that stand in for each other; the caller looks for what is left behind then.
    """
    with nothing_left_behind() if views is None else nullcontext():
        folder, told = StateFolder(state), Told()
        try:
            transport = server_access("127.0.0.1", state, keys).transport(told)
            listener = transport.listen("127.0.0.1:0")
            companions = None if views is None else Companions(views, folder, listener.address, transport, told, lag)
            namespaces = Namespaces(folder, transport, NamespaceConfig(tell=told, **settings), companions)
            if companions is not None:
                companions.start(namespaces.fill)
            gateway, unsaved = Gateway(listener, namespaces), list[list[str]]()
            thread = threading.Thread(target=lambda: unsaved.append(gateway.run()), name="test-reception")
            thread.start()
            try:
                yield Daemon(state, namespaces, int(listener.address.rpartition(":")[2]), told, gateway)
            finally:
                gateway.stop()
                thread.join(JOIN_S)
                if companions is not None:
                    companions.close()
            assert [len(lines) for lines in unsaved] == [num_unsaved], (unsaved, told.lines)
        finally:
            folder.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    """A server with a folder of its own."""
    with daemon(tmp_path / "state") as found:
        yield found
