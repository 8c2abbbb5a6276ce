"""How the processes of a job find its folder, and each other."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.folders import check_folder
from paceline.job.machines import Machine
from paceline.job.spec import ClusterSpec, write_token
from paceline.launch.rendezvous import store
from paceline.launch.rendezvous.liveness_lock import (
    LifeWatch,
    LivenessLock,
    announcing_wait,
    missing_ranks,
    newest_life,
    takes_part,
    wait_all_ended,
    wait_end,
)
from paceline.launch.rendezvous.roster import Roster, declare_complete, wait_complete, wait_settled
from paceline.launch.rendezvous.store import FolderRendezvous, Invitation, JobRefusal, TorchRendezvous

LOCKS = "paceline.launch.rendezvous.liveness_lock"
HERE = Invitation("/run", Machine("host"))
NO_JOB = JobRefusal("servers is 'x', expected first:M", Machine("host"))
REFUSED = "the first process of the job, on host, does not start it: servers is 'x', expected first:M"

LEFT_OPEN = """
import sys
from pathlib import Path
from paceline.job.machines import Machine
from paceline.launch.rendezvous.store import FolderRendezvous, Invitation
board = FolderRendezvous(Path(sys.argv[1]), "job")
board.invite(Invitation("/old", Machine("host")))
import os
os._exit(0)
"""


def test_an_invitation_is_found(tmp_path: Path) -> None:
    board = FolderRendezvous(tmp_path / "jobs", "job")
    board.invite(HERE)

    assert FolderRendezvous(tmp_path / "jobs", "job").wait_invitation(1.0) == HERE
    assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o700
    board.close()
    board.close()
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [".lock"]


def test_an_invitation_of_an_earlier_run_is_none_and_is_replaced(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path)], check=True)
    assert (tmp_path / "job.meeting").exists()

    with pytest.raises(DeadlineExceeded, match=r"the first process of the job has not told .*job\.meeting"):
        FolderRendezvous(tmp_path, "job").wait_invitation(0.05)

    board = FolderRendezvous(tmp_path, "job")
    board.invite(HERE)
    assert FolderRendezvous(tmp_path, "job").wait_invitation(0.0) == HERE
    board.close()


def test_what_killed_jobs_have_left_goes_with_the_next_job_of_any_name(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path)], check=True)
    living = FolderRendezvous(tmp_path, "living")
    living.invite(HERE)

    board = FolderRendezvous(tmp_path, "next")
    board.invite(HERE)

    assert {path.name for path in tmp_path.iterdir()} == {".lock", "living.meeting", "next.meeting"}
    board.close()
    living.close()


def test_a_child_forked_while_a_job_is_announced_does_not_lock_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.0)

    def sweep(folder: Path) -> None:
        lock = os.stat(folder / store.LOCK_NAME)
        numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
        # What a forked child has open is what its parent has, as is a descriptor that is made of another one.
        held.extend(os.dup(number) for number in numbers if os.path.samestat(os.fstat(number), lock))

    boards = [FolderRendezvous(tmp_path, name) for name in ("one", "another")]
    try:
        with monkeypatch.context() as patched:
            patched.setattr(store, "_sweep", sweep)
            boards[0].invite(HERE)
        assert len(held) == 1
        boards[1].invite(HERE)
    finally:
        for number in held:
            os.close(number)
        for board in boards:
            board.close()


def test_two_runs_of_one_name_at_once_are_refused(tmp_path: Path) -> None:
    board = FolderRendezvous(tmp_path, "job")
    board.invite(HERE)

    with pytest.raises(UsageError, match="another run has the same name, and goes on"):
        FolderRendezvous(tmp_path, "job").invite(Invitation("/other", Machine("host")))

    assert FolderRendezvous(tmp_path, "job").wait_invitation(0.0) == HERE
    board.close()


def test_a_refusal_is_found_when_its_process_has_ended_and_the_next_run_replaces_it(tmp_path: Path) -> None:
    FolderRendezvous(tmp_path, "job").refuse(NO_JOB)
    for _ in range(2):
        with pytest.raises(UsageError, match=REFUSED):
            FolderRendezvous(tmp_path, "job").wait_invitation(0.0)

    board = FolderRendezvous(tmp_path, "job")
    board.invite(HERE)
    assert FolderRendezvous(tmp_path, "job").wait_invitation(0.0) == HERE
    FolderRendezvous(tmp_path, "job").refuse(NO_JOB)  # of another run of this name, which has not begun
    assert FolderRendezvous(tmp_path, "job").wait_invitation(0.0) == HERE
    board.close()


def test_a_refusal_of_an_earlier_run_is_none_and_goes_with_the_next_job_of_any_name(tmp_path: Path) -> None:
    FolderRendezvous(tmp_path, "job").refuse(NO_JOB)
    os.utime(tmp_path / "job.meeting", (1e9, 1e9))

    with pytest.raises(DeadlineExceeded, match=r"has not told .*job\.meeting"):
        FolderRendezvous(tmp_path, "job").wait_invitation(0.05)

    board = FolderRendezvous(tmp_path, "next")
    board.invite(HERE)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "next.meeting"}
    board.close()


def test_a_folder_in_which_others_can_write_is_refused_by_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    board = FolderRendezvous(tmp_path, "job")

    for call in (lambda: board.invite(HERE), lambda: board.refuse(NO_JOB), lambda: board.wait_invitation(60.0)):
        with pytest.raises(UsageError, match="others than you can write in"):
            call()


def test_the_folder_of_a_job_is_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    check_folder(tmp_path)

    tmp_path.chmod(0o750)
    with pytest.raises(UsageError, match=r"has mode 0750 .* expected 0700"):
        check_folder(tmp_path)
    with pytest.raises(UsageError, match="cannot enter the folder of the job"):
        check_folder(tmp_path / "none")


def test_the_store_of_a_launcher_has_one_invitation_for_each_start() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    first, again = (TorchRendezvous("127.0.0.1", store.port, restart) for restart in (0, 1))
    first.invite(HERE)

    assert first.wait_invitation(1.0) == HERE
    with pytest.raises(UsageError, match="a process joins its job once"):
        first.invite(HERE)
    with pytest.raises(DeadlineExceeded, match=r"rank 0 has not told .* within 0\.05 s where the job meets"):
        again.wait_invitation(0.05)


def test_the_store_of_a_launcher_has_one_refusal_for_each_start() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    first, again = (TorchRendezvous("127.0.0.1", store.port, restart) for restart in (0, 1))
    first.refuse(NO_JOB)
    again.invite(HERE)
    again.refuse(NO_JOB)

    with pytest.raises(UsageError, match=REFUSED):
        first.wait_invitation(1.0)
    assert again.wait_invitation(1.0) == HERE


def test_a_store_that_is_not_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        with pytest.raises(PeerError, match=f"the store of the launcher at 127.0.0.1:{port} does not answer"):
            TorchRendezvous("127.0.0.1", port, 0).wait_invitation(0.2)


def test_a_place_is_taken_once(tmp_path: Path) -> None:
    liveness_lock = LivenessLock.acquire(tmp_path, "worker", 1, 2)

    with pytest.raises(UsageError, match="worker 1 is there already"):
        LivenessLock.acquire(tmp_path, "worker", 1, 2)
    assert missing_ranks(tmp_path, "worker", 2) == [0]
    liveness_lock.release()


def test_processes_of_one_number_and_host_name_come_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, others = os.link, list[LivenessLock]()

    def link_later(source: Path, path: Path) -> None:  # another one comes between
        monkeypatch.setattr(os, "link", link)
        others.append(LivenessLock.acquire(tmp_path, "worker", 1, 2))
        link(source, path)

    monkeypatch.setattr(os, "link", link_later)
    taken = [LivenessLock.acquire(tmp_path, "worker", 0, 2), *others]
    assert missing_ranks(tmp_path, "worker", 2) == []
    for liveness_lock in taken:
        liveness_lock.release()


def test_one_that_comes_while_the_folder_is_cleared_is_told_that_the_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = LivenessLock.acquire(tmp_path, "worker", 1, 2)

    def look_and_clear(watch: LifeWatch) -> str:
        (tmp_path / "worker-1.life").unlink()
        return "there"

    monkeypatch.setattr(LifeWatch, "look", look_and_clear)
    with pytest.raises(UsageError, match=r"the job of .* has ended, and its folder is cleared: start the job again"):
        LivenessLock.acquire(tmp_path, "worker", 1, 2)
    assert list(tmp_path.iterdir()) == []
    present.release()


def test_without_numbers_the_first_takes_the_first_place(tmp_path: Path) -> None:
    taken = [LivenessLock.acquire(tmp_path, "server", None, 2) for _ in range(2)]

    assert [liveness_lock.index for liveness_lock in taken] == [0, 1]
    with pytest.raises(UsageError, match="all 2 servers are there already"):
        LivenessLock.acquire(tmp_path, "server", None, 2)
    for liveness_lock in taken:
        liveness_lock.release()


def test_the_place_of_a_process_that_has_died_is_free_again_and_each_life_has_its_own_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives = [LivenessLock.acquire(tmp_path, "worker", 1, 2)]
    for life in range(1, 3):
        assert newest_life(tmp_path, "worker", 1) == life - 1
        lives[-1].release()
        assert not takes_part(tmp_path, "worker", 1)
        lives.append(LivenessLock.acquire(tmp_path, "worker", 1, 2))
        assert takes_part(tmp_path, "worker", 1)
        wait_end(tmp_path, "worker", 1, life - 1)  # which is over, whatever comes after it
    assert [(lock.index, lock.life) for lock in lives] == [(1, 0), (1, 1), (1, 2)]
    assert newest_life(tmp_path, "worker", 0) == -1
    lives[-1].release()
    told = "paceline: worker 1 takes the place of the process that was worker 1 before it\n"
    assert capsys.readouterr().err == 2 * told


def test_a_place_is_not_free_again_once_its_process_has_finished_or_if_it_was_a_server(tmp_path: Path) -> None:
    finished, server = LivenessLock.acquire(tmp_path, "worker", 0, 1), LivenessLock.acquire(tmp_path, "server", 0, 1)
    finished.note_finished()
    finished.release()
    server.release()
    with pytest.raises(UsageError, match="worker 0 has been there, and has come to the end of its script"):
        LivenessLock.acquire(tmp_path, "worker", 0, 1)
    with pytest.raises(UsageError, match="all 1 workers are there already"):
        LivenessLock.acquire(tmp_path, "worker", None, 1)
    with pytest.raises(UsageError, match="server 0 is there already"):
        LivenessLock.acquire(tmp_path, "server", 0, 1)


def test_a_folder_in_which_nothing_can_be_written_ends_no_process_that_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = LivenessLock.acquire(tmp_path, "worker", 0, 1)

    def fail(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{LOCKS}.make_once", fail)
    lock.note_finished()
    lock.release()
    assert capsys.readouterr().err == (
        "paceline: the folder of the job cannot note that worker-0 has finished, and may come again: [Errno 28] No "
        "space left on device\n"
    )


def test_without_numbers_a_process_that_comes_again_takes_the_place_of_one_that_has_died(tmp_path: Path) -> None:
    locks = [LivenessLock.acquire(tmp_path, "worker", None, 3) for _ in range(3)]
    locks[1].release()
    again = LivenessLock.acquire(tmp_path, "worker", None, 3)
    assert (again.index, again.life) == (1, 1)
    for lock in (locks[0], locks[2], again):
        lock.release()


def test_of_a_machine_that_may_be_gone_a_place_is_free_once_it_shows_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of a machine without power stays held until the file server gives it up."""
    monkeypatch.setattr(f"{LOCKS}.this_machine", lambda: Machine("lost"))
    held = [LivenessLock.acquire(tmp_path, "worker", rank, 2) for rank in range(2)]
    monkeypatch.undo()
    held[1].start_heartbeat()
    with pytest.raises(UsageError, match="worker 1 is there already"):
        LivenessLock.acquire(tmp_path, "worker", 1, 2)
    again = LivenessLock.acquire(tmp_path, "worker", 0, 2, silence_s=0.5)
    assert (again.index, again.life) == (0, 1)
    for lock in (*held, again):
        lock.release()


