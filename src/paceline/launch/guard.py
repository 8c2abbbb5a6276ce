"""The guard: a small process that outlives the launcher just long enough to leave nothing behind.

It reads what to watch over from a pipe that only the launcher holds. The pipe ends when the launcher does, even if it
was killed by SIGKILL; then the guard kills every process group it still watches (and so the processes that workers
started), what carries the mark of its job, and clears the run directory. It runs as a plain script, without site
packages: nothing but the standard library belongs here.

A process that has left its group is known by a mark that all processes of a job inherit in their environment. What
cleans up after others is left to end by itself: Python's resource tracker, which removes the semaphores of processes
that were killed, and the guard of a job that was started within this one.
"""

import fcntl
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

# Names of ours alone: in a folder that is kept a script may keep its own, a tokenizer.json for example.
# By a pattern also a link to a file that is not there is found.
SECRETS: Final = ("token", "token.previous*", "keys/*.pem", "keys/*.key", "keys/revoked*")
# Where servers are, and which process serves.
SERVERS: Final = ("*.address", "server-*.ended", "*.view-*", "*.claim-*", "*.home-*", "*.leaving", "*.handover-*")
LEFTOVERS: Final = (*SECRETS, *SERVERS, "*.sock", "*.store", "*.life", "*.life-*", "*.finished", "called.off")
PREFIX: Final = "paceline-"  # of the names of temporary folders
LIFE: Final = "guard.life"
NUM_ATTEMPTS: Final = 50
RETRY_INTERVAL_S: Final = 0.02
MARK: Final = "PACELINE_JOB"  # the marks of all jobs that a process belongs to, from the outermost on, joined by colons
CLEANERS: Final = (b"from multiprocessing.resource_tracker import main", b"paceline/launch/guard.py\0")
CLEANING_TIMEOUT_S: Final = 3.0
PROC: Final = Path("/proc")
RECORDS: Final = "trace"  # folder of what the processes of a run write down
NUM_KEPT: Final = 20  # runs whose records are kept; those of a process are 16 MiB at most
KEPT_NAME: Final = re.compile(r"\.?\d{4}-\d\d-\d\d-\d{6}-\w+")


