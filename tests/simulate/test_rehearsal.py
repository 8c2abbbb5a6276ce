"""Rehearsals: lines, lazy fetches, batches, workers that come and go, the model; beside the checked world."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
from paceline.errors import ProtocolBug, UsageError
from paceline.simulate.happenings import FinishedClock, ReadValues
from paceline.simulate.outcome import Outcome, rehearse
from paceline.simulate.rehearsal import Rehearsal
from paceline.simulate.scenario import DataServers, Faults, Network, Scenario, SimulatedLines, Stragglers
from paceline.simulate.world import World

STEADY = Scenario(num_servers=1, num_clocks=60, compute_s=(0.01, 0.01), network=Network(latency_s=(1e-4, 1e-4)))
LAZY = replace(STEADY, refresh=0.0, num_reads=10, compute_s=(0.009, 0.011))


def shares(outcome: Outcome) -> dict[int, float]:
    total = sum(outcome.differentials.values())
    return {differential: count / total for differential, count in outcome.differentials.items()}


@pytest.mark.parametrize("policy", [bsp(), ssp(2), essp(3), asynchronous(), backup(1)])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_every_worker_finishes_and_the_ages_keep_the_bound(policy: Consistency, num_servers: int) -> None:
    scenario = replace(STEADY, consistency=policy, num_servers=num_servers, stragglers=Stragglers("transient"))
    outcome = rehearse(scenario)
    if policy.backups:
        assert outcome.num_refused > 0
    else:
        assert [own.num_clocks for own in outcome.workers] == [60] * 4
        assert sum(outcome.differentials.values()) == 240
        assert outcome.num_refused == 0
    if policy.bound is not None:
        assert outcome.max_lag <= policy.bound
    assert all(outcome.freshest.get(age, 0) <= count for age, count in outcome.differentials.items())


@pytest.mark.parametrize("policy", [bsp(), ssp(3), asynchronous()])
def test_it_finds_what_the_checked_world_finds(policy: Consistency) -> None:
    """Two drivers of the same cores, with the same stragglers: their networks draw other delays."""
    scenario = replace(STEADY, consistency=policy, num_clocks=150, stragglers=Stragglers("transient", 0.2, 3))
    fast, world = rehearse(scenario), World(scenario)
    history = world.run()
    checked_s = max(actor.finished_at for actor in world.actors.values())
    assert fast.seconds == pytest.approx(checked_s, rel=0.02)
    checked = Counter(min(-1, read.differential) for read in history.reads)
    distance = sum(abs(fast.differentials.get(age, 0) - checked[age]) for age in {*fast.differentials, *checked}) / 2
    assert distance <= 0.1 * sum(checked.values())


def test_lazy_fetches_spread_over_the_bound_and_deliveries_are_fresh() -> None:
    """The figure of the papers: ssp reads every age alike, essp mostly the freshest values."""
    lazy, eager = (
        shares(rehearse(replace(LAZY, consistency=ssp(3)))),
        shares(rehearse(replace(LAZY, consistency=essp(3)))),
    )
    assert sorted(lazy) == [-4, -3, -2, -1]
    assert all(0.2 < lazy[age] < 0.4 for age in (-4, -3, -2))
    assert lazy[-1] < 0.2
    assert eager[-1] > 0.5
    assert -4 not in eager
    assert shares(rehearse(replace(LAZY, consistency=ssp(3), refresh=1.0)))[-1] > 0.5


def test_a_line_that_is_full_sets_the_pace() -> None:
    """Four workers push and fetch 1 MB through the line of one server: 32 ms each way at 1 Gbit/s."""
    lines = SimulatedLines(125e6, gradient_bytes=1e6, value_bytes=1e6)
    full = rehearse(replace(STEADY, consistency=bsp(), lines=lines))
    clock_s = full.seconds / 60
    assert clock_s == pytest.approx(0.010 + 0.032 + 0.032, rel=0.04)
    assert full.uses["servers"].receiving == pytest.approx(0.032 / clock_s, rel=0.05)
    assert full.uses["workers"].sending == pytest.approx(0.008 / clock_s, rel=0.05)
    assert full.uses["servers"].received_bytes == pytest.approx(60 * 4 * 1e6, rel=0.01)
    shared = rehearse(replace(STEADY, consistency=bsp(), lines=lines, num_servers=4))
    assert shared.seconds < 0.7 * full.seconds
    free = rehearse(STEADY)
    assert free.seconds / 60 == pytest.approx(0.0102, rel=0.02)
    assert free.uses["servers"].receiving == 0


def test_under_bsp_long_values_leave_while_pushes_come_as_between_machines() -> None:
    """A line carries both ways at once: of the 32 ms of the values all but a seventh passes while pushes come."""
    lines = SimulatedLines(125e6, gradient_bytes=1e6, value_bytes=1e6, early=True)
    early = rehearse(replace(STEADY, consistency=bsp(), lines=lines))
    assert early.seconds / 60 == pytest.approx(0.010 + 0.032 + 0.032 / 7, rel=0.05)
    assert [own.num_clocks for own in early.workers] == [60] * 4
    assert early.max_lag == 0
    assert early.uses["servers"].sent_bytes == pytest.approx(60 * 4 * 1e6, rel=0.03)
    for policy in (ssp(0), backup(1)):
        late = replace(STEADY, consistency=policy, lines=replace(lines, early=False))
        assert rehearse(replace(late, lines=lines)).seconds == rehearse(late).seconds
    short = replace(STEADY, consistency=bsp(), lines=replace(lines, gradient_bytes=2e5, value_bytes=2e5))
    assert rehearse(short).seconds == rehearse(replace(short, lines=replace(short.lines, early=False))).seconds


@pytest.mark.parametrize("beside", [False, True])
def test_early_values_are_sent_once_also_where_workers_come_and_go(beside: bool) -> None:
    lines = SimulatedLines(125e6, gradient_bytes=2e6, value_bytes=2e6, early=True, beside=beside)
    base = replace(STEADY, consistency=bsp(), lines=lines, num_servers=2)
    steady = rehearse(base)
    sent = steady.uses["servers"].sent_bytes
    assert sent <= rehearse(replace(base, lines=replace(lines, early=False))).uses["servers"].sent_bytes * 1.02
    come_and_go = Faults(deaths=2, restart=True, restart_s=0.05, joins=1, leaves=1)
    for seed in range(3):
        outcome = rehearse(replace(base, fate=come_and_go, seed=seed))
        assert outcome.max_lag == 0
        assert outcome.num_joined == outcome.num_deaths + 1


def test_a_server_that_computes_sets_the_pace() -> None:
    outcome = rehearse(replace(STEADY, consistency=asynchronous(), apply_s=0.005))
    assert outcome.seconds / 60 == pytest.approx(4 * 0.005, rel=0.02)
    assert outcome.server_busy > 0.98


def test_a_data_server_that_is_slow_sets_the_pace() -> None:
    slow = rehearse(replace(STEADY, consistency=asynchronous(), data=DataServers(1, batch_s=0.01)))
    assert slow.seconds / 60 == pytest.approx(4 * 0.01, rel=0.1)
    assert slow.load_share > 0.6
    fast = rehearse(replace(STEADY, data=DataServers(2, batch_s=0.001, batch_bytes=1000)))
    assert fast.load_share < 0.05
    assert fast.seconds == pytest.approx(rehearse(STEADY).seconds, rel=0.05)


def test_workers_that_are_killed_come_back_join_and_leave() -> None:
    come_and_go = Faults(deaths=2, restart=True, restart_s=0.05, joins=2, leaves=1)
    for seed in range(5):
        outcome = rehearse(replace(STEADY, consistency=ssp(2), fate=come_and_go, seed=seed, num_workers=6))
        assert outcome.num_deaths + outcome.num_left >= 2
        assert outcome.num_joined == outcome.num_deaths + 2
        assert len(outcome.workers) == 8
        assert outcome.max_lag <= 2


def test_others_wait_for_the_lease_of_a_worker_that_is_gone() -> None:
    gone = replace(STEADY, consistency=bsp(), fate=Faults(deaths=1), lease_s=0.4)
    outcome = rehearse(gone)
    assert outcome.num_deaths == 1
    assert outcome.seconds == pytest.approx(rehearse(STEADY).seconds + 0.4, rel=0.05)
    assert sorted(own.num_clocks for own in outcome.workers)[1:] == [60] * 3


def test_a_model_learns_and_stale_values_cost() -> None:
    """At a high rate, age costs; without noise from stragglers the same seeds give the same gradients."""
    model = replace(STEADY, loss=True, num_clocks=200)
    fresh = rehearse(replace(model, consistency=bsp()))
    assert fresh.losses[0][2] > 0.1
    assert fresh.last_loss is not None
    assert fresh.last_loss < 0.01
    high = replace(model, rate=1.2, refresh=0.0)
    stale = rehearse(replace(high, consistency=ssp(8)))
    assert stale.last_loss is not None
    assert stale.last_loss > 3 * (rehearse(replace(high, consistency=bsp())).last_loss or 0)


def test_two_servers_train_as_one_does() -> None:
    one, two = (rehearse(replace(STEADY, loss=True, num_servers=number)) for number in (1, 2))
    assert one.last_loss == pytest.approx(two.last_loss, rel=0.5)
    assert len(one.losses) == len(two.losses) == 240


def test_recorded_times_take_the_place_of_drawn_ones() -> None:
    recorded = replace(STEADY, num_workers=2, recorded=((0.01, 0.03), (0.02,)))
    happenings = rehearse(recorded, keeps_happenings=True).happenings
    first = [each.step_s for each in happenings if isinstance(each, FinishedClock) and each.worker == 0]
    assert first[:2] == pytest.approx([0.0104, 0.0402], abs=0.001)
    assert rehearse(recorded).seconds == pytest.approx(30 * 0.02 + 30 * 0.03, rel=0.03)


def test_what_happened_adds_up() -> None:
    outcome = rehearse(replace(STEADY, consistency=ssp(1), stragglers=Stragglers("transient")), keeps_happenings=True)
    reads = [each for each in outcome.happenings if isinstance(each, ReadValues)]
    assert Counter(min(-1, read.value_clock - 1 - read.clock) for read in reads) == outcome.differentials
    steps = [each for each in outcome.happenings if isinstance(each, FinishedClock)]
    for own in outcome.workers:
        mine = [step for step in steps if step.worker == own.rank]
        assert sum(step.wait_s for step in mine) == pytest.approx(own.wait_s)
        assert sum(step.step_s for step in mine) == pytest.approx(own.wait_s + own.busy_s)
    assert rehearse(STEADY).happenings == ()


@pytest.mark.parametrize(
    "scenario",
    [
        replace(STEADY, others=(bsp(),)),
        replace(STEADY, network=Network(drop=0.1)),
        replace(STEADY, num_pushes=2),
        replace(STEADY, fate=Faults(stalls=1)),
    ],
)
def test_what_only_the_checked_world_plays_is_refused(scenario: Scenario) -> None:
    with pytest.raises(UsageError, match="Run a World"):
        rehearse(scenario)


def test_workers_that_wait_in_vain_are_named() -> None:
    """One answer of the server is lost on the way: the heap runs dry, and the worker is named."""
    job = Rehearsal(STEADY)
    lost = [entry for entry in job._heap if entry[3] == (3, 0)]
    assert len(lost) == 1
    job._heap.remove(lost[0])
    with pytest.raises(ProtocolBug, match="wait in vain"):
        job.run()
