import itertools
import os
from pathlib import Path

import msgspec
import pytest
from tests.observe.stories import OWN_S, story, window_of

from paceline.cli import answer
from paceline.errors import UsageError
from paceline.launch.running import find_run
from paceline.observe.progress import RunView
from paceline.observe.screen import RunPicture, WorkerRow, as_data, event_line, picture, screen_lines, server_row
from paceline.observe.trace import (
    BoundRecord,
    Exit,
    MembershipRecord,
    Sampled,
    Serving,
    Trace,
    TraceRecord,
    trace_path,
)
from paceline.observe.verdict import ProcessState, judge


def slow_worker(num_workers: int = 3) -> list[TraceRecord]:
    return story(num_workers, more=lambda worker, _clock: 2 * OWN_S if worker == 1 else 0.0)


def write(run: Path, records: list[TraceRecord]) -> None:
    """Write records to the traces of their processes."""
    with Trace(trace_path(run, "server", 0)) as server:
        traces = [Trace(trace_path(run, "worker", rank)) for rank in range(3)]
        for record in sorted(records, key=lambda record: record.t):
            rank = getattr(record, "worker", getattr(record, "rank", None))
            (server if hasattr(record, "server") or rank is None else traces[rank]).record(record)
        for trace in traces:
            trace.close()


def shown(num_workers: int, records: list[TraceRecord]) -> RunPicture:
    window = window_of(records)
    rows = [WorkerRow(worker, 14, 0.25, 100.0, 0, 0.5, 0.5) for worker in range(num_workers)]
    processes = {("worker", worker): ProcessState("S", 282_000_000) for worker in range(num_workers)}
    events = [f"{number} something has happened to a worker, and it is told at length here" for number in range(9)]
    return picture(61.0, judge(window), rows, window, processes, events)


def test_the_verdict_comes_first_then_workers_servers_and_events() -> None:
    lines = screen_lines(shown(3, slow_worker()), 80, 24)
    assert lines[0] == "61 s  worker 1 is 3.0x slower: computing; the others wait 66 % for it"
    assert " ".join(lines[1].split()) == "w clock lead loss samples/s step comp data wait for wire stale mem"
    assert lines[2] == " 0      14    +0  0.2500       100  152 ms  33%   0%  66%   1   1%   0/0  282M"
    assert lines[3] == " 1      14    +0  0.2500       100  152 ms  99%   0%   0%   -   1%   0/0  282M"
    assert lines[5].split()[:4] == ["s", "busy", "apply", "queue"]
    assert lines[6].split() == ["0", "5%", "1.0", "ms", "0", "-", "0", "0", "-", "1", "w"]
    assert lines[7].strip().startswith("4 something")


@pytest.mark.parametrize("num_workers", [1, 3, 16, 64])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 12), (132, 50)])
def test_it_fits_a_terminal(num_workers: int, width: int, height: int) -> None:
    lines = screen_lines(shown(num_workers, slow_worker(num_workers)), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    if num_workers > 1:
        assert any(line.startswith(" 1 ") for line in lines), "the worker that the verdict names is left out"


def test_a_sentence_that_is_too_long_takes_two_lines() -> None:
    picture_ = shown(3, slow_worker())
    first, second, *_ = screen_lines(picture_, 60, 24)
    assert (first + second.strip()).replace(" ", "") == f"61s{picture_.verdict.text}".replace(" ", "")


def test_a_state_and_refusals_stand_in_a_row() -> None:
    rows = [WorkerRow(0, 3, None, 0.0, None, 0.0, 0.0, 2, "dead since 14:03:22", counts_samples=False)]
    assert (
        screen_lines(RunPicture(1.0, workers=rows))[2]
        == " 0       3     -       -         - 2 refused dead since 14:03:22"
    )


def test_texts_of_other_processes_do_not_control_the_terminal() -> None:
    lines = screen_lines(RunPicture(1.0, events=["refused: \x1b[2J"]))
    assert "\x1b" not in "".join(lines)


def test_a_bound_that_moves_is_an_event_once_and_not_for_each_server() -> None:
    moved = BoundRecord(12.5, 0, "w", 1, 2, 0.18, 0.75)
    assert event_line(moved, 10.0) == (
        "    2.5 s  table 'w': the bound moves from 1 to 2; workers waited 18% of the time, on values 0.8 clocks behind"
    )
    assert event_line(BoundRecord(12.5, 1, "w", 1, 2, 0.18, 0.75), 10.0) == ""


def test_a_server_says_rates_and_its_hottest_row() -> None:
    records: list[TraceRecord] = [
        Serving(100.0, 0, 0.0, 0.0, 0, 0, 0),
        Serving(102.0, 0, 2.0, 0.5, 4000, 2000, 3, (("words", 7, 0.9),)),
    ]
    row = server_row(0, window_of(records))
    assert (row.busy, row.num_waiting, row.received_per_s, row.sent_per_s) == (0.25, 3, 2000.0, 1000.0)
    assert row.hot_row == (7, 0.9)
    assert row.num_behind is None


@pytest.mark.parametrize(("num_behind", "lag"), [(None, "-"), (0, "0"), (2, "2")])
def test_a_server_says_how_far_its_replica_is(num_behind: int | None, lag: str) -> None:
    records: list[TraceRecord] = [Serving(100.0, 0, 0.0, 0.0, 0, 0, 3, num_behind=num_behind)]
    shown = RunPicture(1.0, servers=[server_row(0, window_of(records))])
    lines = [text.split() for text in screen_lines(shown)]
    heading, line = next(pair for pair in itertools.pairwise(lines) if pair[0][:1] == ["s"])
    assert line[heading.index("lag")] == lag
    assert as_data(shown)["servers"][0]["replica_lag"] == num_behind  # pyright: ignore


def test_totals_of_a_server_in_the_place_of_another_begin_anew() -> None:
    records: list[TraceRecord] = [
        Serving(100.0, 0, 50.0, 5.0, 9_000_000, 9_000_000, 0),
        Serving(101.0, 0, 0.0, 0.0, 0, 0, 0),
        Serving(102.0, 0, 1.0, 0.5, 4000, 2000, 0),
    ]
    row = server_row(0, window_of(records))
    assert (row.busy, row.received_per_s, row.sent_per_s) == (0.5, 4000.0, 2000.0)


def test_data_of_a_picture_are_json() -> None:
    data = msgspec.json.decode(msgspec.json.encode(as_data(shown(3, slow_worker()))))
    assert data["verdict"]["subject"] == "worker 1"
    assert data["workers"][0]["wait_s"]["worker 1"] == pytest.approx(2 * OWN_S, rel=0.01)
    assert data["servers"][0]["busy"] == pytest.approx(0.05)


def test_top_shows_a_run_from_its_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, slow_worker())
    assert answer(["top", str(tmp_path), "--once"]) == 3
    assert "worker 1 is 3.0x slower" in capsys.readouterr().out.splitlines()[0]
    assert answer(["top", str(tmp_path), "--once", "--json"]) == 3
    assert msgspec.json.decode(capsys.readouterr().out)["verdict"]["kind"] == "worker"


