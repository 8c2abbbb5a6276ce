"""Publishing in tests that need every version."""

from __future__ import annotations

from tests.versions.relaying import PATIENCE_S

import paceline
from paceline.api.session import Session
from paceline.worker.publishing import Publication


def wait_seen(ps: Session, made: Publication) -> None:
    """Wait until readers see a version: while two are being copied, servers refuse the next."""
    made.wait()
    with paceline.subscribe(ps, name=made.name) as own:
        own.wait(made.number, timeout_s=PATIENCE_S)