def test_those_that_wait_for_all_wait_for_one_that_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec(job="3f", num_workers=2, num_servers=1, transport="shm", run_dir=str(tmp_path))
    locks = [LivenessLock.acquire(tmp_path, "worker", rank, 2) for rank in range(2)]
    waited: list[tuple[int, int]] = []

    def end(_: ClusterSpec, worker: int, life: int) -> bool:
        waited.append((worker, life))
        if (worker, life) == (1, 0):  # meanwhile the other one, which has ended, comes again
            locks[0].release()
            locks.append(LivenessLock.acquire(tmp_path, "worker", 0, 2))
        return True

    monkeypatch.setattr(f"{LOCKS}.wait_worker_ended", end)
    wait_all_ended(spec)
    assert waited == [(0, 0), (1, 0), (0, 1)]
    for lock in locks:
        lock.release()


def test_one_that_waits_for_the_end_of_a_process_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LivenessLock.acquire(tmp_path, "worker", 0, 1).release()
    close, seen = os.close, list[bool]()

    def look_before(descriptor: int) -> None:
        monkeypatch.setattr(os, "close", close)
        seen.append(takes_part(tmp_path, "worker", 0))
        close(descriptor)

    monkeypatch.setattr(os, "close", look_before)
    wait_end(tmp_path, "worker", 0)
    assert seen == [False]


