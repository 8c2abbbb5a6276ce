"""What filters keep back and a flush sends, against the same pushes without filters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.jobs import run_job

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.update.filters import Int8, KeyCache, TopK
from paceline.update.rows.spec import FilterSpec
from paceline.update.table import Scale
from paceline.worker.rows.table import RowTable

# By worker: ids, rows, samples. The second has nothing to keep back, and all stand for other numbers of samples.
PUSHES = (([0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0], 32.0), ([7], [5.0], 16.0), ([2, 7], [6.0, 8.0], 8.0))
ADD = paceline.update.Add()


POLICIES, SCALES = ("bsp", "ssp:1", "asynchronous"), ("samples", "mean", "sum")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("policy", "scale", "knows_all"),
    [*((policy, scale, False) for policy in POLICIES for scale in SCALES), ("bsp", "samples", True)],
)
def test_what_was_sent_and_what_is_flushed_add_up_to_what_was_given(
    tmp_path: Path, workers: int, policy: str, scale: Scale, *, knows_all: bool
) -> None:
    def work(ps: Session) -> tuple[list[float], list[float]]:
        def table(name: str, *filters: FilterSpec) -> RowTable:
            return ps.table(name, rows=1, update=ADD, consistency=policy, scale=scale, filters=filters)

        def values(table: RowTable) -> list[float]:
            return table.pull(list(range(8)), exact=True).view(-1).tolist()

        plain, filtered = table("plain"), table("filtered", TopK(0.5))
        ids, rows, samples = PUSHES[ps.rank]
        expected = sum(each for *_, each in PUSHES[:workers]) if knows_all else 0.0
        for each in (plain, filtered):
            each.push(ids, torch.tensor(rows).unsqueeze(1), samples=samples, expected=expected)
        ps.clock()
        assert filtered.filtered.kept_back == len(ids) // 2
        for _ in range(2):  # the second has nothing to send, and nothing to divide by
            plain.flush()
            filtered.flush()
        ps.clock()
        ps.barrier()
        return values(plain), values(filtered)

    for given, found in run_job(tmp_path, work, workers=workers, servers=2):
        assert found == pytest.approx(given, rel=1e-6)
        assert any(given)


@pytest.mark.parametrize("scale", ["samples", "mean"])
def test_a_flush_and_a_push_have_no_clock_in_common_whose_update_is_a_mean(scale: Scale) -> None:
    with paceline.connect() as ps:
        table = ps.table("t", rows=1, update=ADD, scale=scale, filters=(TopK(0.5), Int8("push")))
        table.flush()  # nothing was pushed yet
        table.push([0, 1], [[4.0], [3.0]])
        with pytest.raises(UsageError, match=r"'t', worker 0, clock 0: flush\(\) follows a push in the same clock"):
            table.flush()
        ps.clock()
        table.flush()
        with pytest.raises(UsageError, match=r"clock 1: a push follows flush\(\) in the same clock"):
            table.push([0], [[1.0]])
        assert table.push([], []).result(timeout=60).applied, "the flush counts for this worker"
        ps.clock()
        assert table.pull([0, 1]).view(-1).tolist() == pytest.approx([4.0, 3.0])
        table.push([0], [[1.0]])
        ps.clock()
        assert table.pull([0]).view(-1).tolist() == pytest.approx([5.0])


@pytest.mark.parametrize(
    ("scale", "policy", "filters"),
    [("sum", "bsp", (TopK(0.5),)), ("samples", "ssp:1", (TopK(0.5),)), ("samples", "bsp", (KeyCache(),))],
)
def test_they_have_one_where_each_counts_in_full_and_where_nothing_is_kept_back(
    scale: Scale, policy: str, filters: tuple[FilterSpec, ...]
) -> None:
    with paceline.connect() as ps:
        table = ps.table("t", rows=1, update=ADD, consistency=policy, scale=scale, filters=filters)
        table.push([0, 1], [[4.0], [3.0]])
        table.flush()
        ps.clock()
        assert table.pull([0, 1]).tolist() == [[4.0], [3.0]]