def test_a_view_begins_at_the_end_of_long_traces(tmp_path: Path) -> None:
    write(tmp_path, slow_worker())
    view = RunView(tmp_path / "trace", last_bytes=3000)
    view.refresh(0.0)
    assert [row.clock for row in view.rows()] == [14, 13, 14]  # when workers 0 and 2 had finished their last


def test_a_death_is_the_verdict_and_an_event(tmp_path: Path) -> None:
    records = story()
    write(tmp_path, records)
    with Trace(trace_path(tmp_path, "launcher", 0)) as trace:
        trace.record(
            Exit(records[-1].t, "worker 2", "worker", 2, 0, 1, -9, 0.0, "was killed by SIGKILL", "the run stops")
        )
    view = RunView(tmp_path / "trace")
    view.refresh(0.0)
    assert view.verdict().text.startswith("worker 2 is dead since ")
    assert "worker 2 was killed by SIGKILL; the run stops" in view.picture().events[-1]


def test_a_worker_that_was_told_to_leave_and_has_is_not_dead(tmp_path: Path) -> None:
    records = story()
    write(tmp_path, records)
    with Trace(trace_path(tmp_path, "launcher", 0)) as trace:
        told = "was told to leave, and has"
        trace.record(Exit(records[-1].t, "worker 2", "worker", 2, 0, 1, 143, 0.0, told, "the others go on without it"))
    view = RunView(tmp_path / "trace")
    view.refresh(0.0)
    assert "dead" not in view.verdict().text
    assert view.rows()[2].state == "left"


def test_a_worker_whose_place_was_taken_anew_is_neither_dead_nor_starting(tmp_path: Path) -> None:
    records = story()
    write(tmp_path, records)
    began_t = records[0].t
    with Trace(trace_path(tmp_path, "launcher", 0)) as trace:
        trace.record(Exit(began_t, "worker 2", "worker", 2, 0, 1, -9, 0.0, "was killed", "the others go on without it"))
    with Trace(trace_path(tmp_path, "server", 7)) as trace:  # traces are read one after another
        trace.record(MembershipRecord(began_t, 0, 2, 1, "joined"))
    view = RunView(tmp_path / "trace")
    view.refresh(0.0)
    assert "dead" not in view.verdict().text
    assert view.rows()[2].state not in ("starting", "dead")


def test_a_job_that_is_none_is_refused_and_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder of a run"):
        find_run(str(tmp_path))
    with pytest.raises(UsageError, match="neither a folder nor an address"):
        find_run("tcp://10.0.0.1:1")


def test_a_run_whose_workers_never_took_a_step_ends_and_shows_why_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = 1 << 30  # no process has such a number
    died = Exit(101.0, "worker 0", "worker", 0, 0, gone, 1, 1.7e9, "ended with exit code 1", "the run stops")
    sample = Sampled(100.0, "server", 0, gone, 0.1, 0.0, 0.0, 0, 0, os.uname().nodename)
    with Trace(trace_path(tmp_path, "server", 0)) as server, Trace(trace_path(tmp_path, "launcher", 0)) as launcher:
        server.record(sample)
        server.record(Serving(100.0, 0, 0.1, 0.0, 0, 0, 0))
        launcher.record(died)
    assert answer(["top", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "worker 0 is dead since" in told
    assert "worker 0 ended with exit code 1; the run stops" in told
