"""What a server was told is done again without workers: the same values, wherever the server was killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.nodes.test_faults import NUM_WORKERS, Ledger
from tests.nodes.test_successors import POLICIES, Fate, ServerPlace, Trained, killable

from paceline.core.events import Timeout
from paceline.errors import PacelineError
from paceline.job.addresses import SPEC_NAME
from paceline.job.spec import ClusterSpec
from paceline.launch.replaying import (
    ClockReached,
    ReplayDiffers,
    StaleRead,
    ValueNotFinite,
    replay_server,
    tensors_of,
)
from paceline.server.journal import Entry
from paceline.server.record_file import RecordFile, UnreadableRecord, read_frames, record_path
from paceline.server.record_follower import Moment
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_messages import CODEC, Attached, Happened, Proved, Pushed

GIB = 1 << 30


def recorded(
    policy: str, run_dir: Path, strides: tuple[int, ...], told: list[str], max_bytes: int = GIB
) -> list[ServerPlace]:
    """Train with servers that are recorded, and killed at every so many points."""
    run_dir.mkdir(mode=0o700)
    spec = ClusterSpec(
        job="replay", num_workers=NUM_WORKERS, num_servers=len(strides), transport="shm", run_dir=str(run_dir)
    )
    spec.write(run_dir / SPEC_NAME)

    def link(rank: int) -> ReplicaLink:
        return ReplicaLink(record=RecordFile(record_path(run_dir, rank), max_bytes, told.append))

    job = Trained(Ledger(policy))
    with killable("shm", run_dir, strides, link) as (servers, places):
        servers.run(NUM_WORKERS, job.work)
    return places


@pytest.mark.parametrize(
    "policy",
    [pytest.param(policy, marks=[] if at in (0, 1, 3) else pytest.mark.campaign) for at, policy in enumerate(POLICIES)],
)
def test_a_replay_comes_to_the_bits_that_servers_had_that_were_killed(policy: str, tmp_path: Path) -> None:
    told: list[str] = []
    places = recorded(policy, tmp_path / "run", (83, 149), told)
    assert all(place.fate.num_kills > 1 for place in places)
    for rank in range(2):
        replayed = replay_server(tmp_path / "run", rank)
        assert replayed.is_proved
        if policy.partition(":")[0] != "backup":
            assert {"model", "rows"} < set(replayed.digests), "the ledger's table as well"
    assert told == []


def test_a_server_that_was_killed_between_its_journal_and_its_record_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fate, note = Fate(61), ReplicaLink.note

    def note_late(link: ReplicaLink, *args: Any) -> None:
        fate.pass_point()
        note(link, *args)

    monkeypatch.setattr(ReplicaLink, "note", note_late)
    recorded("ssp:2", tmp_path / "run", (0,), [])
    assert fate.num_kills > 1
    monkeypatch.setattr(ReplicaLink, "note", note)
    assert replay_server(tmp_path / "run", 0).is_proved


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    recorded("asynchronous", folder, (0,), [])
    return folder


def shortened(run_dir: Path, tmp_path: Path, num_frames: int, more: bytes = b"") -> Path:
    """A copy of a run whose record ends after so many frames, and some bytes."""
    copy = tmp_path / "cut"
    record_path(copy, 0).parent.mkdir(parents=True)
    (copy / SPEC_NAME).write_bytes((run_dir / SPEC_NAME).read_bytes())
    ends = [stop for _, _, stop in read_frames(record_path(run_dir, 0), with_bodies=False)]
    content = record_path(run_dir, 0).read_bytes()
    record_path(copy, 0).write_bytes(content[: ends[num_frames]] + more)
    return copy


def test_a_record_that_was_cut_in_a_frame_is_replayed_to_the_last_whole_one(run_dir: Path, tmp_path: Path) -> None:
    whole, cut = replay_server(run_dir, 0), replay_server(shortened(run_dir, tmp_path, -40, b"\1\2\3" * 5), 0)
    assert whole.num_events > cut.num_events > 0
    assert (cut.is_proved, cut.end, cut.stopped) == (False, "", "")
    assert set(cut.digests) == set(whole.digests)


def test_other_values_than_at_the_end_are_told(run_dir: Path, tmp_path: Path) -> None:
    copy = shortened(run_dir, tmp_path, -40)
    record = RecordFile(record_path(copy, 0), GIB, print)
    assert not record.open()
    record.append(CODEC.encode(Proved({"model": "0" * 64})))
    record.close()
    with pytest.raises(ReplayDiffers, match="server 0 had other values at its end than its replay"):
        replay_server(copy, 0)


@pytest.mark.parametrize("damage", [b"", b"something else", bytes(64)])
def test_a_file_that_is_no_record_is_refused(run_dir: Path, tmp_path: Path, damage: bytes) -> None:
    copy = shortened(run_dir, tmp_path, 0)
    record_path(copy, 0).write_bytes(damage)
    with pytest.raises(UnreadableRecord, match="is not a record of a server of this version"):
        replay_server(copy, 0)


def test_a_damaged_record_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = shortened(run_dir, tmp_path, 20)
    content = bytearray(record_path(copy, 0).read_bytes())
    *_, (header, _, stop) = read_frames(record_path(copy, 0), with_bodies=False)
    place = content.rindex(header, 0, stop)
    content[place] ^= 255
    record_path(copy, 0).write_bytes(content)
    with pytest.raises(PacelineError, match="is damaged"):
        replay_server(copy, 0)


def rewritten(run_dir: Path, tmp_path: Path, change: Callable[[int, bytes, bytes], tuple[bytes, bytes] | None]) -> Path:
    """A copy of a run whose record has other frames, with checksums that hold; None leaves one out."""
    copy, frames = shortened(run_dir, tmp_path, 0), list(read_frames(record_path(run_dir, 0)))
    record_path(copy, 0).unlink()
    record = RecordFile(record_path(copy, 0), GIB, print)
    assert record.open()
    for number, (header, body, _) in enumerate(frames):
        changed = change(number, header, bytes(body))
        if changed is not None:
            record.append(changed[0], memoryview(changed[1]))
    record.close()
    return copy


def without_pushes(_: int, header: bytes, body: bytes) -> tuple[bytes, bytes] | None:
    return None if isinstance(CODEC.decode(header), Pushed) else (header, body)


def with_other_state(number: int, header: bytes, body: bytes) -> tuple[bytes, bytes]:
    return header, body if number else b"\xc1" + body[1:]


@pytest.mark.parametrize("change", [without_pushes, with_other_state])
def test_a_record_of_what_no_server_is_told_is_refused(run_dir: Path, tmp_path: Path, change: Any) -> None:
    with pytest.raises(UnreadableRecord, match=r"is damaged after event \d+: the head sent a \w+ that makes no sense"):
        replay_server(rewritten(run_dir, tmp_path, change), 0)


def test_a_record_that_begins_anew_in_the_middle_is_refused(run_dir: Path, tmp_path: Path) -> None:
    header, body, _ = next(read_frames(record_path(run_dir, 0)))
    with pytest.raises(UnreadableRecord, match=r"is damaged after event \d+: the head says that it begins"):
        replay_server(rewritten(run_dir, tmp_path, lambda at, *frame: (header, bytes(body)) if at == 20 else frame), 0)


def test_a_replay_stops_where_a_condition_is_met(run_dir: Path) -> None:
    seen: list[Moment] = []
    stopped = replay_server(run_dir, 0, ClockReached(2).met, seen.append)
    assert stopped.stopped.endswith("has reached clock 2")
    assert seen[0].number == stopped.num_events < replay_server(run_dir, 0).num_events
    assert replay_server(run_dir, 0, StaleRead(1 << 20).met).stopped == ""
    assert "clocks behind" in replay_server(run_dir, 0, StaleRead(-1).met).stopped, "any read is staler"


def test_a_replay_stops_where_a_value_turns_nan(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert replay_server(run_dir, 0, ValueNotFinite().met).stopped == ""
    found = {"values": tensors_of}

    def spoilt(moment: Moment, table: str) -> Any:
        tensors = dict(found["values"](moment, table))
        if table == "model" and moment.tables["model"].version >= 3:
            tensors["values"][5] = float("nan")
        return tensors

    monkeypatch.setattr("paceline.launch.replaying.tensors_of", spoilt)
    stopped = replay_server(run_dir, 0, ValueNotFinite().met)
    assert stopped.stopped == "1 of 257 numbers of 'values' of table 'model' are NaN or infinite"


def test_a_record_takes_no_more_disk_than_it_may_and_the_run_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    recorded("bsp", tmp_path / "run", (0,), told, max_bytes=20_000)
    [line] = told
    assert line.endswith("it has the 1.86e-05 GiB that it may have; for more: --record-gib")
    assert 10_000 < record_path(tmp_path / "run", 0).stat().st_size <= 20_000
    replayed = replay_server(tmp_path / "run", 0)
    assert replayed.num_events > 10
    assert replayed.end == "it had reached its bound (--record-gib), or the disk was full, and the run went on"


@pytest.mark.parametrize(
    ("in_record", "in_journal", "expected"),
    [
        ([1, 2], [1, 2, 3], [1, 2, 3]),  # killed between the two
        ([1, 2], [1, 2], [1, 2]),
        ([1, 2], [], [1, 2]),  # a snapshot was written since
        ([1, 2], [3], [1, 2, 3]),  # and then one entry
    ],
)
def test_a_successor_completes_the_record_by_the_journal(
    in_record: list[int], in_journal: list[int], expected: list[int], tmp_path: Path
) -> None:
    first = ReplicaLink(record=RecordFile(tmp_path / "record", GIB, print))
    first.open(b"state")
    for now in in_record:
        first.note(Timeout(), float(now))
    first.note_idle()
    first.close()
    second = ReplicaLink(record=RecordFile(tmp_path / "record", GIB, print))
    second.complete_record([Entry(Timeout(), float(now)) for now in in_journal])
    second.open(b"state")
    second.close()
    told = [CODEC.decode(header) for header, _, _ in read_frames(tmp_path / "record")]
    assert [each.now for each in told if isinstance(each, Happened)] == expected
    assert sum(isinstance(each, Attached) for each in told) == 1


def test_a_successor_writes_nothing_behind_the_end_of_a_record(tmp_path: Path) -> None:
    told: list[str] = []
    first = RecordFile(tmp_path / "record", 200, told.append)
    assert first.open()
    first.append(b"first")
    first.append(bytes(200))
    first.append(b"behind the end")
    first.close()
    second = RecordFile(tmp_path / "record", GIB, told.append)
    assert not second.open()
    assert second.last_headers(9) == []
    second.append(b"second")
    second.close()
    assert [header for header, _, _ in read_frames(tmp_path / "record")] == [b"first"]
    assert len(told) == 1


def test_a_file_that_is_no_record_is_not_written_to(tmp_path: Path) -> None:
    told, path = list[str](), tmp_path / "record"
    path.write_bytes(b"something else")
    record = RecordFile(path, GIB, told.append)
    assert not record.open()
    record.append(b"first")
    record.close()
    assert path.read_bytes() == b"something else"
    assert "is not a record" in told[0]
