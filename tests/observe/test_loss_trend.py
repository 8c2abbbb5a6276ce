"""How the loss goes, in one sentence, from made-up losses."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.observe.loss_trend import NUM_SPANS, UNKNOWN, LossTrend, LossVerdict
from paceline.observe.progress import RunView
from paceline.observe.screen import as_data, screen_lines
from paceline.observe.story import story_lines
from paceline.observe.trace import ReadRecord, Reported, Step, Trace, trace_path

STALE = (20, 41)


def verdict_of(
    loss: Callable[[int], float], num: int = 400, staleness: tuple[int, int] | None = STALE, seed: int = 0
) -> LossVerdict:
    """Return the verdict on so many losses, each with some noise, a twentieth of a second apart."""
    trend, draw = LossTrend(), random.Random(seed)
    for clock in range(num):
        trend.take_in(Step(100 + clock / 20, 0, clock, 8, loss(clock) + draw.gauss(0, 0.05), 0.0, 0.05))
    return trend.verdict(staleness)


def test_few_losses_say_nothing() -> None:
    assert LossTrend().verdict(None) == UNKNOWN
    assert verdict_of(lambda _: 1.0, num=30) == UNKNOWN


def test_a_loss_that_falls_bears_its_staleness() -> None:
    found = verdict_of(lambda clock: math.exp(-clock / 300))
    assert found.trend == "falls"
    assert found.text.endswith("20 s ago, on values 20 clocks old (p99 41): the learning rate is not too high for that")
    assert verdict_of(lambda clock: math.exp(-clock / 300), staleness=(0, 0)).text.endswith(", on fresh values")


def test_a_loss_that_falls_steeply_at_first_falls() -> None:
    assert verdict_of(lambda clock: 1 + 20 * math.exp(-clock / 12), num=64).trend == "falls"


def test_a_loss_that_rises_on_old_values_blames_the_rate_for_that_staleness() -> None:
    found = verdict_of(lambda clock: 0.3 + math.exp((clock - 400) / 40))
    assert found.trend == "rises"
    assert found.text.endswith("the learning rate is too high for that; lower it, or the staleness")
    fresh = verdict_of(lambda clock: 0.3 + math.exp((clock - 400) / 40), staleness=(0, 1))
    assert fresh.text.endswith(", on fresh values: the learning rate is too high, whatever the staleness")
    assert verdict_of(lambda clock: clock / 100, staleness=None).text.endswith(": a lower learning rate may help")


@pytest.mark.parametrize("seed", range(40))
def test_noise_does_not_rise(seed: int) -> None:
    assert verdict_of(lambda _: 1.0, seed=seed).trend != "rises"
    assert verdict_of(lambda clock: math.exp(-clock / 30), seed=seed).trend != "rises"


def test_a_loss_that_has_come_down_and_stays_there_stands() -> None:
    found = verdict_of(lambda clock: math.exp(-clock / 20), num=2000)
    assert found.trend == "stands"
    assert found.text.endswith(": compare with a run of a lower rate, or of less staleness")


def test_a_loss_that_is_not_finite_is_told_before_all() -> None:
    trend = LossTrend()
    trend.take_in(Reported(100.0, 2, 17, None, "inf"))
    trend.take_in(Reported(101.0, 1, 18, None, "nan"))
    found = trend.verdict((0, 0))
    assert found.trend == "not finite"
    assert found.text.startswith("the loss of worker 2 is inf since clock 17, on fresh values")


def test_losses_whose_sum_is_beyond_floats_are_told() -> None:
    trend = LossTrend()
    for clock in range(NUM_SPANS):
        trend.take_in(Step(100 + clock / 2, 0, clock, 8, 1.5e308, 0.0, 0.5))
    assert trend.verdict(None).text == "the loss stands at inf"


def test_memory_is_bounded_and_time_may_go_back() -> None:
    trend = LossTrend()
    for t in (50.0, 1e6, 49.0, 2e6, 60.0):
        trend.take_in(Step(t, 0, 0, 1, 1.0, 0.0, 0.1))
    assert len(trend._spans) <= NUM_SPANS


def test_screens_data_and_stories_have_the_sentence(tmp_path: Path) -> None:
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        for clock in range(400):
            t = 100 + clock / 20
            trace.record(ReadRecord(t, 0, "w", clock, clock - min(clock, 5), 0.0, "cache"))
            trace.record(Step(t, 0, clock, 8, 1.0 - clock / 400, 0.0, 0.05))
    view = RunView(tmp_path / "trace")
    view.refresh(0.0)
    shown = view.picture()
    assert "the loss falls" in "\n".join(screen_lines(shown, 80, 24))
    assert as_data(shown)["loss"] == {"trend": "falls", "text": shown.loss.text}
    assert "on values 5 clocks old (p99 5): the learning rate is not too high" in "\n".join(story_lines(tmp_path))
