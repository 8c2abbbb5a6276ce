"""Real runs of 4 workers and 2 servers: what workers read is as fresh as promised, and no worker runs too far ahead."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.launch.launching import processes_of, wait_gone
from tests.launch.warm import run_job

from paceline.observe.runs import Run, read_run
from paceline.observe.summary import RunSummary, summarize

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "paced_worker.py"
NUM_CLOCKS = 60
STALENESS = 2


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended well."""

    folder: Path
    run: Run
    summary: RunSummary


@pytest.fixture(scope="module", params=["ssp", "essp"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    job = ["-n", "4", "-m", "2", "--consistency", f"{request.param}:{STALENESS}", "--run-dir", str(folder)]
    done = run_job(*job, SCRIPT, "--clocks", str(NUM_CLOCKS), "--compute-ms", "20", "--lazy")
    assert done.returncode == 0, done.stdout
    run = read_run(folder)
    return Finished(folder, run, summarize(run))


def test_every_read_is_within_the_bound(finished: Finished) -> None:
    assert len(finished.run.reads) >= 4 * NUM_CLOCKS
    assert [read for read in finished.run.reads if read.staleness > STALENESS] == []


def test_no_worker_runs_further_ahead_than_the_bound(finished: Finished) -> None:
    assert [worker.num_clocks for worker in finished.summary.workers] == [NUM_CLOCKS] * 4
    assert finished.summary.max_lead <= STALENESS


def test_the_ages_of_reads_are_told(finished: Finished) -> None:
    ages, freshest_share = finished.summary.differentials, finished.summary.freshest_share
    assert sum(ages.values()) == finished.summary.num_reads
    assert set(ages) <= {-3, -2, -1}
    assert freshest_share
    if "essp" not in str(finished.folder):  # the slowest worker at least keeps what it has read while it may
        assert freshest_share < 1


def test_no_process_is_left(finished: Finished) -> None:
    assert wait_gone(processes_of(finished.folder), 30.0) == set()


def test_bytes_by_link_and_by_table_add_up_to_those_of_each_server(finished: Finished) -> None:
    loads = {load.server: load for load in finished.run.loads}
    lasts = {record.server: record for record in finished.run.carried}
    assert len(loads) == len(lasts) == 2
    for server, last in lasts.items():
        assert sorted(worker for worker, _, _ in last.links) == [0, 1, 2, 3]
        assert sum(received for _, received, _ in last.links) == loads[server].received_bytes > 0
        assert sum(sent for _, _, sent in last.links) == loads[server].sent_bytes > 0
        ((table, pushed, pulled),) = last.tables
        assert table
        assert pulled == loads[server].sent_bytes
        assert loads[server].received_bytes - pushed == pushed // (4 * NUM_CLOCKS), (
            "what is no push are the first values"
        )
