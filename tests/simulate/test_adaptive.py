"""An adaptive bound in whole jobs: its promise under all faults, and what it gains where stragglers come and go."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.test_state import FollowedWorld
from tests.simulate.swarm import draw
from tests.simulate.test_properties import FURTHER, scenarios

from paceline.core.adaptive import AdaptiveBound
from paceline.core.consistency import Consistency, adaptive, ssp
from paceline.core.messages import Pull
from paceline.simulate.happenings import MovedBound
from paceline.simulate.history import Violation
from paceline.simulate.outcome import rehearse
from paceline.simulate.scenario import Network, Scenario, Stragglers
from paceline.simulate.world import World

ADAPTIVE = (adaptive(0, 8), adaptive(0, 1), adaptive(2, 5), Consistency(4, "on_clock", lowest=0))
POINT = st.sampled_from(ADAPTIVE)


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bounds move often enough to meet faults; a job of a test has few clocks."""
    monkeypatch.setattr("paceline.core.adaptive.WINDOW", 2)


@pytest.mark.usefixtures("short_windows")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scenarios(points=POINT, others=FURTHER, rows=st.lists(POINT, max_size=2).map(tuple)))
def test_ssp6_reads_keep_the_bound_in_force_whatever_happens(scenario: Scenario) -> None:
    World(scenario).run()


@pytest.mark.usefixtures("short_windows")
def test_bounds_move_while_workers_die_and_messages_are_lost() -> None:
    num_moves = 0
    for seed in range(20):
        world = World(draw(seed, ADAPTIVE, num_clocks=(10, 30)))
        world.run()
        num_moves += sum(history.num_moves for history in world.histories.values())
    assert num_moves > 100


@pytest.mark.usefixtures("short_windows")
def test_a_replica_moves_its_bounds_as_its_server_does() -> None:
    num_moves = 0
    for seed in range(6):
        world = FollowedWorld(draw(seed, ADAPTIVE, num_clocks=(10, 20)))
        world.run()
        num_moves += sum(history.num_moves for history in world.histories.values())
    assert num_moves > 10


def find(monkeypatch: pytest.MonkeyPatch, admit: object) -> str:
    """Return what the checkers find wrong with servers that let pulls in so."""
    monkeypatch.setattr(AdaptiveBound, "admit", admit)
    for seed in range(20):
        try:
            World(draw(seed, ADAPTIVE, num_clocks=(10, 30))).run()
        except Violation as error:
            return str(error)
    return ""


@pytest.mark.usefixtures("short_windows")
def test_the_checker_finds_servers_that_hold_reads_to_their_highest_bound_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find(monkeypatch, lambda _, pull: pull).startswith("SSP6:")


@pytest.mark.usefixtures("short_windows")
def test_the_checker_finds_servers_that_are_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def admit(bound: AdaptiveBound, pull: Pull) -> Pull:
        return replace(pull, needs=max(pull.needs, pull.clock - bound.bound - 1))

    assert find(monkeypatch, admit).startswith("SSP6:")


# -- what it gains, on virtual time --------------------------------------------------------------------------------

CALM, FITFUL, LAME = Stragglers(), Stragglers("transient", 0.1, 4.0), Stragglers("persistent", factor=2.0)


def job(policy: Consistency, *parts: Stragglers, num_clocks: int = 160) -> Scenario:
    """Return a job of four workers whose stragglers come and go; each part has so many clocks."""
    rngs = [Random(f"{rank}") for rank in range(4)]
    recorded = tuple(
        tuple(rng.uniform(0.045, 0.055) * part.slowdown(rank, rng) for part in parts for _ in range(num_clocks))
        for rank, rng in enumerate(rngs)
    )
    network = Network(latency_s=(2e-4, 4e-4))
    return Scenario(
        policy, num_servers=1, num_clocks=num_clocks * len(parts), network=network, retry_s=1e6, recorded=recorded
    )


@pytest.mark.parametrize("num_servers", [1, 2])
def test_it_is_within_a_tenth_of_the_best_fixed_bound_on_fresher_values(num_servers: int) -> None:
    parts = (CALM, FITFUL, CALM)
    own = rehearse(replace(job(adaptive(0, 8), *parts), num_servers=num_servers))
    fixed = [rehearse(replace(job(ssp(bound), *parts), num_servers=num_servers)) for bound in (1, 4, 8)]
    assert own.seconds <= 1.1 * min(outcome.seconds for outcome in fixed)
    assert own.mean_lag < min(fixed[1].mean_lag, fixed[2].mean_lag)


def test_it_rises_when_stragglers_come_and_falls_when_they_go_and_says_so() -> None:
    outcome = rehearse(job(adaptive(0, 8), CALM, FITFUL, CALM), keeps_happenings=True)
    moved = [each for each in outcome.happenings if isinstance(each, MovedBound)]
    first, then = outcome.seconds * 0.3, outcome.seconds * 0.75
    assert max((each.bound for each in moved if each.t < first), default=0) <= 1
    assert max(each.bound for each in moved if first < each.t < then) >= 4
    assert moved[-1].bound <= 1
    assert [each.before for each in moved] == [0, *(each.bound for each in moved[:-1])]


def test_under_a_worker_that_is_always_slow_it_costs_no_time_and_hardly_any_staleness() -> None:
    own, fixed = rehearse(job(adaptive(0, 8), LAME)), rehearse(job(ssp(8), LAME))
    assert own.seconds == pytest.approx(fixed.seconds, rel=0.01)
    assert own.mean_lag < 0.4 < 4.0 < fixed.mean_lag


def test_equal_seeds_give_equal_moves() -> None:
    two = [rehearse(job(adaptive(0, 8), FITFUL), keeps_happenings=True).happenings for _ in range(2)]
    assert two[0] == two[1]