class TimerAtOnce:
    def __init__(self, _after_s: float, call: Callable[[], None]) -> None:
        self.start, self.daemon = call, False

    def cancel(self) -> None: ...

    def join(self) -> None: ...


def test_a_process_that_stays_names_those_that_are_there_and_says_nothing_once_all_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{LOCKS}.threading.Timer", TimerAtOnce)
    spec = ClusterSpec(job="3f", num_workers=3, num_servers=1, transport="tcp", run_dir=str(tmp_path))
    locks = [LivenessLock.acquire(tmp_path, "worker", rank, 3) for rank in range(3)]
    for lock in locks[:2]:
        lock.release()
    with announcing_wait(spec, 0):
        locks[2].release()
    with announcing_wait(spec, 0):
        pass
    assert capsys.readouterr().err == (
        "paceline: worker 0 has ended its script; its process stays until worker 2 has left the job, as others need "
        "its servers or its folder\n"
    )


def test_the_end_of_a_process_is_seen_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from paceline.launch.rendezvous.liveness_lock import LivenessLock\n"
        "kept = LivenessLock.acquire(Path(sys.argv[1]), 'worker', 0, 1); print('there', flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.kill()
        wait_end(tmp_path, "worker", 0)  # blocks for ever if it is not seen; the suite has a deadline

    wait_end(tmp_path, "worker", 5)  # of a folder that is cleared


