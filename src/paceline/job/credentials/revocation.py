"""Watching for certificates that are revoked while a job runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.job.credentials.holders import KEYS_NAME, REVOKED_NAME
from paceline.job.spec import ClusterSpec
from paceline.notices import tell
from paceline.transport.file_watch import FileWatch
from paceline.transport.peer_identity import DamagedRevocations, read_revoked

POLL_S: Final = 0.25  # so that a revoked peer is disconnected within a second
_JOIN_TIMEOUT_S: Final = 5.0


def revoked_path(spec: ClusterSpec) -> Path | None:
    """Return the file of revoked names; None where the job has no certificates."""
    return Path(spec.run_dir) / KEYS_NAME / REVOKED_NAME if spec.encrypted else None


@contextmanager
def watching_revoked(path: Path | None, expel: Callable[[frozenset[str]], None]) -> Generator[None]:
    """Call `expel` with all names in the file whenever it has changed, from a thread of its own, until this is left.

    The file may come later; where there can be none (None), nothing is watched.
    """
    if path is None:
        yield
        return
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(path, expel, over), name="paceline-revoked", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join(_JOIN_TIMEOUT_S)


def _watch(path: Path, expel: Callable[[frozenset[str]], None], over: threading.Event) -> None:
    revoked, known, problem = FileWatch((path,), lambda: read_revoked(path)), frozenset[str](), ""
    while not over.wait(POLL_S):
        try:
            names = revoked.get()
        except UsageError as error:  # meanwhile handshakes are refused
            if str(error) != problem:
                problem = str(error)
                tell(problem)
            if not isinstance(error, DamagedRevocations):
                continue
            names = error.names
        if names != known:
            known = names
            expel(names)
