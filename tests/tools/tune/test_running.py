from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

from paceline.tools.tune.driver import TrialProcess, configure


def test_what_fills_a_place_is_not_looked_at_for_places() -> None:
    told = configure({}, ["{a}{b}{c}"], {"a": "{b}", "b": "{a}", "d": 3})
    assert told.args == ("{b}{a}{c}", "--d=3")


def test_of_a_trial_whose_launcher_was_killed_the_signal_is_told(tmp_path: Path) -> None:
    (tmp_path / "output.txt").touch()
    trial = TrialProcess(MagicMock(), 0, tmp_path, MagicMock(), MagicMock(), MagicMock(), MagicMock())
    verdict = trial.judge(-9, measured=True)
    assert verdict.reason == "its launcher was killed by SIGKILL; its last line: it printed nothing"
