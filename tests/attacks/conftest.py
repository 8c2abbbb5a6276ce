from collections.abc import Iterator

import pytest
from tests.leaks import nothing_left_behind


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_behind() -> Iterator[None]:
    """Many attack one server; when it has ended, nothing of any attack may be left."""
    with nothing_left_behind():
        yield
