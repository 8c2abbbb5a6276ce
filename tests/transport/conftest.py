from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.wire_certificates import Authority
from tests.leaks import nothing_left_behind
from tests.transport.carriers import CARRIERS, Carrier, Pair, connect_pair, make_carrier

from paceline.transport import TlsSettings


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    return Authority(tmp_path_factory.mktemp("certificates")).issue("member")


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest, tmp_path: Path, certificates: TlsSettings) -> Carrier:
    return make_carrier(request.param, tmp_path, tls=certificates if request.param == "tls" else None)


@pytest.fixture
def pair(carrier: Carrier) -> Iterator[Pair]:
    pair = connect_pair(carrier.transport, carrier.address)
    yield pair
    pair.close()
