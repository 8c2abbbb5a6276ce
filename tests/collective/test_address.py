"""Workers meet where they reach the servers, and never off this machine."""

import pytest

from paceline.collective.address import meeting_address


@pytest.mark.parametrize(
    "server",
    [
        "tcp://127.0.0.1:40123",
        "tcp://127.9.0.3:40123",
        "tcp://[::1]:40123",
        "shm:///run/job/server-0.sock",
        "memory://a",
    ],
)
def test_without_lines_of_its_own_a_job_meets_at_the_usual_address(server: str) -> None:
    assert meeting_address(server) == "127.0.0.1"
