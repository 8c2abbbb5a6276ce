"""A server is killed by SIGKILL: another process goes on in its place, workers stay, and no push is lost or doubled."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.faults.running import LEFT_WITHIN_S, SCRIPTS, Run, run_to_end, running
from tests.launch.launching import wait_gone

OUTLIVED = SCRIPTS / "outlived.py"
NUM_CLOCKS = 40
GOES_ON = "another process goes on in its place"


def kill_server(run: Run, rank: int, but: tuple[int, ...] = ()) -> int:
    """Kill a server, as soon as it has a process; return that."""
    pid = run.wait_for_server(rank, but)
    os.kill(pid, signal.SIGKILL)
    return pid


def ended(run: Run) -> set[str]:
    """The digests of the values that workers have at the end; every mark must be there once."""
    lines = [line.split("ended ")[1].split() for line in run.saying("ended")]
    assert [line[:3] for line in lines] == [["0", "0", "0"]] * 2, run.output
    return {line[4] for line in lines}


def kill_fork_server(run: Run) -> None:
    """Kill what forks processes for the job, and those that wait to be told what they are, until none is left.

    Each is waited for: a launcher may yet take one that is about to end for a server, and then tells of its end, too.
    """
    killed: set[int] = set()
    while forked := {pid for pid in run.family() if is_forked(pid)}:
        for pid in forked:
            with suppress(ProcessLookupError):  # those that wait end with the one that has forked them
                os.kill(pid, signal.SIGKILL)
        assert wait_gone(forked, LEFT_WITHIN_S) == set()
        killed |= forked
    assert killed


def is_forked(pid: int) -> bool:
    """Whether a process forks others, or is not told yet what it is."""
    try:
        return b"paceline.launch.forkserver.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def test_training_goes_on_as_if_no_server_had_been_killed(tmp_path: Path) -> None:
    asked, options = ("bsp", str(NUM_CLOCKS)), ("-n", "2", "-m", "2", "--transport", "shm")
    with running(tmp_path / "killed", OUTLIVED, *asked, options=options) as run:
        run.wait_for("at clock 2", times=2)
        first = kill_server(run, 0)
        kill_server(run, 0, but=(first,))  # it may not have begun to serve
        run.wait_for(f"at clock {NUM_CLOCKS // 2}", times=2)
        kill_fork_server(run)
        kill_server(run, 1)
        assert run.end() == 0, run.output
    assert len(run.saying(GOES_ON)) == 3
    digests = ended(run)
    code, undisturbed = run_to_end(tmp_path / "undisturbed", OUTLIVED, *asked, options=options)
    assert (code, ended(undisturbed)) == (0, digests), undisturbed.output
