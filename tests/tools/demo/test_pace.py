from itertools import islice

from paceline.tools.demo.runs import ComputePace, describe


def test_a_steady_worker_always_takes_the_same() -> None:
    assert set(islice(ComputePace(0.02, fitful=False, seed=3).clocks(), 50)) == {0.02}


def test_a_fitful_worker_is_slow_in_a_quarter_of_its_clocks_and_not_much_slower_on_average() -> None:
    clocks = list(islice(ComputePace(1.0, fitful=True, seed=3).clocks(), 4000))
    assert set(clocks) == {0.5, 3.0}
    assert 0.23 < clocks.count(3.0) / len(clocks) < 0.27
    assert 1.0 < sum(clocks) / len(clocks) < 1.25


def test_its_slow_clocks_follow_from_the_seed() -> None:
    first, again, other = (list(islice(ComputePace(1.0, fitful=True, seed=seed).clocks(), 50)) for seed in (3, 3, 4))
    assert first == again != other


def test_the_report_says_how_slow_it_is() -> None:
    assert describe(0.02) == "worker 1 needs 60 ms in 25% of its clocks (drawn by seed) and 10 ms in the others"
