"""What workers of another machine write down comes to the run, with the times of its machine."""

from __future__ import annotations

import math
import time
from pathlib import Path

import msgspec
import pytest

from paceline.errors import PeerError
from paceline.launch.joining.messages import WorkerTrace, decode_from_joiner, encode
from paceline.launch.joining.traces import PIECE_BYTES, TraceReceiver, TraceSender
from paceline.observe.runs import read_run
from paceline.observe.trace import Exit, MinClock, Refusal, Sampled, Step, Trace, TraceRecord, trace_path

OF_OTHERS = (
    "a server that runs",
    "of a server",
    "refused by a server",
    "from the future",
    "of no time",
    "of the launcher",
)
AWAY_S = 5000.0  # by which the clock of the other machine is ahead


def step(clock: int, worker: int = 1, t: float | None = None) -> Step:
    return Step(time.monotonic() if t is None else t, worker, clock, samples=1, loss=0.5, wait_s=0, step_s=1, comm_s=0)


def lines(*records: TraceRecord) -> bytes:
    return msgspec.json.Encoder().encode_lines(records)


def test_all_is_sent_in_pieces_once_and_with_times_of_this_machine(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    receiver, sizes = TraceReceiver(here, 0), list[int]()

    def send(said: WorkerTrace) -> None:
        sizes.append(len(said.lines))
        receiver.keep(msgspec.structs.replace(said, now_s=said.now_s + AWAY_S))

    sender = TraceSender(there / "trace", (1, 2), send)
    sender.send_rest()  # nothing is there yet
    since = time.monotonic()
    num_steps = 3 * PIECE_BYTES // len(lines(step(0)))
    with Trace(trace_path(there, "worker", 1)) as trace:
        for clock in range(num_steps):
            trace.record(step(clock, t=time.monotonic() + AWAY_S))
    sender.send_rest()
    with Trace(trace_path(there, "worker", 2)) as trace:
        trace.record(step(0, worker=2, t=time.monotonic() + AWAY_S))
    sender.send_rest()
    sender.send_rest()
    receiver.close()

    steps = read_run(here).steps
    assert sorted((each.worker, each.clock) for each in steps) == [(1, clock) for clock in range(num_steps)] + [(2, 0)]
    assert len(sizes) >= 4
    assert max(sizes) <= 1 << 19
    assert all(since - 1 <= each.t <= time.monotonic() + 1 for each in steps)


@pytest.mark.parametrize(
    "sent",
    [
        b"{}\n",
        b"\xff\n",
        lines(step(0, worker=2)),
        lines(step(0), step(0, worker=0)),
        lines(Sampled(0.0, "worker", 2, 1, 0.0, 0.0, 0.0, 0)),
        lines(Sampled(0.0, "server", 1, 1, 0.0, 0.0, 0.0, 0)),
        lines(MinClock(0.0, 0, "model", 5)),
        lines(Refusal(0.0, 0, 1, "model", "late")),
        lines(step(0, t=1e12)),
        lines(step(0, t=1e308)),
        lines(Exit(0.0, "worker 1", "worker", 1, 0, None, -9, 0.0, "was killed", "all go on")),
    ],
    ids=["no record", "no text", "of another", "one of another", "with the rank of another", *OF_OTHERS],
)
def test_what_is_no_trace_of_the_worker_is_not_kept(tmp_path: Path, sent: bytes) -> None:
    receiver = TraceReceiver(tmp_path, 0)
    with pytest.raises(PeerError, match="worker 1"):
        receiver.keep(WorkerTrace(1, 0.0, sent))
    receiver.close()
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("now_s", [math.nan, -math.inf, 1e308])
def test_a_clock_that_cannot_be_is_no_message(now_s: float) -> None:
    """The difference of clocks goes into the times of all records that are kept."""
    with pytest.raises(PeerError, match="now_s"):
        decode_from_joiner(encode(WorkerTrace(1, now_s, lines(step(0)))))


def test_what_is_kept_can_be_read(tmp_path: Path) -> None:
    receiver = TraceReceiver(tmp_path, 0)
    with pytest.raises(PeerError, match="worker 1"):
        receiver.keep(WorkerTrace(1, 1e12, lines(step(0, t=-1e12))))
    receiver.keep(WorkerTrace(1, time.monotonic(), lines(Refusal(0.0, -1, 1, "model", "nan"))))
    receiver.close()
    assert [each.reason for each in read_run(tmp_path).refusals] == ["nan"]


def test_the_bound_of_the_run_holds(tmp_path: Path) -> None:
    receiver, bound = TraceReceiver(tmp_path, 2000), 2 * 2000
    for clock in range(100):
        receiver.keep(WorkerTrace(1, time.monotonic(), lines(step(clock))))
    receiver.close()
    assert 0 < sum(path.stat().st_size for path in (tmp_path / "trace").iterdir()) <= bound
