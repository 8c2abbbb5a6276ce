from __future__ import annotations

import math

from paceline.observe.trace import Evaluated, Reported, Step
from paceline.tools.tune.driver import Values


def step(worker: int, clock: int, loss: float | None) -> Step:
    return Step(float(clock), worker, clock, 8, loss, 0.0, 0.1)


def test_training_losses_are_means_over_workers_and_reports() -> None:
    values = Values("loss", every=2)
    for clock, losses in enumerate([(8.0, 4.0), (4.0, 4.0), (2.0, 1.0)]):
        for worker, loss in enumerate(losses):
            values.add(step(worker, clock, loss))
    values.add(step(0, 3, None))
    values.add(step(0, 4, 1.0))
    assert values.so_far(measured=False) == [5.0]
    assert values.so_far(measured=False, ended=True) == [5.0, 1.25]  # what only one worker has reported counts too
    assert values.final(measured=False) == 1.25
    assert (values.has_measured, values.so_far(measured=True), values.final(measured=True)) == (False, [], None)


def test_a_first_report_is_in_every_mean() -> None:
    values = Values("loss", every=1)
    for clock, loss in enumerate((4.0, 2.0)):
        values.add(step(0, clock, loss))
    assert values.so_far(measured=False) == [4.0, 2.0]
    values.add(step(1, 0, 8.0))
    assert values.so_far(measured=False) == [6.0]
    assert values.so_far(measured=False, ended=True) == [6.0, 2.0]


def test_what_no_step_has_counts_as_well() -> None:
    values = Values("loss", every=1)
    values.add(Reported(0.0, 0, 0, 3.0))
    values.add(Reported(1.0, 0, 0, None))
    assert values.so_far(measured=False)[0] == 3.0
    assert math.isnan(values.final(measured=False) or 0.0)


def test_measurements_win_over_training() -> None:
    loss, accuracy = Values("loss", every=1), Values("accuracy", every=1)
    for values in (loss, accuracy):
        values.add(step(0, 0, 9.0))
        values.add(Evaluated(1.0, 0, 1, 0.5, 0.25))
        values.add(Evaluated(2.0, 0, 2, None, 0.75))
    assert loss.so_far(measured=True)[:1] == [0.5]
    assert math.isnan(loss.final(measured=True) or 0.0)
    assert accuracy.so_far(measured=False) == [0.25, 0.75]
    assert accuracy.final(measured=True) == 0.75
