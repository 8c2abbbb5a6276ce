"""Sides that are measured in turn: asked, timed, and gone in the end, whatever they do."""

import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from benchmarks.turns import PlayFailed, Side, Stage

PLAYER = """
    import sys
    from turns import play

    def fail(_):
        raise ValueError("the player's own trouble")

    play(sys.argv[1], int(sys.argv[2]), {"double": lambda value: 2 * value, "fail": fail})
"""
TWO_PLAYERS = """
    import subprocess, sys
    players = [subprocess.Popen([sys.executable, sys.argv[2], sys.argv[1], rank]) for rank in "01"]
    sys.exit(max(player.wait() for player in players))
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A side of two players."""
    (tmp_path / "player.py").write_text(textwrap.dedent(PLAYER))
    (tmp_path / "side.py").write_text(textwrap.dedent(TWO_PLAYERS))
    return [sys.executable, str(tmp_path / "side.py"), "{stage}", str(tmp_path / "player.py")]


def processes(side: Side) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in (side.process.pid, *side.pids)]


def assert_gone(known: list[psutil.Process]) -> None:
    assert psutil.wait_procs(known, timeout=10)[1] == []


def test_all_players_do_what_is_asked_and_end(command: list[str]) -> None:
    with Stage() as stage:
        side = stage.start("pair", command, 2)
        known = processes(side)
        turn = side.ask("double", 21)
        assert turn.answers == [42, 42]
        assert turn.seconds >= 0
    assert side.process.returncode == 0
    assert_gone(known)
    assert not stage.folder.exists()


def test_trouble_of_a_player_is_told_and_no_process_is_left(command: list[str]) -> None:
    with Stage() as stage:
        side = stage.start("pair", command, 2)
        known = processes(side)
        with pytest.raises(PlayFailed, match="the player's own trouble"):
            side.ask("fail")
    assert_gone(known)


def test_a_side_that_ends_before_it_plays_is_told() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with Stage() as stage, pytest.raises(PlayFailed, match=r"(?s)code 1 before all.*no such model"):
        stage.start("pair", command, 2)


def test_players_whose_stage_is_gone_end_by_themselves(command: list[str]) -> None:
    with Stage() as stage:
        side = stage.start("pair", command, 2)
        known = processes(side)
        for line in side.lines:
            line.close()  # as the death of the stage does
        side.process.wait(120)
        assert_gone(known)


def be_terminated(command: list[str], folders: list[Path], known: list[psutil.Process]) -> None:
    with Stage() as stage:
        folders.append(stage.folder)
        known += processes(stage.start("pair", command, 2))
        signal.raise_signal(signal.SIGTERM)


def test_a_stage_that_is_terminated_ends_its_sides_and_leaves_no_folder(command: list[str]) -> None:
    folders: list[Path] = []
    known: list[psutil.Process] = []
    with pytest.raises(SystemExit):
        be_terminated(command, folders, known)
    assert len(known) == 3
    assert_gone(known)
    assert not folders[0].exists()
