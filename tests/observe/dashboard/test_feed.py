"""A page gets everything once, then what has changed, and everything again if it has missed something."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.observe.stories import story

from paceline.observe.dashboard import feed as feeds
from paceline.observe.dashboard.feed import Feed
from paceline.observe.runs import ALL_TRACES, TraceFollower
from paceline.observe.trace import OLDER, Step, Trace, TraceRecord, trace_path


def write(run: Path, records: list[TraceRecord]) -> None:
    """Append records to the traces of three workers and a server."""
    for record in sorted(records, key=lambda record: record.t):
        rank = getattr(record, "worker", getattr(record, "rank", None))
        role = "server" if hasattr(record, "server") or rank is None else "worker"
        with Trace(trace_path(run, role, 0 if role == "server" else int(rank or 0))) as trace:
            trace.record(record)


def step(worker: int, clock: int) -> Step:
    return Step(100.0 + clock, worker, clock, 8, 1.0 / (clock + 1), 0.0, 1.0)


def told(message: bytes) -> dict[str, Any]:
    return msgspec.json.decode(message)


def test_first_everything_then_what_is_new(tmp_path: Path) -> None:
    write(tmp_path, [step(0, clock) for clock in range(6)])
    feed = Feed([tmp_path], ["a"])
    feed.publish()
    version, message = feed.wait_since(0, 0.0)
    run = told(message)["runs"][0]
    assert (told(message)["whole"], run["label"], run["times"]["from"], run["times"]["num"]) == (True, "a", 0, 21)
    write(tmp_path, [step(0, 6)])
    feed.publish()
    _, news = feed.wait_since(version, 0.0)
    assert not told(news)["whole"]
    assert told(news)["runs"][0]["times"]["from"] == 20
    assert len(told(news)["runs"][0]["times"]["series"]["loss"][""]) == 5
    feed.publish()
    _, missed = feed.wait_since(version, 0.0)
    assert told(missed)["whole"]
    assert feed.wait_since(3, 0.0) == (3, b"")


def test_one_that_waits_is_woken_and_one_that_does_not_look_holds_up_nothing(tmp_path: Path) -> None:
    write(tmp_path, story())
    feed, found = Feed([tmp_path], ["a"]), list[bytes]()
    waiting = threading.Thread(target=lambda: found.append(feed.wait_since(0, 100.0)[1]))
    waiting.start()
    feed.publish()
    waiting.join(100.0)
    assert told(found[0])["runs"][0]["now"]["verdict"]["kind"] == "healthy"
    feed.close()
    assert feed.wait_since(1, 100.0) == (1, b"")


def test_long_traces_are_read_in_pieces_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PIECE_BYTES", 1000)
    monkeypatch.setattr(feeds, "_PATIENCE_S", 0.0)
    write(tmp_path, story())
    feed = Feed([tmp_path], ["a"])
    states: list[tuple[str, float]] = []
    while not states or states[-1][0] == "reading":
        feed.publish()
        run = told(feed.wait_since(0, 0.0)[1])["runs"][0]
        states.append((run["state"], run["read_share"]))
        assert len(states) < 200
    assert len(states) > 3
    assert states[0][1] < 0.5
    assert states[-1] == ("running", 1.0)


def test_a_bounded_trace_is_followed_from_one_file_to_the_next(tmp_path: Path) -> None:
    path = trace_path(tmp_path, "worker", 0)
    follower = TraceFollower(tmp_path / "trace", ALL_TRACES, piece_bytes=1 << 16)
    seen: list[int] = []
    with Trace(path, max_bytes=2000) as trace:
        for clock in range(60):
            trace.record(step(0, clock))
            if clock % 7 == 0:
                seen += [record.clock for record in follower.poll() if isinstance(record, Step)]
        trace.flush()
    seen += [record.clock for record in follower.poll() if isinstance(record, Step)]
    assert path.with_name(path.name + OLDER).exists(), "the trace was never bounded"
    assert seen == list(range(60))
    late = TraceFollower(tmp_path / "trace", ALL_TRACES, piece_bytes=1 << 16)
    assert len(late.poll()) > len(path.read_bytes().splitlines()), "the file before was not read"


def test_several_runs_are_told_and_compared(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, story())
    feed = Feed([tmp_path / "a", tmp_path / "b"], ["a", "b"])
    feed.publish()
    message = told(feed.wait_since(0, 0.0)[1])
    assert [run["label"] for run in message["runs"]] == ["a", "b"]
    assert message["compared"] == ["equal: 42 losses of 3 workers, bit by bit"]