class Guard:
    """The launcher's end of the pipe."""

    def __init__(self, run_dir: Path, *, temporary: bool, orphan: bool = False, keep_in: Path | None = None) -> None:
        """Start the guard; it clears `run_dir` at the end, and removes it when it is `temporary`.

        With `keep_in` the records of a run whose folder is removed are moved there first; see `keep_records`.

        As an `orphan` it has no parent here, for a process whose master kills its children with it. Then `pid` is not
        the guard's.
        """
        self.mark = secrets.token_hex(8)
        keep, orphaned = "temporary" if temporary else "kept", ["orphan"] if orphan else []
        life = _begin_life(run_dir) if temporary else None
        # No inherited output: the guard must not hold a pipe open whose reader waits for the end of the launcher.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(run_dir), keep, self.mark, str(keep_in or ""), *orphaned],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if orphan else subprocess.DEVNULL,  # its end is the guard's
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            pass_fds=() if life is None else (life,),
        )
        if life is not None:
            os.close(life)
        self.pid = self._process.pid
        if orphan:
            self._process.wait()  # it has started the guard

    def marked(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process that is to carry the mark of this guard, and those that it has."""
        before = filter(None, (variables.get(MARK),))
        return {**variables, MARK: ":".join((*before, self.mark))}

    def watch(self, group: int) -> None:
        """Watch over a process group from now on."""
        self._tell("watch", group)

    def forget(self, group: int) -> None:
        """Stop watching over a group: call it before its number can be reused."""
        self._tell("forget", group)

    def watch_process(self, pid: int) -> None:
        """Watch over a process, and what it starts, that has left the group it was started in."""
        self._tell("watch-process", pid)

    def forget_process(self, pid: int) -> None:
        """Stop watching over a process: call it before its number can be reused."""
        self._tell("forget-process", pid)

    def dismiss(self, timeout_s: float) -> None:
        """Let the guard do its last duty, and wait until it is gone."""
        try:
            self._process.communicate(timeout=timeout_s)  # closes our end of the pipe first
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, order: str, number: int) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{order} {number}\n".encode())
        except BrokenPipeError:
            return  # a guard that was killed leaves a run without its safety net, not a broken run


def _begin_life(run_dir: Path) -> int:
    """Return a locked file, which says that a temporary folder is in use for as long as the guard has it open."""
    unfinished = run_dir / f".{LIFE}"
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # before the file has its name, by which others may take us for dead
    os.write(descriptor, os.uname().nodename.encode())
    unfinished.rename(run_dir / LIFE)
    return descriptor


def remove_abandoned(place: Path) -> None:
    """Remove temporary folders of this user's runs on this machine whose launcher and guard were both killed.

    Others are left alone: those of other users and machines, and those in which no guard has said that it lives.
    """
    for life in place.glob(f"{PREFIX}*/{LIFE}"):
        try:
            descriptor = os.open(life, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or gone meanwhile
            continue
        try:
            is_own = os.fstat(descriptor).st_uid == os.geteuid() == life.parent.lstat().st_uid
            is_of_here = os.read(descriptor, 256) == os.uname().nodename.encode()
            if is_own and is_of_here and not life.parent.is_symlink():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(life.parent, temporary=True)
        except OSError:  # in use, or gone meanwhile
            continue
        finally:
            os.close(descriptor)


def keep_records(run_dir: Path, kept: Path, now_s: float | None = None) -> Path | None:
    """Move the records of a run to a folder of their own in `kept`, and remove the oldest there; return that folder.

    There are `NUM_KEPT` at most. Returns None without records, and where they cannot be kept: no run fails of that.
    """
    records = run_dir / RECORDS
    name = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(now_s)) + f"-{run_dir.name.removeprefix(PREFIX)}"
    unfinished, done = kept / f".{name}", kept / name
    try:
        if not any(path.stat().st_size for path in records.glob("worker-*.jsonl")):
            return None
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.mkdir(mode=0o700)
        shutil.move(records, unfinished / RECORDS)
        unfinished.rename(done)
        for old in sorted(path for path in kept.iterdir() if KEPT_NAME.match(path.name))[:-NUM_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        return None
    return done


def clear(run_dir: Path, *, temporary: bool) -> None:
    """Remove what must not outlive the run: everything, or only its secrets, its sockets and its addresses."""
    if temporary:
        shutil.rmtree(run_dir, ignore_errors=True)
        return
    for pattern in LEFTOVERS:
        for path in run_dir.glob(pattern):
            if not path.is_dir():
                path.unlink(missing_ok=True)


def kill_group(group: int) -> None:
    """Kill every process of a group, if there is one left, but those that clean up after the others."""
    if any(cleans_up(pid) for pid in _members(group)):
        _kill_all(lambda: _members(group))
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kill every process that has inherited a mark, but those that clean up after the others. Linux only."""
    _kill_all(lambda: _marked(mark))


def _kill_all(find: Callable[[], set[int]]) -> None:
    """Kill what is found until all that is found was told: a process that was told starts no others."""
    told: set[int] = set()
    for _ in range(NUM_ATTEMPTS):
        found = {pid for pid in find() - told if not cleans_up(pid)}
        if not found:
            return
        kill_each(found)
        told |= found


def kill_each(pids: Iterable[int]) -> None:
    """Kill these processes, as far as they are there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> set[int]:
    """Return the processes with this mark; one that has ended shows no environment."""
    name, wanted = f"{MARK}=".encode(), mark.encode()
    return {
        pid
        for pid in _processes()
        for line in _content(pid, "environ").split(b"\0")
        if line.startswith(name) and wanted in line[len(name) :].split(b":")
    }


def _members(group: int) -> set[int]:
    """Return the processes of a group that have not ended."""
    return {pid for pid, (_, own) in _living().items() if own == group}


def _descendants(pids: set[int]) -> set[int]:
    """Return those of these processes that have not ended, with all that they have started and still stands by them."""
    living = _living()
    found = new = pids & living.keys()
    while new:
        new = {pid for pid, (parent, _) in living.items() if parent in new} - found
        found |= new
    return found


def _living() -> dict[int, tuple[int, int]]:
    """Return the parent and the group of every process that has not ended."""
    # The name of the program is in brackets and may hold anything: the state, the parent and the group come behind it.
    found = {pid: _content(pid, "stat").rpartition(b")")[2].split()[:3] for pid in _processes()}
    return {pid: (int(fields[1]), int(fields[2])) for pid, fields in found.items() if fields and fields[0] not in b"ZX"}


def cleans_up(pid: int) -> bool:
    """Return whether a process cleans up after others, and ends by itself when they have ended."""
    command = _content(pid, "cmdline")
    return any(words in command for words in CLEANERS)


def _processes() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()] if PROC.exists() else []


def _content(pid: int, name: str) -> bytes:
    """Return what the kernel tells of a process; nothing of one that is gone, or not ours."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def follow_orders(orders: Iterable[str]) -> tuple[set[int], set[int]]:
    """Follow the launcher's orders until it is gone; return the groups, and the processes, still watched then."""
    groups: set[int] = set()
    processes: set[int] = set()
    for line in orders:
        order, number = line.split()
        watched = processes if order.endswith("-process") else groups
        if order.startswith("watch"):
            watched.add(int(number))
        else:
            watched.discard(int(number))
    return groups, processes


def main(run_dir: Path, mark: str, *, temporary: bool, keep_in: Path | None = None) -> None:
    """Watch, and clean up once the launcher is gone, even if the same signal was sent to all of its processes."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    groups, processes = follow_orders(sys.stdin)
    _kill_all(lambda: _descendants(processes))
    for group in groups:
        kill_group(group)
    kill_marked(mark)
    kill_each(wait_cleaned(lambda: _marked(mark).union(*map(_members, groups))))
    if temporary and keep_in is not None:
        keep_records(run_dir, keep_in)
    for _ in range(NUM_ATTEMPTS):  # a process may still write into the directory until the kill has reached it
        clear(run_dir, temporary=temporary)
        if not (temporary and run_dir.exists()):
            return
        time.sleep(RETRY_INTERVAL_S)


def wait_cleaned(find: Callable[[], set[int]]) -> set[int]:
    """Block while anything is found, but not for ever; return what is left."""
    deadline_s = time.monotonic() + CLEANING_TIMEOUT_S
    while (left := find()) and time.monotonic() < deadline_s:
        time.sleep(RETRY_INTERVAL_S)
    return left


if __name__ == "__main__":
    if sys.argv[5:] and os.fork():
        os._exit(0)
    folder = Path(sys.argv[4]) if sys.argv[4] else None
    main(Path(sys.argv[1]), sys.argv[3], temporary=sys.argv[2] == "temporary", keep_in=folder)
