import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.errors import UsageError
from paceline.observe.runs import TraceFollower, read_run
from paceline.observe.story import story_lines
from paceline.observe.trace import (
    AppliedRecord,
    BoundRecord,
    Evaluated,
    Handled,
    MembershipRecord,
    MinClock,
    ReadRecord,
    Refusal,
    Resources,
    Step,
    Trace,
    TraceRecord,
    trace_path,
)

ONE_OF_EACH: list[TraceRecord] = [
    ReadRecord(1.0, 0, "w", 3, 2, 0.25, "fetch"),
    Step(2.0, 0, 3, 32, 0.5, 0.25, 1.0, 0.375),
    Step(2.5, 0, 4, 32, None, 0.0, 0.5),
    Evaluated(3.0, 0, 4, 0.4, 0.9),
    Resources(3.5, 0, 4096, 120, 80),
    MinClock(4.0, 1, "w", 3),
    BoundRecord(4.5, 1, "w", 1, 2, 0.25, 1.5),
    AppliedRecord(5.0, 1, "w", (2, 0, 1), 3),
    Refusal(6.0, 1, 2, "w", "not a number"),
    MembershipRecord(7.0, 1, 2, 1, "died"),
    Handled(8.0, "server-1", {"name": "Push", "clock": 3}, [{"name": "Apply"}, {"name": "Reply"}]),
]


def step(t: float, worker: int = 0, clock: int = 0) -> Step:
    return Step(t, worker, clock, 32, 0.5, 0.0, 1.0)


def test_every_kind_of_record_survives_the_round_trip(tmp_path: Path) -> None:
    with Trace(trace_path(tmp_path, "worker", 0)) as trace:
        for record in ONE_OF_EACH:
            trace.record(record)
    run = read_run(tmp_path)
    read_back = [
        *run.reads, *run.steps, *run.evaluations, *run.resources, *run.min_clocks,
        *run.bounds, *run.applied, *run.refusals, *run.memberships, *run.handled,
    ]  # fmt: skip
    assert read_back == ONE_OF_EACH


def test_a_line_names_its_kind_and_fields(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "server", 1)
    with Trace(path) as trace:
        trace.record(MinClock(4.0, 1, "w", 3))
    assert path.read_text() == '{"kind":"min_clock","t":4.0,"server":1,"table":"w","clock":3}\n'
    assert path == tmp_path / "trace" / "server-1.jsonl"


def test_steps_from_before_communication_was_measured_can_be_read(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 0)
    path.parent.mkdir()
    path.write_text('{"kind":"step","t":2.0,"worker":0,"clock":3,"samples":32,"loss":0.5,"wait_s":0.25,"step_s":1.0}\n')
    assert read_run(tmp_path).steps == (Step(2.0, 0, 3, 32, 0.5, 0.25, 1.0, comm_s=0.0),)


def test_records_of_several_processes_are_sorted_by_time(tmp_path: Path) -> None:
    for rank, times in ((0, (1.0, 4.0)), (1, (2.0, 3.0))):
        with Trace(trace_path(tmp_path, "worker", rank)) as trace:
            for t in times:
                trace.record(step(t, rank))
    assert [(record.t, record.worker) for record in read_run(tmp_path).steps] == [
        (1.0, 0), (2.0, 1), (3.0, 1), (4.0, 0),
    ]  # fmt: skip


def test_records_are_on_disk_within_20_ms_of_recording(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 0)
    trace = Trace(path)
    trace.record(step(10.0))
    trace.record(step(10.005))
    trace.record(step(10.01))
    assert path.read_bytes().count(b"\n") == 1
    trace.record(step(10.025))
    assert path.read_bytes().count(b"\n") == 4
    trace.record(step(10.03))
    trace.flush()
    assert path.read_bytes().count(b"\n") == 5
    trace.close()


def test_a_trace_without_a_path_writes_nothing_and_a_closed_one_drops(tmp_path: Path) -> None:
    with Trace(None) as silent:
        silent.record(step(1.0))
    trace = Trace(trace_path(tmp_path, "worker", 0))
    trace.close()
    trace.record(step(1.0))
    trace.close()
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["worker-0.jsonl"]
    assert read_run(tmp_path).steps == ()


def test_a_torn_last_line_is_skipped_and_mended_when_the_worker_returns(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 0)
    with Trace(path) as trace:
        trace.record(step(1.0))
    with path.open("ab") as file:
        file.write(b'{"kind":"step","t":2.0,"wor')
    assert read_run(tmp_path).steps == (step(1.0),)
    with Trace(path) as trace:
        trace.record(step(3.0, clock=1))
    assert read_run(tmp_path).steps == (step(1.0), step(3.0, clock=1))


def test_a_broken_whole_line_is_refused_by_name(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 0)
    path.parent.mkdir()
    path.write_text('{"kind":"yodel"}\n')
    with pytest.raises(UsageError, match=r"worker-0\.jsonl is not a trace.*yodel"):
        read_run(tmp_path)


