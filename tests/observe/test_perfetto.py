from collections import defaultdict
from typing import Any

import msgspec
from tests.observe.stories import OWN_S, story

from paceline.observe.perfetto import trace_events
from paceline.observe.runs import Run, gather
from paceline.observe.trace import AppliedRecord, Exit, MembershipRecord, ReadRecord, Refusal, Step, TraceRecord

NEEDED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s"},
    "C": {"name", "cat", "pid", "tid", "ts", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "t": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def events_of(records: list[TraceRecord]) -> list[dict[str, Any]]:
    return msgspec.json.decode(msgspec.json.encode(trace_events(gather(records))))["traceEvents"]


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Begins and ends of slices, by track."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return found


def everything() -> list[TraceRecord]:
    records = story(more=lambda worker, clock: OWN_S if (worker + clock) % 2 else 0.0)
    return [
        *records,
        MembershipRecord(100.0, 0, 1, 0, "joined"),
        Refusal(100.5, -1, 2, "w", "NaN"),
        Refusal(100.5, 0, -1, "", "no worker"),
        Exit(101.0, "worker 2", "worker", 2, 0, 7, -9, 0.0, "was killed by SIGKILL", "the run stops"),
    ]


def test_each_event_has_what_its_kind_needs_and_no_time_is_negative() -> None:
    for event in events_of(everything()):
        assert set(event) == NEEDED[event["ph"]] | {"ph"}, event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 1) > 0


def test_slices_of_a_track_lie_in_each_other_or_beside_each_other() -> None:
    for track, spans in slices(events_of(everything())).items():
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, (track, begin, end)
            open_until.append(end)


def test_a_flow_leads_from_a_step_through_the_update_to_the_pull_and_never_back_in_time() -> None:
    events, flows = events_of(everything()), dict[int, list[dict[str, Any]]]()
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
    spans = slices(events)
    assert len(flows) == 14 * 3
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", "t", "f"]
        assert sorted(flow, key=lambda event: event["ts"]) == flow
        assert flow[0]["pid"] == flow[2]["pid"]
        for event in flow:
            track = event["pid"], event["tid"]
            assert any(begin <= event["ts"] <= end for begin, end in spans[track]), event


def test_processes_are_named_and_events_told() -> None:
    events = events_of(everything())
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"worker 0", "worker 1", "worker 2", "server 0", "launcher"}
    told = {event["name"] for event in events if event["ph"] == "i"}
    assert told == {
        "worker 1 joined",
        "refused: NaN",
        "refused: no worker",
        "worker 2 was killed by SIGKILL; the run stops",
    }


def test_a_push_that_is_applied_at_once_comes_from_the_step_that_is_under_way() -> None:
    step = Step(101.0, 0, 7, 1, None, 0.0, 1.0)
    applied, read = AppliedRecord(100.5, 0, "w", (0,), 2, 0.01), ReadRecord(101.1, 0, "w", 8, 8, 0.1, "fetch")
    flow = [event for event in events_of([step, applied, read]) if event["ph"] in "stf"]
    assert [event["ph"] for event in flow] == ["s", "t", "f"]


def test_a_run_without_records_has_no_more_than_its_names() -> None:
    events: Any = trace_events(Run())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}
