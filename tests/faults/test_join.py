"""Workers that join a run from another terminal, and leave it in every way: each push and each sample counts once."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.faults.running import LEFT_WITHIN_S, SCRIPTS, SOURCES, Run, running
from tests.launch.launching import processes_of, wait_gone
from tests.launch.warm import start_launcher
from tests.tidy.tree import ROOT

from paceline.errors import EXIT_LOST


@contextmanager
def joining(run_dir: Path, script: Path, *args: str, options: tuple[str, ...] = ()) -> Iterator[Run]:
    """Start `paceline join`; when the block ends so must it."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SOURCES), str(ROOT))), "OMP_NUM_THREADS": "1"}
    words = ("join", str(run_dir), *options, str(script), *args)
    joined = Run(*start_launcher(*words, environment=variables), run_dir)
    listener = threading.Thread(target=joined.listen)
    listener.start()
    try:
        yield joined
    finally:
        with suppress(psutil.NoSuchProcess):
            joined.process.kill()
        joined.process.wait()
        listener.join(timeout=30)
        joined.said.close()


def kill_server(run: Run) -> None:
    os.kill(run.wait_for_server(0), signal.SIGKILL)
    run.wait_for("another process goes on in its place")


def test_each_sample_counts_once_an_epoch_while_workers_join_and_leave_in_every_way(tmp_path: Path) -> None:
    run_dir, enough, script = tmp_path / "run", tmp_path / "enough", SCRIPTS / "counted.py"
    options = ("-n", "1:4", "--grace-s", "60")
    with running(run_dir, script, str(enough), options=options) as run:
        run.wait_for("[worker 0] has batches")
        with joining(run_dir, script, str(enough), options=("-n", "2")) as two:
            two.wait_for("has batches", 2)
            kill_server(run)
            with joining(run_dir, script, str(enough)) as one:
                one.wait_for("[worker 3] has batches")
                two.process.send_signal(signal.SIGINT)
                assert two.end() == 128 + signal.SIGINT, two.output
                run.wait_for("was told to leave, and has; the others go on without it", 2)
                one.process.kill()
            run.wait_for("worker 3 from process")
            run.wait_for("was killed by SIGKILL; the others go on without it")
        with joining(run_dir, script, str(enough)) as last:
            last.wait_for("[worker 1] has batches")
            enough.touch()
            assert last.end() == 0, last.output
        assert run.end() == EXIT_LOST, run.output
        [counts] = run.wait_for("[worker 0] counts")
    _, _, _, num_epochs, *counted = counts.split()
    assert [float(number) for number in counted] == [float(num_epochs)]


@pytest.mark.parametrize(
    "consistency",
    [
        "ssp:2",
        *(pytest.param(policy, marks=pytest.mark.campaign) for policy in ("bsp", "essp:2", "asynchronous", "backup:1")),
    ],
)
def test_every_push_counts_once_under_every_policy(tmp_path: Path, consistency: str) -> None:
    run_dir, enough, script = tmp_path / "run", tmp_path / "enough", SCRIPTS / "comer.py"
    told = (str(enough), consistency)
    with running(run_dir, script, *told, options=("-n", "1:3", "--grace-s", "60")) as run:
        run.wait_for("[worker 0] counts")
        with joining(run_dir, script, *told) as first, joining(run_dir, script, *told) as other:
            first.wait_for("counts")
            other.wait_for("counts")
            with joining(run_dir, script, *told) as third:
                assert third.end() == 1
                third.wait_for("takes no worker: a worker asks to join, and no place is free: wait until")
            first.process.send_signal(signal.SIGINT)
            assert first.end() == 128 + signal.SIGINT, first.output
            enough.touch()
            assert other.end() == 0, other.output
        assert run.end() == 0, run.output
        [ledger] = run.wait_for("[worker 0] ledger")
    said = [line.split() for each in (run, first, other) for line in each.saying("] applied")]
    assert len(said) == 3
    assert all(made == applied for *_, made, applied in said) or consistency == "backup:1"  # which refuses late ones
    applied = {int(words[1].rstrip("]")): int(words[-1]) for words in said}
    assert dict(enumerate(map(int, ledger.split()[3:]))) == applied


def test_the_end_of_the_run_ends_those_that_have_joined(tmp_path: Path) -> None:
    run_dir, never, script = tmp_path / "run", tmp_path / "never", SCRIPTS / "comer.py"
    with running(run_dir, script, str(never), options=("-n", "1:2")) as run:
        run.wait_for("[worker 0] counts")
        with joining(run_dir, script, str(never)) as joined:
            joined.wait_for("counts")
            run.process.send_signal(signal.SIGTERM)
            assert run.end() == 128 + signal.SIGTERM
            assert joined.end() == 143, joined.output


def test_a_run_that_is_killed_takes_those_along_that_have_joined(tmp_path: Path) -> None:
    run_dir, never, script = tmp_path / "run", tmp_path / "never", SCRIPTS / "comer.py"
    with running(run_dir, script, str(never), options=("-n", "1:2")) as run:
        run.wait_for("[worker 0] counts")
        with joining(run_dir, script, str(never)) as joined:
            joined.wait_for("counts")
            workers = joined.process.children(recursive=True)
            run.process.kill()
            assert joined.end() == 1, joined.output
            joined.wait_for("paceline: the run is out of reach")
            assert not psutil.wait_procs(workers, LEFT_WITHIN_S)[1]
        assert wait_gone(processes_of(run_dir), LEFT_WITHIN_S) == set()


NUM_KILLS = 16


@pytest.mark.campaign
def test_samples_count_once_though_joiners_are_killed_at_any_moment(tmp_path: Path) -> None:
    run_dir, enough, script, draw = tmp_path / "run", tmp_path / "enough", SCRIPTS / "counted.py", random.Random(7)
    with running(run_dir, script, str(enough), options=("-n", "1:4", "--grace-s", "60")) as run:
        run.wait_for("[worker 0] has batches")
        for number in range(NUM_KILLS):
            with joining(run_dir, script, str(enough), options=("-n", "3")) as joined:
                pause_s = draw.uniform(0.0, 4.0)
                if number % 2:
                    joined.wait_for("to come")
                    pause_s /= 4
                threading.Event().wait(pause_s)
                if number % 4 == 3:
                    kill_server(run)
        enough.touch()
        assert run.end() in (0, EXIT_LOST), run.output
        [counts] = run.wait_for("[worker 0] counts")
    num_joined = sum("join from process" in line for line in run.lines)
    num_batches = sum(line.endswith("has batches") for line in run.lines)
    assert num_joined >= NUM_KILLS / 4, run.output
    assert num_batches == 1
    _, _, _, num_epochs, *counted = counts.split()
    assert [float(number) for number in counted] == [float(num_epochs)], run.output


@pytest.mark.campaign
def test_eight_join_at_once(tmp_path: Path) -> None:
    run_dir, enough, script = tmp_path / "run", tmp_path / "enough", SCRIPTS / "counted.py"
    with ExitStack() as left:
        run = left.enter_context(running(run_dir, script, str(enough), options=("-n", "1:9", "--grace-s", "60")))
        run.wait_for("[worker 0] has batches")
        eight = [left.enter_context(joining(run_dir, script, str(enough))) for _ in range(8)]
        for joined in eight:
            joined.wait_for("has batches")
        enough.touch()
        assert [joined.end() for joined in eight] == [0] * 8
        assert run.end() == 0, run.output
        [counts] = run.wait_for("[worker 0] counts")
    _, _, _, num_epochs, *counted = counts.split()
    assert [float(number) for number in counted] == [float(num_epochs)]
