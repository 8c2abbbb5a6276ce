"""Data servers in a run: how they start and end, and what their death means, with fake ones that serve nothing."""

import re
from pathlib import Path

import pytest
from tests.launch.launching import launch, write_script

from paceline.api.join import start
from paceline.errors import UsageError

# A worker kills data servers, in the order of these ranks. It waits until the launcher has taken each away, as it would
# otherwise end in the same moment, and where one is started again for its new address.
KILLER = """
from paceline.job.addresses import data_addresses
from paceline.job.folders import wait_for
def kill(rank, again=False):
    before = data_addresses(spec)[rank]
    os.kill(int(before), signal.SIGKILL)
    wait_for(lambda: not os.path.exists(f'/proc/{before}') or None, 60.0, lambda: 'it is still there')
    if again:
        wait_for(lambda: data_addresses(spec)[rank] != before or None, 60.0, lambda: 'it is not started again')
"""


def told(run_dir: Path, rank: int) -> list[str]:
    return (run_dir / f"told-data{rank}").read_text().splitlines()


def without_pids(text: str) -> str:
    return re.sub(r" \(pid \d+\)", "", text)


def test_workers_learn_where_they_listen_and_they_are_stopped_with_the_servers(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = write_script(tmp_path, "print('found', len(spec.data_addresses), spec.num_data_servers, flush=True)")

    result = launch(script, num_workers=1, num_data_servers=2, run_dir=str(run_dir))

    assert (result.code, result.stderr) == (0, "")
    assert "[worker 0] found 2 2" in result.stdout
    assert "[data server 1] listening" in result.stdout
    assert [told(run_dir, rank) for rank in (0, 1)] == [["stop"]] * 2
    assert not list(run_dir.glob("*.address"))


def test_a_script_that_one_imports_does_not_train_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SERVING", "1")

    with pytest.raises(UsageError, match="a server of a job, which has imported a script that trains"):
        start()


def test_they_count_among_the_processes_that_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    result = launch(write_script(tmp_path, ""), num_workers=1, num_data_servers=2, quiet=False)

    assert "for each of 4 processes" in result.stderr


def test_one_that_is_killed_is_done_without(tmp_path: Path) -> None:
    script = write_script(tmp_path, KILLER + "kill(0)\nprint('done')")

    result = launch(script, num_workers=1, num_data_servers=2)

    assert result.code == 0, result.stderr
    assert "done" in result.stdout
    assert "was killed by SIGKILL; the other data servers go on without it" in result.stderr


def test_one_that_is_killed_is_started_again_when_asked_for(tmp_path: Path) -> None:
    script = write_script(tmp_path, KILLER + "kill(0, again=True); kill(0, again=True); print('done')")

    result = launch(script, num_workers=1, num_data_servers=1, crash_policy={"on_crash": "restart", "max_restarts": 2})

    assert result.code == 0, result.stderr
    assert "done" in result.stdout
    assert "was killed by SIGKILL; restart 1 of 2 in 0.5 s" in result.stderr
    assert "was killed by SIGKILL; restart 2 of 2 in 1 s" in result.stderr


@pytest.mark.parametrize(
    ("crash_policy", "kills", "reason"),
    [
        (
            {},
            "kill(1); kill(0)",
            "was killed by SIGKILL; no data server is left, and the run stops",
        ),  # whose end was seen last
        ({"on_crash": "stop"}, "kill(1)", "data server 1 was killed by SIGKILL; the run stops"),
        (
            {"on_crash": "restart", "max_restarts": 1},
            "kill(1, again=True); kill(1)",
            "data server 1 was killed by SIGKILL; the run stops after restart 1 of 1",
        ),
    ],
)
def test_when_none_is_left_or_enough_were_lost_the_run_ends(
    crash_policy: dict[str, object], kills: str, reason: str, tmp_path: Path
) -> None:
    script = write_script(tmp_path, KILLER + kills + "\nsignal.pause()")

    result = launch(script, num_workers=1, num_data_servers=2, crash_policy=crash_policy)

    assert result.code == 1
    assert reason in without_pids(result.stderr).splitlines()[-1]


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("fail-at-start", "data server 1 ended with exit code 7; the run stops"),
        ("silent", "data server 0 did not say where it listens within 3 s (missing: data server 0, data server 1)"),
    ],
)
def test_one_that_does_not_begin_ends_the_run(behaviour: str, reason: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, "signal.pause()")
    timeout_s = 3.0 if behaviour == "silent" else 30.0  # the server of the job says it in less

    result = launch(script, num_workers=1, num_data_servers=2, data_behaviour=behaviour, start_timeout_s=timeout_s)

    assert result.code == 1
    assert reason in without_pids(result.stderr)


def test_one_that_ends_badly_when_told_to_stop_is_named_and_changes_nothing(tmp_path: Path) -> None:
    result = launch(write_script(tmp_path, ""), num_workers=1, num_data_servers=1, data_behaviour="die-when-told")

    assert result.code == 0, result.stderr
    assert "was killed by SIGABRT; it had been told to stop, and the run ends" in result.stderr
