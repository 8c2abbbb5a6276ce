from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.leaks import nothing_left_behind
from tests.transport.carriers import CARRIERS, Carrier, Pair, connect_pair, make_carrier


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest, tmp_path: Path) -> Carrier:
    return make_carrier(request.param, tmp_path)


@pytest.fixture
def pair(carrier: Carrier) -> Iterator[Pair]:
    pair = connect_pair(carrier.transport, carrier.address)
    yield pair
    pair.close()