def test_a_missing_process_is_named(tmp_path: Path) -> None:
    spec = ClusterSpec(job="j", num_workers=3, num_servers=2, transport="shm", run_dir=str(tmp_path))
    write_token(tmp_path)
    roster = Roster(tmp_path, 3, 0)
    taken = [LivenessLock.acquire(tmp_path, "worker", 1, 3)]
    (tmp_path / "server-0.address").write_text("shm:///run/s")

    with pytest.raises(DeadlineExceeded, match=r"3 workers and 2 servers .*: worker 0, worker 2, server 1 did not"):
        wait_complete(spec, lambda: declare_complete(spec, roster), timeout_s=0.0)

    taken += [LivenessLock.acquire(tmp_path, "worker", index, 3) for index in (0, 2)]
    (tmp_path / "server-1.address").write_text("shm:///run/t")
    wait_complete(spec, lambda: declare_complete(spec, roster), timeout_s=30.0)
    assert ClusterSpec.read(tmp_path / CLUSTER_NAME).addresses == ("shm:///run/s", "shm:///run/t")
    for liveness_lock in taken:
        liveness_lock.release()


def test_a_waiting_process_hears_at_once_that_the_founder_of_the_job_is_gone(tmp_path: Path) -> None:
    spec = ClusterSpec(job="j", num_workers=1, num_servers=1, transport="shm", run_dir=str(tmp_path))
    spec.write(tmp_path / "spec.json")  # which a folder keeps that the user has named

    with pytest.raises(PeerError, match=r"is cleared: the process that made it has ended"):
        wait_complete(spec, lambda: None)
    with pytest.raises(PeerError, match=r"is cleared: the process that made it has ended"):
        wait_settled(tmp_path / "gone")


def test_an_invitation_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = FolderRendezvous(tmp_path, "job")
    board.invite(HERE)
    monkeypatch.setattr(store, "make_private", Mock())  # the folder is of that user, too
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(UsageError, match="belongs to another user"):
        FolderRendezvous(tmp_path, "job").wait_invitation(0.0)
    board.close()