BEYOND = ("1e13", "1" + 30 * "0", "-1e13", "1" + 400 * "0")


@pytest.mark.parametrize("number", BEYOND, ids=range(len(BEYOND)))
@pytest.mark.parametrize("name", ["t", "samples", "step_s"])
def test_numbers_whose_sums_would_not_be_finite_are_refused(tmp_path: Path, name: str, number: str) -> None:
    path = trace_path(tmp_path, "worker", 0)
    with Trace(path) as trace:
        trace.record(step(1.0))
    fields = {**msgspec.json.decode(path.read_bytes()), name: "here"}
    path.write_bytes(path.read_bytes() + msgspec.json.encode(fields).replace(b'"here"', number.encode()) + b"\n")
    with pytest.raises(UsageError, match=rf"is not a trace.*\$\[1\]\.{name}"):
        read_run(tmp_path)
    with pytest.raises(UsageError, match=rf"is not a trace.*\.{name}"):
        TraceFollower(path.parent).poll()


def test_what_a_trace_has_in_the_place_of_a_word_is_told_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 0)
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode({"kind": "yodel \x1b[2J" + 10_000 * "o"}) + b"\n")
    with pytest.raises(UsageError, match=r"worker-0\.jsonl is not a trace.*yodel \?\[2J") as refused:
        read_run(tmp_path)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Without that, a reader waits for as long as no process writes to the pipe."""
    path = trace_path(tmp_path, "worker", 0)
    path.parent.mkdir()
    make(path)
    for read in (read_run, story_lines, lambda folder: TraceFollower(folder / "trace").poll()):
        with pytest.raises(UsageError, match=r"cannot read the trace .*worker-0\.jsonl"):
            read(tmp_path)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No trace was found"):
        read_run(tmp_path)


def test_the_tail_returns_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "worker-0.jsonl"
    tail = TraceFollower(path.parent)
    assert tail.poll() == []
    with Trace(path) as trace:
        trace.record(step(1.0))
    line = path.read_bytes()
    assert tail.poll() == [step(1.0)]
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(line[:10])
        file.flush()
        assert tail.poll() == []
        file.write(line[10:])
    assert tail.poll() == [step(1.0)]


def test_the_tail_follows_every_worker_and_no_server(tmp_path: Path) -> None:
    for role, rank in (("worker", 1), ("worker", 0), ("server", 0)):
        with Trace(trace_path(tmp_path, role, rank)) as trace:
            trace.record(step(1.0, rank))
    assert TraceFollower(tmp_path / "trace").poll() == [step(1.0, 0), step(1.0, 1)]


def test_a_full_disk_ends_the_trace_in_one_line_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = trace_path(tmp_path, "worker", 0), list[str]()
    trace, another = (Trace(path, tell=told.append) for path in (path, trace_path(tmp_path, "worker", 1)))
    trace.record(step(1.0))

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    for clock in range(3):
        trace.record(step(2.0 + clock, clock=clock))
        another.record(step(2.0 + clock, clock=clock))
    trace.flush()
    another.flush()
    monkeypatch.undo()
    trace.record(step(9.0))
    trace.close()
    another.close()

    (line,) = told  # of all processes of a run
    assert "worker-0.jsonl ends here: No space left on device. Training goes on" in line
    assert read_run(tmp_path).steps == (step(1.0),)


def test_a_trace_that_cannot_be_made_is_told_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("in the way")
    told = list[str]()
    with Trace(trace_path(tmp_path, "worker", 0), tell=told.append) as trace:
        trace.record(step(1.0))
    assert len(told) == 1


def test_a_bounded_trace_keeps_the_latest_records_and_is_followed_without_a_gap(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 0)
    tail, seen = TraceFollower(path.parent), list[TraceRecord]()
    with Trace(path, max_bytes=2000) as trace:
        for clock in range(200):
            trace.record(step(float(clock), clock=clock))
            trace.flush()
            seen += tail.poll()
    assert seen == [step(float(clock), clock=clock) for clock in range(200)]
    files = {file.name: file.stat().st_size for file in path.parent.iterdir()}
    assert set(files) == {"worker-0.jsonl", "worker-0.jsonl.old"}
    assert max(files.values()) <= 2000
    assert read_run(tmp_path).steps[-1] == step(199.0, clock=199)


def test_a_worker_that_returns_reads_no_more_of_its_trace_than_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace_path(tmp_path, "worker", 0)
    with Trace(path) as trace:
        for clock in range(5000):
            trace.record(step(float(clock), clock=clock))
    torn = b'{"kind":"step",' + b"x" * 100_000
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(torn)
    num_read = 0
    pread = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal num_read
        num_read += size
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    Trace(path).close()
    assert num_read < len(torn) + 2 * 65536 < whole
    assert path.stat().st_size == whole
