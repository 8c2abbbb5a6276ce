"""The guard: a small process that outlives the launcher just long enough to leave nothing behind.

It reads what to watch over from a pipe that only the launcher holds. The pipe ends when the launcher does, even if it
was killed by SIGKILL; then the guard kills every process group it still watches (and so the processes that workers
started) and clears the run directory. It runs as a plain script, without site packages: nothing but the standard
library belongs here.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

# Names of ours alone: in a folder that is kept a script may keep its own, a tokenizer.json for example.
SECRETS: Final = ("token", "token.previous", "keys/*.pem", "keys/*.key", "keys/revoked")
LEFTOVERS: Final = (*SECRETS, "*.address", "*.sock", "*.store", "*.life", "called.off")
PREFIX: Final = "paceline-"  # of the names of temporary folders
LIFE: Final = "guard.life"
NUM_ATTEMPTS: Final = 50
RETRY_INTERVAL_S: Final = 0.02


class Guard:
    """The launcher's end of the pipe."""

    def __init__(self, run_dir: Path, *, temporary: bool, orphan: bool = False) -> None:
        """Start the guard; it clears `run_dir` at the end, and removes it when it is `temporary`.

        As an `orphan` it is nobody's child, for a process whose master kills its children with it. Then `pid` is not
        the guard's.
        """
        keep = "temporary" if temporary else "kept"
        life = _begin_life(run_dir) if temporary else None
        # No inherited output: the guard must not hold open a pipe that somebody reads until the launcher ends.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(run_dir), keep, *(("orphan",) if orphan else ())],
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

    def watch(self, group: int) -> None:
        """Watch over a process group from now on."""
        self._tell("watch", group)

    def forget(self, group: int) -> None:
        """Stop watching over a group: call it before its number can be given to somebody else."""
        self._tell("forget", group)

    def dismiss(self, timeout_s: float) -> None:
        """Let the guard do its last duty, and wait until it is gone."""
        try:
            self._process.communicate(timeout=timeout_s)  # closes our end of the pipe first
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, order: str, group: int) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{order} {group}\n".encode())
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
    """Kill every process of a group, if there is one left."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def keep_watch(orders: Iterable[str]) -> set[int]:
    """Follow the launcher's orders until it is gone; return the groups still watched then."""
    watched: set[int] = set()
    for line in orders:
        order, group = line.split()
        if order == "watch":
            watched.add(int(group))
        else:
            watched.discard(int(group))
    return watched


def main(run_dir: Path, *, temporary: bool) -> None:
    """Watch, and clean up once the launcher is gone: also where whoever stops the launcher tells all its processes."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for group in keep_watch(sys.stdin):
        kill_group(group)
    for _ in range(NUM_ATTEMPTS):  # a process may still write into the directory until the kill has reached it
        clear(run_dir, temporary=temporary)
        if not (temporary and run_dir.exists()):
            return
        time.sleep(RETRY_INTERVAL_S)


if __name__ == "__main__":
    if sys.argv[3:] and os.fork():
        os._exit(0)
    main(Path(sys.argv[1]), temporary=sys.argv[2] == "temporary")
