"""What travels by environment variable, and what comes of nonsense in it."""

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.job.environment import (
    Place,
    allows_plain_collectives,
    asked_host,
    child_environment,
    chose_num_threads,
    find_launcher,
    find_place,
    start_timeout_s,
    wait_timeout_s,
    wants_colour,
)
from paceline.launch.local import make_spec
from paceline.launch.plan import LocalRun


def test_a_place_is_found_again() -> None:
    place = Place(Path("/run/cluster.json"), rank=3, local_rank=1, incarnation=2)

    assert find_place(place.as_environment()) == place


def test_what_is_asked_of_jobs_on_several_machines() -> None:
    asked = {"PACELINE_HOST": "10.1.0.0/16", "PACELINE_START_TIMEOUT_S": "300", "PACELINE_PLAIN_COLLECTIVES": "1"}

    assert (asked_host(asked), start_timeout_s(60.0, asked), allows_plain_collectives(asked)) == (
        "10.1.0.0/16",
        300.0,
        True,
    )
    assert (asked_host({}), start_timeout_s(60.0, {}), allows_plain_collectives({})) == (None, 60.0, False)
    assert start_timeout_s(60.0, {"PACELINE_START_TIMEOUT_S": ""}) == 60.0, "empty is not set, as of the others"
    assert not allows_plain_collectives({"PACELINE_PLAIN_COLLECTIVES": "0"})
    with pytest.raises(UsageError, match="PACELINE_START_TIMEOUT_S must be a whole number"):
        start_timeout_s(60.0, {"PACELINE_START_TIMEOUT_S": "soon"})


def test_how_long_waits_may_take_is_asked_for_by_a_number_above_0() -> None:
    assert wait_timeout_s({"PACELINE_TIMEOUT_S": ""}) == wait_timeout_s({}) == 600.0
    assert wait_timeout_s({"PACELINE_TIMEOUT_S": "7200"}) == 7200.0
    with pytest.raises(UsageError, match="PACELINE_TIMEOUT_S must be more than 0 seconds"):
        wait_timeout_s({"PACELINE_TIMEOUT_S": "0"})


def test_a_process_without_a_launcher() -> None:
    assert find_place({"PACELINE_RANK": "0"}) is None
    assert find_launcher({}) is None


def test_what_is_left_out_has_a_plain_meaning() -> None:
    place = find_place({"PACELINE_SPEC": "/s", "PACELINE_RANK": "2"})

    assert place == Place(Path("/s"), rank=2, local_rank=2, incarnation=0)


@pytest.mark.parametrize("rank", ["", "-1", "two", "1.0"])
def test_a_rank_that_is_no_number_is_refused(rank: str) -> None:
    with pytest.raises(UsageError, match=f"PACELINE_RANK must be a whole number >= 0, got '{rank}'"):
        find_place({"PACELINE_SPEC": "/s", "PACELINE_RANK": rank})


@pytest.mark.parametrize(("num_processes", "threads"), [(1, "8"), (3, "2"), (6, "1"), (20, "1")])
def test_processes_share_the_cores(num_processes: int, threads: str) -> None:
    assert child_environment(num_processes, 8, {})["OMP_NUM_THREADS"] == threads


def test_the_user_has_the_last_word() -> None:
    chosen = {"OMP_NUM_THREADS": "5", "PYTHONUNBUFFERED": ""}

    environment = child_environment(4, 8, chosen)

    assert {name: environment[name] for name in chosen} == chosen
    assert chose_num_threads(chosen)
    assert not chose_num_threads({})


def test_colour_is_a_choice() -> None:
    assert wants_colour({"TERM": "xterm", "NO_COLOR": ""})
    assert not wants_colour({"NO_COLOR": "1"})
    assert not wants_colour({"TERM": "dumb"})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_run_whose_waits_may_take_no_time_is_refused(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="--timeout must be more than 0 seconds, got"):
        LocalRun(script=Path("script.py"), timeout_s=timeout_s).validate()
    run = LocalRun(script=Path("script.py"), timeout_s=1800.0)
    run.validate()
    assert make_spec(run, Path("/run")).wait_timeout_s == 1800.0
