"""How the processes of a job on several machines arrive, as far as one machine can show it."""

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.leaks import nothing_left_behind

from paceline.errors import DeadlineExceeded, UsageError
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.job.folders import names_in
from paceline.job.machines import Machine, own_addresses, this_machine
from paceline.job.spec import ClusterSpec, write_private
from paceline.launch.rendezvous.detect import Detected, detect
from paceline.launch.rendezvous.join import FOUNDER_NAME, BootstrapResult, bootstrap_process, listening_host
from paceline.launch.rendezvous.liveness_lock import (
    VERSION,
    Heartbeat,
    LifeWatch,
    LivenessLock,
    ProcessInfo,
    SilenceTimer,
    wait_all_ended,
    wait_end_elsewhere,
)
from paceline.launch.rendezvous.store import FolderRendezvous, Invitation

OTHER = Machine("node-1", "b1")
DEADLINE_S = 30.0


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where jobs of this test meet; none waits for long."""
    monkeypatch.setenv("PACELINE_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("PACELINE_START_TIMEOUT_S", "20")
    return tmp_path


def rank(number: int, **more: str) -> Detected:
    """One of two workers whose launcher does not say on how many machines they are."""
    variables = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "node-0", "MASTER_PORT": "1", **more}
    found = detect(variables)
    assert found is not None
    assert found.may_span
    return found


@contextmanager
def beside(jobs: Path, process_info: ProcessInfo) -> Iterator[None]:
    """Have a worker 1 of another machine, or of another paceline, come to the job that is there next."""

    def come() -> None:
        pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
        while not (found := list(jobs.glob("*/worker-0.life"))):
            pause.wait(0.005)
            assert time.monotonic() < deadline
        write_private(found[0].with_name("worker-1.life"), msgspec.json.encode(process_info))

    coming = threading.Thread(target=come, daemon=True)
    coming.start()
    yield
    coming.join(DEADLINE_S)


def test_processes_that_turn_out_to_be_on_one_machine_share_its_memory(jobs: Path, undo: ExitStack) -> None:
    arrived: list[BootstrapResult] = []
    second = threading.Thread(target=lambda: arrived.append(bootstrap_process(rank(1), "node:2", undo)), daemon=True)
    second.start()
    first = bootstrap_process(rank(0), "node:2", undo)
    second.join(DEADLINE_S)

    [other] = arrived
    assert (first.spec.transport, first.spec.encrypted, first.spec.num_servers) == ("shm", False, 2)
    assert other.spec == first.spec
    assert [list(one.assignment.sidecars) for one in (first, other)] == [[0, 1], []]
    assert [one.local_rank for one in (first, other)] == [0, 1]
    assert listening_host(first.spec, first.founder) == "127.0.0.1"


def test_processes_on_two_machines_have_certificates_and_servers_on_both(
    jobs: Path, undo: ExitStack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if not own_addresses():
        pytest.skip("this machine has no address but those of loopback")
    address = own_addresses()[0]
    monkeypatch.setenv("PACELINE_HOST", address)

    with beside(jobs, ProcessInfo(OTHER, VERSION)):
        first = bootstrap_process(rank(0), "node:1", undo)

    spec, run_dir = first.spec, Path(first.spec.run_dir)
    assert (spec.transport, spec.encrypted, spec.num_servers) == ("tcp", True, 2)
    assert list(first.assignment.sidecars) == [0]
    assert listening_host(spec, first.founder) == address
    assert (run_dir / FOUNDER_NAME).read_text() == address
    for holder in (Holder("server", 1), Holder("worker", 1)):
        assert tls_settings(run_dir / "keys", holder).certificate.name == f"{holder}.pem"
    assert not (run_dir / "keys" / "authority.key").exists()
    assert f"2 machines ({this_machine()}, node-1): tcp, encrypted; this one is {address}" in capfd.readouterr().err


def test_a_missing_process_is_named_and_where_the_others_are(
    jobs: Path, undo: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_START_TIMEOUT_S", "0")

    with pytest.raises(
        DeadlineExceeded, match=rf"worker 1 did not come to .* within 0 s \(there: worker 0 on {this_machine()}\)"
    ):
        bootstrap_process(rank(0), None, undo)


def test_another_version_is_refused_on_both_sides_and_both_are_named(jobs: Path, undo: ExitStack) -> None:
    old = ProcessInfo(OTHER, "0.0.9 (wire version 1)")
    named = rf"worker 1 on node-1 runs paceline 0\.0\.9 \(wire version 1\), and this .* runs {re.escape(VERSION)}"
    with beside(jobs, old), pytest.raises(UsageError, match=named):
        bootstrap_process(rank(0), None, undo)

    folder = jobs / "of-another"
    folder.mkdir(mode=0o700)
    store = FolderRendezvous(jobs, replace(rank(1), restart=1).key)
    undo.callback(store.close)
    store.invite(Invitation(str(folder), OTHER, old.version))
    with pytest.raises(UsageError, match=r"the first process of the job on node-1 runs paceline 0\.0\.9"):
        bootstrap_process(replace(rank(1), restart=1), None, undo)
    assert (folder / "worker-1.life").exists()  # from which the first can say which were there, too


def test_a_folder_that_only_the_other_machine_sees(jobs: Path, undo: ExitStack) -> None:
    store = FolderRendezvous(jobs, rank(1).key)
    undo.callback(store.close)
    store.invite(Invitation("/elsewhere/paceline-1", OTHER, VERSION))

    told = rf"node-1 has made the folder of the job, /elsewhere/paceline-1, which {this_machine()} does not see: let"
    with pytest.raises(UsageError, match=told):
        bootstrap_process(rank(1), None, undo)


def test_a_machine_that_is_gone_holds_up_no_other_though_its_locks_stay(tmp_path: Path) -> None:
    liveness_lock = LivenessLock.acquire(tmp_path, "worker", 0, 1)

    assert not wait_end_elsewhere(tmp_path, "worker", 0, silence_s=0.0)
    liveness_lock.release()
    assert wait_end_elsewhere(tmp_path, "worker", 0)
    assert wait_end_elsewhere(tmp_path / "cleared", "worker", 0)


def test_a_file_server_that_is_away_is_no_end_of_a_process_nor_of_what_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = [OSError(5, "Input/output error")] * 2 + ["there", OSError(5, "Input/output error"), "ended"]

    def look(*_: object) -> Any:
        found = seen.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(LifeWatch, "look", look)
    assert wait_end_elsewhere(tmp_path, "worker", 0)
    assert not seen
    told = "it cannot be seen whether worker 0 takes part: [Errno 5] Input/output error"
    assert capsys.readouterr().err == f"paceline: {told}\n"

    seen += [OSError(5, "Input/output error")] * 2 + [-1]
    monkeypatch.setattr("paceline.launch.rendezvous.liveness_lock.newest_life", look)
    wait_all_ended(ClusterSpec(job="3f", num_workers=1, num_servers=1, transport="shm", run_dir=str(tmp_path)))
    assert "it cannot be seen which workers take part" in capsys.readouterr().err


def test_a_process_that_cannot_tell_that_it_came_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with nothing_left_behind(), pytest.raises(OSError, match="No space left"):
        LivenessLock.acquire(tmp_path, "worker", 0, 1)
    assert names_in(tmp_path) == set()


def test_a_process_shows_that_it_lives_whatever_its_clock_says(tmp_path: Path) -> None:
    path, now = tmp_path / "life", 100.0
    path.touch()
    os.utime(path, (7.0, 7.0))
    heartbeat = Heartbeat(path, beat_s=0.001)
    waiting, touched = threading.Event(), path.stat().st_mtime_ns
    for _ in range(1000):
        if path.stat().st_mtime_ns != touched:
            break
        waiting.wait(0.01)
    heartbeat.stop()
    assert path.stat().st_mtime_ns != touched

    watch = SilenceTimer(lambda: now)
    assert watch.silent_s(5) == 0.0
    while now < 130.0:
        now += 1.0
        watch.silent_s(5)
    assert watch.silent_s(5) == 30.0
    now += 3600.0  # the watching process was stopped
    assert watch.silent_s(5) < 35.0
    assert watch.silent_s(3) == 0.0  # any other time is a sign of life, an earlier one too


def test_the_names_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    assert names_in(tmp_path / "gone") == set()
