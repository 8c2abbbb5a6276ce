"""How much each server holds: as the user says, or by what servers managed before."""

from pathlib import Path

import pytest
import torch
from tests.jobs import job

from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.job.addresses import SPEC_NAME
from paceline.job.spec import ClusterSpec
from paceline.launch.shares import read_shares
from paceline.observe.runs import read_run
from paceline.observe.trace import Load, Trace, trace_path
from paceline.update.named_rules import Add


def recorded(folder: Path, loads: list[Load], num_servers: int = 2, shares: tuple[float, ...] = ()) -> Path:
    """The folder of a run whose servers have left these records."""
    spec = ClusterSpec(
        job="j", num_workers=1, num_servers=num_servers, transport="tcp", run_dir=str(folder), shares=shares
    )
    spec.write(folder / SPEC_NAME)
    with Trace(trace_path(folder, "server", 0)) as trace:
        for load in loads:
            trace.record(load)
    return folder


def test_shares_as_they_are_named() -> None:
    assert read_shares(None, 2) == ((), "")
    assert read_shares("2,1.5", 2) == ((2.0, 1.5), "")
    with pytest.raises(UsageError, match="expected numbers such as 2,1,1, one for each server, or measured:RUN_DIR"):
        read_shares("even", 2)


def test_shares_by_what_was_measured(tmp_path: Path) -> None:
    quick = Load(9.0, 0, 10.0, 2.0, 0.5, 300_000_000, 100_000_000)
    line_bound = Load(9.0, 1, 10.0, 1.0, 6.0, 300_000_000, 100_000_000)
    shares, why = read_shares(f"measured:{recorded(tmp_path, [line_bound, quick])}", 2)
    assert shares == pytest.approx((0.75, 0.25))
    assert why == (
        f"shares by {tmp_path}: server 0 was busy 20% at 200 MB/s and gets 0.75, "
        "server 1 was busy 60% at 67 MB/s and gets 0.25"
    )


@pytest.mark.parametrize(
    ("num_servers", "problem"),
    [(3, r"had 2 server\(s\), and this one has 3"), (2, "no record of what server 0, 1 did")],
)
def test_a_run_that_says_nothing_of_these_servers(num_servers: int, problem: str, tmp_path: Path) -> None:
    recorded(tmp_path, [])
    with pytest.raises(UsageError, match=problem):
        read_shares(f"measured:{tmp_path}", num_servers)


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the cluster spec"):
        read_shares(f"measured:{tmp_path}", 2)


def test_servers_say_what_they_did(tmp_path: Path) -> None:
    def work(session: Session) -> None:
        table = session.table("w", shape=(3 << 16,), update=Add(), scale="sum")
        for _ in range(4):
            table.push(torch.ones(3 << 16))
            session.clock()
            table.pull()

    traces = [Trace(trace_path(tmp_path, "server", rank)) for rank in range(2)]
    with job(tmp_path, workers=2, servers=2, carrier="tcp", shares=(2, 1), traces=traces) as started:
        started.run(work)
        ClusterSpec.write(started.spec, tmp_path / SPEC_NAME)

    first, second = sorted(read_run(tmp_path).loads, key=lambda load: load.server)
    held_bytes = 4 << 17
    assert first.received_bytes == (2 * 4 + 1) * held_bytes == 2 * second.received_bytes, "pushes and first values"
    assert first.sent_bytes == 2 * 4 * held_bytes == 2 * second.sent_bytes
    for load in (first, second):
        assert 0.0 < load.busy_s <= load.in_use_s
        assert load.sending_s > 0.0
    shares, _ = read_shares(f"measured:{tmp_path}", 2)
    assert sum(shares) == pytest.approx(1.0)
