"""What holds for tests that train in the process of the tests."""

from collections.abc import Iterator

import pytest

import paceline


@pytest.fixture
def joined() -> Iterator[None]:
    """Join a job alone, as a script does, and leave it with the test: other tests begin with sessions of their own."""
    with paceline.init():
        yield
