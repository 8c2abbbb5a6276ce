"""Servers are killed by SIGKILL in the middle of updates, of what they write down, and as they come up again."""

from tests.faults.kill_campaign import Job, check, jobs


def test_servers_that_die_in_the_middle_of_what_they_do_lose_and_double_nothing() -> None:
    assert check(Job("tcp", "ssp:1", num_servers=1, num_kills=6)) == 6


def test_a_campaign_kills_under_every_carrier_and_policy_and_the_same_seed_kills_the_same() -> None:
    first, again = (list(zip(range(32), jobs(60, seed), strict=False)) for seed in (7, 7))
    assert first == again
    assert len({(job.carrier, job.consistency, job.num_servers) for _, job in first}) == 32
    assert {job.num_kills * job.num_servers for _, job in first} == {60}
