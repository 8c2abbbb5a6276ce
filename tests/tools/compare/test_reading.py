from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.observe.runs import Run, gather
from paceline.observe.trace import Evaluated, Resources, Step, TraceRecord
from paceline.tools.compare.results import RunTraffic, comparison_json, comparison_table, draw_comparison, read_result
from paceline.tools.compare.runs import ComparedEntry, RunEnded

NUM_STEPS, BATCH = 40, 8


def made_up(num_workers: int) -> Run:
    """Workers that learn alike and leave with what they have used."""
    records: list[TraceRecord] = [
        Step(float(clock), worker, clock, BATCH, math.exp(-clock / NUM_STEPS), 0.0, 1.0)
        for clock in range(NUM_STEPS)
        for worker in range(num_workers)
    ]
    records.append(Evaluated(float(NUM_STEPS), 0, NUM_STEPS, 0.5, 0.9))
    records += [
        Resources(50.0, worker, 1000 + worker, 400 * NUM_STEPS, 200 * NUM_STEPS) for worker in range(num_workers)
    ]
    return gather(records)


def test_the_numbers_of_a_run() -> None:
    result = read_result(ComparedEntry.parse("bsp", 2), made_up(2))
    assert result.num_samples == 2 * NUM_STEPS * BATCH
    assert result.samples_per_s == result.num_samples / NUM_STEPS
    assert result.held_out_loss == 0.5
    assert result.traffic == RunTraffic(400.0, 200.0)
    assert result.peak_bytes == 1001
    assert result.final_loss == pytest.approx(math.exp(-(NUM_STEPS - 2.5) / NUM_STEPS), rel=1e-3)
    assert result.loss_by_samples[-1].at <= result.num_samples


def test_the_last_tenth_is_of_clocks_whatever_the_workers_pace() -> None:
    """A worker that is ahead has no more of its losses in the mean, so runs with equal losses have equal numbers."""
    losses = {0: 1.0, 1: 3.0}

    def final_loss(lead_s: float) -> float | None:
        steps = [
            Step(clock + worker * lead_s, worker, clock, BATCH, loss + clock, 0.0, 1.0)
            for clock in range(NUM_STEPS)
            for worker, loss in losses.items()
        ]
        return read_result(ComparedEntry.parse("bsp", 2), gather(steps)).final_loss

    last = range(NUM_STEPS - NUM_STEPS // 10, NUM_STEPS)
    expected = sum(loss + clock for clock in last for loss in losses.values()) / (2 * len(last))
    assert [final_loss(lead_s) for lead_s in (0.5, -0.5, 2.5)] == [expected] * 3


def test_ranks_that_share_samples_count_them_once() -> None:
    alone, shared = (
        read_result(ComparedEntry.parse("single", 1), made_up(1)),
        read_result(ComparedEntry.parse("tensor:2", 2), made_up(2)),
    )
    assert shared.num_samples == alone.num_samples
    assert shared.loss_by_samples[-1].at == pytest.approx(alone.loss_by_samples[-1].at, rel=0.05)


def test_a_run_that_tells_nothing_is_shown_as_such(tmp_path: Path) -> None:
    silent = read_result(ComparedEntry.parse("bsp", 2), gather([Step(1.0, 0, 0, 0, None, 0.0, 1.0)]))
    assert (silent.final_loss, silent.traffic, silent.peak_bytes, silent.loss_by_samples) == (None, None, None, ())
    assert [next(column.cells) for column in comparison_table([silent]).columns[4:]] == ["-"] * 3
    draw_comparison([silent], tmp_path / "silent.png", "nothing", "")
    assert (tmp_path / "silent.png").read_bytes().startswith(b"\x89PNG")


def test_all_are_told_of_and_those_that_ended_well_are_drawn(tmp_path: Path) -> None:
    texts = ("single", "all-reduce", "ssp:3", "pipeline:2", "tensor:2", "all-reduce+pipeline:2@4")
    entries = [ComparedEntry.parse(text, 2) for text in texts]
    results = [read_result(entry, made_up(entry.num_workers)) for entry in entries]
    failed = RunEnded(ComparedEntry.parse("fsdp", 2), 1, "no memory")
    assert comparison_table([*results, failed]).row_count == 7
    numbers = comparison_json([*results, failed])
    assert numbers["fsdp@2"] == {"failed": "no memory"}
    assert numbers["ssp:3@2"]["sent_bytes_per_worker_and_step"] == 400.0
    draw_comparison(results, tmp_path / "comparison.png", "A title", "a note")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
