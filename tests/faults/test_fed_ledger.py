"""Workers and a data server are killed while a job is fed: every sample counts once an epoch, or it is told."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.faults.running import SCRIPTS, Run, run_to_end

from paceline.core.partition import ALIGNMENT
from paceline.observe.runs import read_run

SCRIPT = SCRIPTS / "fed_ledger.py"
NUM_SAMPLES, NUM_EPOCHS, NUM_WORKERS = 2 * ALIGNMENT, 2, 3  # cut there, so that each server has a slot for each sample
FAULTS = ("0:0:0:data-server", "1:0:0:before-push", "2:1:0:after-push")


def run_with_faults(consistency: str, folder: Path) -> Run:
    np.save(folder / "numbers.npy", np.arange(NUM_SAMPLES))
    options = ("-n", str(NUM_WORKERS), "-m", "2", "--data-servers", "2", "--on-crash", "restart")
    arguments = (consistency, str(NUM_EPOCHS), str(folder / "numbers.npy"), *FAULTS)

    code, run = run_to_end(folder / "run", SCRIPT, *arguments, options=options)

    assert code == 0, run.output
    assert "Traceback" not in run.output
    assert sorted(run.told()) == [
        "paceline: data server 1 was killed by SIGKILL; restart 1 of 3 in 0.5 s",
        "paceline: worker 1 was killed by SIGKILL; restart 1 of 3 in 0.5 s",
        "paceline: worker 2 was killed by SIGKILL; restart 1 of 3 in 0.5 s",
    ], "all faults have happened"
    return run


def said(run: Run, word: str) -> list[Any]:
    return [json.loads(line.split(f"] {word} ")[1]) for line in run.saying(f"] {word} ")]


def recount(run: Run) -> int:
    """As the run itself has told."""
    lines = [line for line in run.lines if " again, which a worker had that has died" in line]
    told = sum(int(line.split("was dealt ")[1].split()[0]) for line in lines)
    assert told == sum(epoch.again for epoch in read_run(run.run_dir).epochs)
    return told


def test_under_bsp_every_sample_counts_once_an_epoch(tmp_path: Path) -> None:
    run = run_with_faults("bsp", tmp_path)

    ledgers = said(run, "ledger")
    assert len(ledgers) == NUM_WORKERS
    assert all(counts == [[NUM_EPOCHS] * NUM_SAMPLES] * 2 for counts in ledgers)
    handed_out = Counter((epoch, index) for epoch, indices, *_ in said(run, "has") for index in indices)
    assert set(handed_out) == {(epoch, index) for epoch in range(NUM_EPOCHS) for index in range(NUM_SAMPLES)}
    assert recount(run) == handed_out.total() - NUM_EPOCHS * NUM_SAMPLES > 0


def test_under_ssp_what_counts_twice_was_dealt_again_and_the_first_server_counts_once(tmp_path: Path) -> None:
    run = run_with_faults("ssp:2", tmp_path)

    [(first, second), *others] = said(run, "ledger")
    assert [[first, second]] * (NUM_WORKERS - 1) == others, run.output
    # A lease is settled by the server that deals, with the push that it applies.
    assert first == [NUM_EPOCHS] * NUM_SAMPLES, run.output
    handed_out = Counter(index for _, indices, *_ in said(run, "has") for index in indices)
    dealt_again = {index: num - NUM_EPOCHS for index, num in handed_out.items()}
    lost = ([1, 0], [2, 0])
    had_by_the_dead = {index for _, indices, *life in said(run, "has") for index in indices if life in lost}
    more = {index: num for index, num in enumerate(second) if num - NUM_EPOCHS > dealt_again[index]}
    assert not more, f"count twice, and were not dealt again\n{run.output}"
    other = {index: num for index, num in enumerate(second) if num != NUM_EPOCHS and index not in had_by_the_dead}
    assert not other, run.output
    assert recount(run) == sum(dealt_again.values()) > 0
    assert sum(second) - NUM_EPOCHS * NUM_SAMPLES <= recount(run)
