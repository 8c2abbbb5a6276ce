"""Readers and relays killed at random: those that are left see no wrong byte, and the trainer is not held up."""

import pytest
from tests.faults.kill_readers import ALL, BESIDE, kill_in_a_job


def test_kills_of_readers_and_relays_make_no_wrong_byte_and_do_not_hold_up_the_trainer() -> None:
    assert kill_in_a_job("tcp", BESIDE, 6, seed=3, num_readers=3).killed.total() == 6


@pytest.mark.campaign
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_kills_of_readers_relays_servers_and_the_trainer_make_no_wrong_byte(transport: str) -> None:
    assert set(kill_in_a_job(transport, ALL, 30, seed=4).killed) == set(ALL)
