"""The guard: a small process that outlives the launcher just long enough to leave nothing behind.

It reads what to watch over from a pipe that only the launcher holds. The pipe ends when the launcher does, even if it
was killed by SIGKILL; then the guard kills every process group it still watches (and so the processes that workers
started) and clears the run directory. It runs as a plain script, without site packages: nothing but the standard
library belongs here.
"""

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
        # No inherited output: the guard must not hold open a pipe that somebody reads until the launcher ends.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(run_dir), keep, *(("orphan",) if orphan else ())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if orphan else subprocess.DEVNULL,  # its end is the guard's
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
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
