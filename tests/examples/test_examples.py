"""The examples run as their first lines say, alone and as a job, and learn what they set out to."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.examples.conftest import Alone
from tests.launch.warm import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
# What the script prints at the end, and whether that is good enough.
GOALS = {
    "one_line.py": (r"accuracy (\d\.\d+)", lambda value: value > 0.9),
    "logistic_regression.py": (r"accuracy (\d\.\d+)", lambda value: value > 0.9),
    "embedding.py": (r"accuracy (\d\.\d+)", lambda value: value > 0.93),
    "digits_fed.py": (r"accuracy (\d\.\d+)", lambda value: value > 0.9),
    "custom_rule.py": (r"at most (\d\.\d+) from", lambda value: value < 0.05),
}

OPTIONS = {"digits_fed.py": ["--data-servers", "1"]}


@pytest.mark.parametrize("name", ["custom_rule.py", "embedding.py", "logistic_regression.py", "one_line.py"])
def test_an_example_reaches_its_goal_alone(name: str, alone: Alone) -> None:
    assert_goal(name, alone(name))


@pytest.mark.parametrize(
    "name", ["digits_fed.py", pytest.param("embedding.py", marks=pytest.mark.campaign), "one_line.py"]
)
def test_an_example_reaches_its_goal_as_a_job(name: str) -> None:
    assert_goal(name, run_job("-n", "2", "-m", "2", *OPTIONS.get(name, []), EXAMPLES / name))


def assert_goal(name: str, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    pattern, good = GOALS[name]
    found = re.search(pattern, done.stdout)
    assert found is not None, done.stdout
    assert good(float(found[1])), done.stdout
