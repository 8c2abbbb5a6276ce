"""A worker killed at any step of the protocol: the others go on, and every push counts once or not at all."""

import ast
import re
from pathlib import Path

import pytest
from tests.faults.running import SCRIPTS, Run, run_to_end

from paceline.errors import EXIT_LOST

LEDGER = SCRIPTS / "ledger.py"
NUM_CLOCKS = 6

# Each step kills the worker of another rank, from 0 on; one more worker survives.
STEPS = (
    "between-first-values",
    "in-handshake",
    "before-join",
    "after-join",
    "before-push",
    "between-parts",
    "after-push",
    "between-ticks",
    "after-tick",
    "in-pull",
    "in-barrier",
    "between-leaves",
)


def ledgers(run: Run) -> list[tuple[int, int, list[int]]]:
    """What each worker that came to the end printed: (incarnation, own pushes applied, pushes applied by rank)."""
    found = [re.search(r"ledger (\d+) (\d+) (\[.*\])", line) for line in run.saying("ledger ")]
    return [(int(m[1]), int(m[2]), ast.literal_eval(m[3])) for m in found if m]


def kill_at(steps: tuple[str, ...], consistency: str, run_dir: Path) -> None:
    num_workers = len(steps) + 1
    plan = [f"{rank}:{step}" for rank, step in enumerate(steps)]
    options = ("-n", str(num_workers), "-m", "2")

    code, run = run_to_end(run_dir, LEDGER, consistency, str(NUM_CLOCKS), *plan, options=options)

    assert code == EXIT_LOST, run.output
    assert "Traceback" not in run.output
    *at_once, last = run.told()
    assert at_once == [
        f"paceline: worker {rank} was killed by SIGKILL; the others go on without it" for rank in killed_in_order(run)
    ]
    each = "; ".join(f"worker {rank}, which was killed by SIGKILL" for rank in killed_in_order(run))
    assert last == f"paceline: the run has ended without {each} (exit code {EXIT_LOST})"
    assert sorted(killed_in_order(run)) == list(range(len(steps)))
    for _, applied, counts in ledgers(run):
        assert applied == NUM_CLOCKS or consistency.startswith("backup")
        assert all(count <= NUM_CLOCKS for count in counts)
    num_at_the_end = 1 + ("between-leaves" in steps)
    assert len(ledgers(run)) == num_at_the_end, run.output


def killed_in_order(run: Run) -> list[int]:
    return [int(line.split()[2]) for line in run.told() if line.startswith("paceline: worker ")]


@pytest.mark.parametrize("consistency", ["bsp", "ssp:2"])
def test_killed_at_every_step(consistency: str, tmp_path: Path) -> None:
    kill_at(STEPS, consistency, tmp_path / "run")


@pytest.mark.parametrize("consistency", ["essp:2", "asynchronous", "backup:1"])
def test_killed_in_the_middle_under_every_other_policy(consistency: str, tmp_path: Path) -> None:
    kill_at(("between-parts",), consistency, tmp_path / "run")


@pytest.mark.campaign
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "essp:2", "asynchronous", "backup:1"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_each_step_alone(step: str, consistency: str, tmp_path: Path) -> None:
    kill_at((step,), consistency, tmp_path / "run")


def test_a_killed_worker_started_again_takes_part_as_a_new_life(tmp_path: Path) -> None:
    options = ("-n", "2", "-m", "2", "--on-crash", "restart")
    code, run = run_to_end(tmp_path / "run", LEDGER, "bsp", str(NUM_CLOCKS), "0:between-parts", options=options)

    assert code == 0, run.output
    assert run.told() == ["paceline: worker 0 was killed by SIGKILL; restart 1 of 3 in 0.5 s"]
    assert sorted(incarnation for incarnation, _, _ in ledgers(run)) == [0, 1]
    assert all(applied == NUM_CLOCKS for _, applied, _ in ledgers(run)), run.output
