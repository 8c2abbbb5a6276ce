"""A real run of four workers with a straggler that comes and goes: the bound follows, and reads keep it."""

from bisect import bisect_left
from pathlib import Path

import pytest
from tests.launch.warm import run_job

from paceline.observe.runs import Run, read_run
from paceline.observe.trace import BoundRecord

SCRIPT = Path(__file__).with_name("scripts") / "coming_straggler.py"
NUM_CLOCKS = 360
HIGHEST = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("adaptive") / "run"
    job = ["-n", "4", "-m", "1", "--consistency", f"adaptive:0:{HIGHEST}", "--run-dir", str(folder)]
    done = run_job(*job, SCRIPT, str(NUM_CLOCKS))
    assert done.returncode == 0, done.stdout
    return read_run(folder)


def test_the_bound_moves_both_ways_and_every_move_is_told(run: Run) -> None:
    """It goes down again whatever this machine does, as every bound above the lowest is tried from below."""
    moves = [(each.before, each.bound) for each in run.bounds]
    assert any(after > before for before, after in moves)
    assert any(after < before for before, after in moves)
    assert [before for before, _ in moves] == [0, *(after for _, after in moves[:-1])]
    assert all(0 <= after <= HIGHEST for _, after in moves)


def test_reads_keep_the_bound_in_force_when_they_began(run: Run) -> None:
    """By the trace: the server moves a bound before it tells so, and a read is told when it has ended.

    It is asked for after the end of the clock before, and may be under way before its worker begins to wait.
    """
    times = [each.t for each in run.bounds]
    ends = {(step.worker, step.clock): step.t for step in run.steps}
    for read in run.reads:
        asked_t = ends.get((read.worker, read.clock - 1), read.t - read.waited_s)
        began, ended = bisect_left(times, asked_t), bisect_left(times, read.t)
        most = max(in_force(run.bounds, place) for place in range(began, ended + 1))
        assert read.staleness <= most, f"worker {read.worker} at clock {read.clock} was {read.staleness} behind"


def in_force(bounds: tuple[BoundRecord, ...], place: int) -> int:
    """Return the bound after so many moves."""
    return bounds[place - 1].bound if place else 0


def test_values_were_older_than_the_lowest_bound_allows_only_after_the_first_move(run: Run) -> None:
    first = run.bounds[0].t
    assert max(read.staleness for read in run.reads if read.t < first) == 0
    assert max(read.staleness for read in run.reads) >= 1
