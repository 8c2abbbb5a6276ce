import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.transport.carriers import CARRIERS, Carrier, Pair, connect_pair, make_carrier


def open_descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    yield
    gc.collect()
    left = {number: name for number, name in open_descriptors().items() if number not in descriptors}
    assert not left, "descriptors left open"
    assert set(threading.enumerate()) <= threads, "threads left running"


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest, tmp_path: Path) -> Carrier:
    return make_carrier(request.param, tmp_path)


@pytest.fixture
def pair(carrier: Carrier) -> Iterator[Pair]:
    pair = connect_pair(carrier.transport, carrier.address)
    yield pair
    pair.close()
