"""Relays for tests: as a thread of the test, and as a process that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.serve.access import JOB, ServerCredentials
from paceline.transport.base import Credentials
from paceline.transport.tls import TlsSettings
from paceline.versions.places import VersionPlaces
from paceline.versions.relay import RelaySettings, VersionRelay

PATIENCE_S = 60.0
TOKEN = b"t" * 32


@dataclass(frozen=True, slots=True)
class Relaying:
    """A relay in a thread: where readers connect, and what it has told."""

    relay: VersionRelay
    address: str
    told: list[str]


@contextmanager
def relaying(
    places: VersionPlaces,
    *names: str,
    keep: int = 2,
    max_leased: int = 4,
    tls: TlsSettings | None = None,
    token: bytes = TOKEN,
) -> Iterator[Relaying]:
    """VersionRelay versions in a thread; afterwards it has ended."""
    access = ServerCredentials(Credentials(token, JOB), tls)
    listener = access.transport().listen("127.0.0.1:0")
    told = list[str]()
    settings = RelaySettings(names, keep, max_leased, "default")
    relay = VersionRelay(listener, places, settings, lambda line, _level: told.append(line))
    thread = threading.Thread(target=relay.run, name="test-relay")
    thread.start()
    try:
        yield Relaying(relay, f"paceline://{listener.address.removeprefix('tcp://')}", told)
    finally:
        relay.stop()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


@dataclass(frozen=True, slots=True)
class RelayProcess:
    """A relay that `paceline relay` runs, and where readers connect."""

    process: subprocess.Popen[str]
    address: str

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.wait()


@contextmanager
def relay_process(*told: str) -> Iterator[RelayProcess]:
    """Start `paceline relay` at a free port; afterwards it is gone."""
    command = [sys.executable, "-m", "paceline", "relay", *told, "--listen", "127.0.0.1:0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield RelayProcess(process, process.stdout.readline().split()[-1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
