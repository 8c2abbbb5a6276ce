import threading
from collections.abc import Iterator

import pytest
from tests.leaks import nothing_left_behind

JOIN_S = 5.0


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """What greets or hears an attacker notices by itself that it is gone; it is given a moment for that."""
    before = set(threading.enumerate())
    with nothing_left_behind():
        yield
        for thread in set(threading.enumerate()) - before:
            thread.join(JOIN_S)
