"""The carriers that jobs can use between their processes: all that are registered are offered, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from tests.transport.carriers import CREDENTIALS, connect_pair

from paceline.job.carriers import CARRIERS
from paceline.job.choices import ProcessTransport, TransportName
from paceline.transport.carrier import JobSettings


def test_users_choose_from_the_registered_carriers() -> None:
    assert set(get_args(ProcessTransport)) == set(CARRIERS)
    assert get_args(TransportName) == (*get_args(ProcessTransport), "memory")


@pytest.mark.parametrize("scheme", CARRIERS)
def test_each_carrier_joins_processes_of_a_job(scheme: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    job = JobSettings("contract", str(tmp_path), lambda: CREDENTIALS, lambda: None, pytest.fail)
    transport = CARRIERS[scheme].make(job)
    address = CARRIERS[scheme].free_address("127.0.0.1", str(tmp_path), "server-0")
    assert transport.name == scheme
    assert address.startswith(f"{scheme}://")
    pair = connect_pair(transport, address)
    pair.client.send(b"push", timeout_s=30)
    assert pair.server.receive(timeout_s=30).header == b"push"
    pair.close()
