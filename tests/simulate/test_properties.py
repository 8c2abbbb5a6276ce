"""Any scenario that can be drawn keeps every rule: the checkers of the history are on all the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.simulate.swarm import draw

from paceline.core.consistency import Consistency, asynchronous, backup, bsp, essp, ssp
from paceline.simulate.history import History
from paceline.simulate.scenario import Faults, Network, Scenario, Stragglers
from paceline.simulate.world import World

POINTS = st.one_of(
    st.just(bsp()),
    st.just(asynchronous()),
    st.builds(backup, st.integers(1, 3)),
    st.builds(ssp, st.integers(0, 8)),
    st.builds(essp, st.integers(0, 8)),
    st.builds(
        Consistency,
        bound=st.none() | st.integers(0, 4),
        visible=st.just("on_clock"),
        deliver=st.sampled_from(["on_pull", "on_clock"]),
        backups=st.integers(0, 2),
    ),
)
CLEAN = st.just(Network())
ALONE: st.SearchStrategy[tuple[Consistency, ...]] = st.just(())  # one table
FURTHER = st.lists(POINTS, max_size=2).map(tuple)
ONE = st.just(1)
ROUGH = st.builds(
    Network,
    latency_s=st.sampled_from([(0.0001, 0.0005), (0.0001, 0.02)]),
    drop=st.sampled_from([0.0, 0.05, 0.2]),
    duplicate=st.sampled_from([0.0, 0.2, 0.5]),
    reorder=st.sampled_from([0.0, 0.2, 0.5]),
    cut=st.sampled_from([0.0, 0.01]),
    spoil=st.sampled_from([0.0, 0.05]),
)
FATES = st.builds(
    Faults,
    deaths=st.integers(0, 3),
    pauses=st.integers(0, 2),
    stops=st.integers(0, 1),
    stalls=st.integers(0, 2),
    restart=st.booleans(),
    joins=st.integers(0, 2),
    early=st.sampled_from([0.0, 0.3]),
)
STRAGGLERS = st.builds(
    Stragglers,
    kind=st.sampled_from(["none", "transient", "persistent"]),
    share=st.sampled_from([0.1, 0.4]),
    factor=st.sampled_from([2.0, 10.0]),
)


def patient(scenario: Scenario) -> Scenario:
    """Return the scenario with retries only where messages are dropped, so that a lost wake-up is a hang."""
    return replace(scenario, retry_s=0.02 if scenario.network.drop else 1e6)


def scenarios(
    points: st.SearchStrategy[Consistency] = POINTS,
    networks: st.SearchStrategy[Network] = CLEAN | ROUGH,
    fates: st.SearchStrategy[Faults] = FATES,
    others: st.SearchStrategy[tuple[Consistency, ...]] = ALONE,
    rows: st.SearchStrategy[tuple[Consistency, ...]] = ALONE,
    num_pushes: st.SearchStrategy[int] = ONE,
) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        consistency=points,
        num_workers=st.integers(1, 5),
        num_servers=st.integers(1, 3),
        num_clocks=st.integers(1, 12),
        compute_s=st.sampled_from([(0.001, 0.002), (0.009, 0.011), (0.001, 0.04)]),
        apply_s=st.sampled_from([0.0, 0.002]),
        stragglers=STRAGGLERS,
        network=networks,
        fate=fates,
        refresh=st.sampled_from([0.0, 0.5, 1.0]),
        others=others,
        rows=rows,
        num_pushes=num_pushes,
        seed=st.integers(0, 2**32),
    ).map(patient)


@given(scenarios(others=FURTHER, rows=FURTHER, num_pushes=st.sampled_from([1, 3])))
def test_whatever_happens_no_rule_is_broken_and_all_workers_finish(scenario: Scenario) -> None:
    World(scenario).run()


@pytest.mark.parametrize("window", [1, 3])
def test_where_servers_keep_few_answers_workers_wait_and_none_is_refused(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("paceline.core.exactly_once.WINDOW", "paceline.core.worker.WINDOW"):
        monkeypatch.setattr(place, window)
    for seed in range(60):
        world = World(replace(draw(seed), num_pushes=3))
        world.run()
        assert sum(len(pushes) for history in world.histories.values() for pushes in history.made.values()) > 0


@given(scenarios(points=st.just(bsp()), networks=ROUGH, fates=st.just(Faults())))
def test_bsp4_under_bsp_a_rough_network_does_not_show_in_what_is_applied(scenario: Scenario) -> None:
    rough = World(replace(scenario, network=replace(scenario.network, cut=0.0, spoil=0.0))).run()
    clean = World(replace(scenario, network=Network())).run()
    assert applied(rough) == applied(clean)
    all_workers = list(range(scenario.num_workers))
    assert applied(clean) == [[(clock, all_workers) for clock in range(scenario.num_clocks)]] * scenario.num_servers


@given(scenarios(points=st.builds(backup, st.integers(1, 3)), fates=st.just(Faults())))
def test_t33_every_clock_has_a_full_quorum_of_distinct_workers(scenario: Scenario) -> None:
    scenario = replace(scenario, network=replace(scenario.network, cut=0.0, spoil=0.0))
    quorum = max(1, scenario.num_workers - scenario.consistency.backups)
    for shard in applied(World(scenario).run()):
        # A late worker may jump to a clock that the others never start, and push there; no other is left then.
        assert [clock for clock, _ in shard[: scenario.num_clocks]] == list(range(scenario.num_clocks))
        assert all(quorum <= len(set(workers)) == len(workers) for _, workers in shard[: scenario.num_clocks])


@pytest.mark.parametrize("staleness", [4, 8])
def test_t8_with_even_workers_eager_values_stay_fresh_and_lazy_ones_age_up_to_the_bound(staleness: int) -> None:
    even = Scenario(essp(staleness), num_clocks=100, compute_s=(0.01, 0.0101), refresh=0.0)
    eager = World(even).run()
    lazy = World(replace(even, consistency=ssp(staleness))).run()
    assert mean_age(eager) <= 1.1
    assert staleness / 2 <= mean_age(lazy) <= staleness
    assert min(read.differential for read in lazy.reads) == -(staleness + 1)


@given(scenarios())
def test_t1_no_read_is_fresher_than_the_clock_or_older_than_the_bound(scenario: Scenario) -> None:
    history = World(scenario).run()
    bound = scenario.consistency.bound
    if bound is not None:
        assert all(read.differential >= -(bound + 1) for read in history.reads)
    if scenario.consistency == bsp():
        assert all(read.differential == -1 for read in history.reads)


def applied(history: History) -> list[list[tuple[int, list[int]]]]:
    """Return per server, clock by clock, the workers whose updates were summed, in this order."""
    return [
        [(clock, [push_id.worker for push_id in ids]) for clock, ids in shard.contributors.items()]
        for shard in history.shards
    ]


def mean_age(history: History) -> float:
    """Return by how many clocks reads lagged behind the freshest possible values, on average."""
    return sum(-1 - read.differential for read in history.reads) / len(history.reads)
