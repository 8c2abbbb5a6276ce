"""Workers meet where they reach the servers, and off this machine only where the user lets them."""

import pytest

from paceline.collective.group import meeting_address
from paceline.errors import UsageError
from paceline.job.machines import own_addresses


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


def test_between_machines_workers_do_not_meet_unless_the_user_lets_them() -> None:
    if not own_addresses():
        pytest.skip("this machine has no address but that of loopback")
    address = own_addresses()[0]
    host = f"[{address}]" if ":" in address else address

    with pytest.raises(UsageError, match=r"Gloo, which carries them, does not encrypt.*PACELINE_PLAIN_COLLECTIVES=1"):
        meeting_address(f"tcp://{host}:40123")
    assert meeting_address(f"tcp://{host}:40123", plain=True) == address
