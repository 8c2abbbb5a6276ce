"""The axes, their named points and their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.consistency import Consistency, adaptive, asynchronous, backup, bsp, essp, ssp
from paceline.errors import UsageError


@st.composite
def points(draw: st.DrawFn) -> Consistency:
    visible = draw(st.sampled_from(["on_arrival", "on_clock"]))
    if draw(st.booleans()):
        lowest = draw(st.integers(0, 20))
        return Consistency(lowest + draw(st.integers(1, 20)), visible, lowest=lowest)
    return Consistency(
        bound=draw(st.none() | st.integers(0, 20)),
        visible=visible,
        deliver=draw(st.sampled_from(["on_pull", "on_clock"])),
        backups=draw(st.integers(0, 5)) if visible == "on_clock" else 0,
    )


@given(points())
def test_text_and_value_are_inverse(point: Consistency) -> None:
    assert Consistency.parse(str(point)) == point
    assert Consistency.parse(f"  {str(point).upper()} ") == point


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("bsp", bsp()),
        ("ssp:3", ssp(3)),
        ("essp:0", essp(0)),
        ("asynchronous", asynchronous()),
        ("async", asynchronous()),
        ("backup:2", backup(2)),
        ("bound=2", ssp(2)),
        ("bound=none", asynchronous()),
        ("bound=0,visible=on_clock", bsp()),
        (" bound = 4 , deliver = on_clock ", essp(4)),
        ("adaptive", adaptive(0, 8)),
        ("adaptive:1:4", adaptive(1, 4)),
        ("bound=0..8", adaptive()),
        ("bound=2..3,visible=on_clock", Consistency(3, "on_clock", lowest=2)),
        ("bound=1,visible=on_clock,backups=1", Consistency(1, "on_clock", backups=1)),
    ],
)
def test_what_can_be_said(text: str, point: Consistency) -> None:
    assert Consistency.parse(text) == point


@pytest.mark.parametrize(
    ("point", "text"),
    [
        (bsp(), "bsp"),
        (ssp(0), "ssp:0"),
        (essp(2), "essp:2"),
        (asynchronous(), "asynchronous"),
        (backup(3), "backup:3"),
        (adaptive(1, 4), "adaptive:1:4"),
    ],
)
def test_a_named_point_says_its_name(point: Consistency, text: str) -> None:
    assert str(point) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bps",
            "unknown consistency 'bps'. Expected one of bsp, ssp:S, essp:S, asynchronous, backup:B, adaptive:L:S, or "
            "bound=S|L..S|none",
        ),
        ("", "unknown consistency ''"),
        ("bsp:1", "unknown consistency 'bsp:1'"),
        ("asynchronous:2", "unknown consistency 'asynchronous:2'"),
        ("ssp", "consistency 'ssp' lacks its number: write ssp:3, for example."),
        ("backup", "consistency 'backup' lacks its number: write backup:3"),
        ("ssp:three", "consistency 'ssp:three': 'three' is not a whole number."),
        ("essp:", "consistency 'essp:': '' is not a whole number."),
        ("ssp:1.5", "'1.5' is not a whole number"),
        (
            "ssp:-1",
            "staleness bound is -1, expected 0 or more clocks (or none to never wait). Known consistencies: bsp",
        ),
        ("backup:0", "backup:0 asks for 0 backup workers, expected 1 or more (or bsp)."),
        ("bound=0,backups=-1", "number of backup workers is -1, expected 0 or more."),
        ("bound=0,backups=1", "backup workers need visible=on_clock: a quorum completes a clock"),
        (
            "visible=on_clock",
            "'visible=on_clock' does not say its bound. Expected bound=S|L..S|none,visible=",
        ),
        ("bound=1,colour=red", "consistency 'bound=1,colour=red' has no axis 'colour'. Expected bound=S|L..S|none"),
        ("bound=1,visible=later", "visible is 'later', expected on_arrival or on_clock."),
        ("bound=1,deliver=never", "deliver is 'never', expected on_pull or on_clock."),
        ("bound=x", "'x' is not a whole number"),
        ("bound=1,backups=", "'' is not a whole number"),
        ("adaptive:3", "consistency 'adaptive:3' lacks one of its numbers: write adaptive:0:8, for example."),
        ("adaptive:1:2:3", "unknown consistency 'adaptive:1:2:3'"),
        ("adaptive:3:3", "an adaptive bound moves from 3 to 3, expected two numbers of clocks, the lower one first"),
        ("adaptive:-1:3", "an adaptive bound moves from -1 to 3"),
        ("bound=1..none", "an adaptive bound moves from 1 to none"),
        ("bound=..3", "consistency 'bound=..3': '' is not a whole number."),
        ("bound=0..2,deliver=on_clock", "an adaptive bound needs deliver=on_pull and no backups"),
        ("bound=0..2,visible=on_clock,backups=1", "an adaptive bound needs deliver=on_pull and no backups"),
    ],
)
def test_what_cannot_be_said_is_answered_with_what_can(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Consistency.parse(text)
    assert message in str(caught.value)


@given(st.text(max_size=30))
def test_any_other_text_is_a_usage_error(text: str) -> None:
    try:
        point = Consistency.parse(text)
    except UsageError:
        return
    assert Consistency.parse(str(point)) == point


def test_t1_a_read_at_clock_c_needs_all_clocks_below_c_minus_s() -> None:
    assert [ssp(2).needs(clock) for clock in range(5)] == [0, 0, 0, 1, 2]
    assert [bsp().needs(clock) for clock in range(3)] == [0, 1, 2]
    assert asynchronous().needs(99) == 0


def test_an_adaptive_bound_promises_its_highest_and_a_read_that_no_server_answers_keeps_its_lowest() -> None:
    assert [adaptive(1, 3).needs(clock) for clock in range(6)] == [0, 0, 0, 0, 1, 2]
    assert [adaptive(1, 3).unasked(clock) for clock in range(6)] == [0, 0, 1, 2, 3, 4]
    assert [ssp(3).unasked(clock) for clock in range(6)] == [ssp(3).needs(clock) for clock in range(6)]
