import numpy as np
import pytest

from paceline.tools.reproduce.problems import Factorization, Perceptron
from paceline.tools.reproduce.virtual import FixedStep, LearningCurve, learn_along, scenario, simulate_run


@pytest.mark.parametrize("problem", [Factorization.make(0, num_workers=2), Perceptron.make(0)])
def test_a_gradient_is_that_of_the_loss(problem: Factorization | Perceptron) -> None:
    """The gradient of all samples, along a line, beside a difference of losses."""
    start, random = problem.start(), np.random.default_rng(0)
    line = random.normal(size=start.size)
    line /= np.linalg.norm(line)
    if isinstance(problem, Factorization):
        whole = sum(problem.gradient(start, worker, clock) for worker in range(2) for clock in range(problem.parts))
        scale = 2.0  # steps are those of half the square loss
    else:
        full = Perceptron(problem.points, problem.labels, problem.hidden, 200_000, 0)
        whole, scale = full.gradient(start, 0, 0), 1.0
    slope = (problem.loss(start + 1e-5 * line) - problem.loss(start - 1e-5 * line)) / 2e-5
    assert scale * (whole @ line) == pytest.approx(slope, rel=0.05, abs=2e-3)


def test_parts_of_a_clock_add_up() -> None:
    for problem in (Factorization.make(1), Perceptron.make(1)):
        values = problem.start()
        parts = sum(problem.gradient(values, 1, 2, part, 4) for part in range(4))
        assert parts == pytest.approx(problem.gradient(values, 1, 2))


def test_bsp_learns_what_a_loop_does() -> None:
    problem, values = Perceptron.make(2), Perceptron.make(2).start()
    run = simulate_run(scenario("bsp", seed=0, workers=3, clocks=10))
    curve = learn_along(run, problem, FixedStep(0.1))
    for clock in range(10):
        values -= 0.1 * sum(problem.gradient(values, worker, clock) for worker in range(3))
    assert curve.losses[-1] == pytest.approx(problem.loss(values), rel=1e-9)
    assert curve.pushes[-1] == 30
    assert curve.seconds[-1] >= 10


def test_a_worker_alone_sees_its_own_pushes_under_any_bound() -> None:
    problem = Perceptron.make(3)
    runs = [simulate_run(scenario(policy, seed=0, workers=1, clocks=12, is_lazy=True)) for policy in ("bsp", "ssp:8")]
    plain, lazy = (learn_along(run, problem, FixedStep(0.1)).losses[-1] for run in runs)
    assert lazy == pytest.approx(plain, rel=1e-9)


def test_lazy_reads_grow_old_and_sent_ones_do_not() -> None:
    lazy = simulate_run(scenario("ssp:4", seed=0, clocks=60, spread=0.02, is_lazy=True)).ages()
    sent = simulate_run(scenario("essp:4", seed=0, clocks=60, spread=0.02)).ages()
    assert min(lazy) == -5
    assert sum(lazy.values()) == pytest.approx(1)
    assert sent[-1] > 0.7 > 0.2 > lazy[-1]


def test_late_pushes_of_backups_do_not_count() -> None:
    run = simulate_run(scenario("backup:2", seed=1, workers=6, clocks=40, stragglers="transient:0.2:6"))
    assert len(run.order) < 6 * 40
    assert learn_along(run, Perceptron.make(0), FixedStep(0.05)).pushes[-1] == len(run.order)


def test_a_step_too_large_diverges() -> None:
    run = simulate_run(scenario("ssp:8", seed=0, clocks=30, is_lazy=True))
    curve = learn_along(run, Factorization.make(0), FixedStep(2.0))
    assert curve.losses[-1] == np.inf
    assert curve.seconds_to(0.0) == np.inf


def test_the_time_to_a_target() -> None:
    curve = LearningCurve((0.0, 1.0, 2.0), (0, 8, 16), (3.0, 1.0, 0.5))
    assert (curve.seconds_to(1.0), curve.seconds_to(0.1)) == (1.0, np.inf)
