from collections.abc import Iterator

import pytest
from tests.leaks import nothing_left_behind


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with nothing_left_behind():
        yield
