from __future__ import annotations

from paceline.tools.tune.driver import configure


def test_what_fills_a_place_is_not_looked_at_for_places() -> None:
    told = configure({}, ["{a}{b}{c}"], {"a": "{b}", "b": "{a}", "d": 3})
    assert told.args == ("{b}{a}{c}", "--d=3")
