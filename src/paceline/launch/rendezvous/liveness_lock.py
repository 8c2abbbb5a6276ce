"""Liveness locks: in a job without a supervisor each worker holds a file locked for as long as it takes part.

The file says where its process is, and which paceline it runs. The kernel releases a lock when its process ends,
however it ends, and wakes the processes that wait for it. In a folder that several machines see, locks are those of its
file server: one of a machine that is gone stays until the file server gives it up.

A launcher may start a process again in the place of one that has ended: then there is another file, of its next life.
"""

import errno
import fcntl
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar, final

import msgspec

from paceline.core.standstill import names
from paceline.errors import UsageError
from paceline.job.folders import make_once, names_in
from paceline.job.machines import Machine, this_machine
from paceline.job.spec import ClusterSpec
from paceline.launch.folder_watch import looks
from paceline.launch.rendezvous.detect import Role
from paceline.notices import NEWS, tell
from paceline.stopwatch import Stopwatch
from paceline.transport.frames import WIRE_VERSION
from paceline.version import __version__

VERSION: Final = f"{__version__} (wire version {WIRE_VERSION})"
BEAT_S: Final = 2.0
SILENCE_S: Final = 60.0  # much longer than a process that lives may be kept from touching its file
_TELL_AFTER_S: Final = 10.0
_Seen = TypeVar("_Seen")
_MOST_VERSION: Final = 100  # characters, as a refusal quotes it


class ProcessInfo(msgspec.Struct, frozen=True):
    """What a process tells of itself."""

    machine: Machine
    version: Annotated[str, msgspec.Meta(max_length=_MOST_VERSION)] = ""

    @staticmethod
    def own() -> "ProcessInfo":
        """Return that of this process."""
        return ProcessInfo(this_machine(), VERSION)

    def refusal(self, name: str) -> str | None:
        """Return why the process that says this cannot be in one job with this one; None where it can."""
        if self.version == VERSION:
            return None
        return (
            f"{name} on {self.machine} runs paceline {self.version or 'of an unknown version'}, and this process on "
            f"{this_machine()} runs {VERSION}: install the same on all machines"
        )


def describe_machines(infos: Mapping[str, ProcessInfo]) -> str:
    """Return on which machine each of them is.

    >>> a, b = ProcessInfo(Machine("a")), ProcessInfo(Machine("b"))
    >>> describe_machines({"worker 0": a, "server 0": b, "worker 1": a})
    'worker 0 and worker 1 on a; server 0 on b'
    """
    found: defaultdict[Machine, list[str]] = defaultdict(list)
    for name, info in infos.items():
        found[info.machine].append(name)
    return "; ".join(f"{' and '.join(names)} on {machine}" for machine, names in found.items())


@final
class Heartbeat:
    """Touches a file, in a thread of its own."""

    def __init__(self, path: Path, beat_s: float = BEAT_S) -> None:
        self._path = path
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="paceline-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Touch it no longer; may be repeated."""
        self._ended.set()
        self._thread.join(self._beat_s)  # a file server that does not answer does not keep this process from ending

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            with suppress(OSError):  # the job is over and its folder cleared, or the file server is away for a while
                os.utime(self._path)


@final
class SilenceTimer:
    """Measures for how long this process has seen a file untouched."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._ran = Stopwatch(BEAT_S, now)
        self._touched_ns: int | None = None
        self._since_s = 0.0

    def silent_s(self, touched_ns: int) -> float:
        """Return for how many seconds the time of the file has been this one; ask every few seconds.

        Time in which this process was stopped does not count: the other may have been stopped with it.
        """
        ran_s = self._ran.elapsed_s()
        if touched_ns != self._touched_ns:
            self._touched_ns, self._since_s = touched_ns, ran_s
        return ran_s - self._since_s


Member = Role | Literal["node"]  # what takes part: a process of a role, or the node that another one stands for
Presence = Literal["there", "ended", "silent"]
SUFFIX: Final = ".life"
FINISHED: Final = ".finished"
POLL_INTERVAL_S: Final = 0.25


@final
class LivenessLock:
    """The file that this process holds locked.

    Attributes:
        index: the place of this process among those of its role.
        life: how many processes were there before it.
    """

    def __init__(self, run_dir: Path, role: Member, index: int, life: int, descriptor: int) -> None:
        self.index: Final = index
        self.life: Final = life
        self._path = run_dir / _name(role, index, life)
        self._finished = _finished(run_dir, role, index)
        self._descriptor: int | None = descriptor
        self._heartbeat: Heartbeat | None = None

    @staticmethod
    def acquire(
        run_dir: Path, role: Member, index: int | None, count: int, silence_s: float = SILENCE_S, *, first: int = 0
    ) -> "LivenessLock":
        """Take part as process `index` of `count`, or as the lowest free one from `first` on.

        A place whose process has ended without having finished is free, unless it was that of a server, whose values
        went with it. Blocks for up to `silence_s`, a minute, to see whether one on a machine that may be gone lives.

        Raises UsageError when another process has that index.
        """
        places = range(first, first + count) if index is None else (index,)
        # Not the process's number: threads share it, and containers of one host name count processes alike.
        unfinished = run_dir / f".{role}.{secrets.token_hex(8)}"
        with ExitStack() as undo:
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # before others see the file: unlocked would mean dead
                os.write(descriptor, msgspec.json.encode(ProcessInfo.own()))
                os.fsync(descriptor)  # for other machines too, though the file stays open
                for one, life in chain(((one, 0) for one in places), _free_places(run_dir, role, places, silence_s)):
                    if _link(unfinished, run_dir / _name(role, one, life)):
                        undo.pop_all()
                        if life and role == "worker":
                            tell(f"worker {one} takes the place of the process that was worker {one} before it", NEWS)
                        return LivenessLock(run_dir, role, one, life, descriptor)
            except FileNotFoundError as error:  # by its launcher, while this process looked
                raise UsageError(
                    f"the job of {run_dir} has ended, and its folder is cleared: start the job again, with this {role}"
                ) from error
            finally:
                unfinished.unlink(missing_ok=True)
        if index is not None and _finished(run_dir, role, index).exists():
            raise UsageError(
                f"{role} {index} has been there, and has come to the end of its script: it joins once. Start the job "
                "again for another run"
            )
        subject = f"all {count} {role}s are" if index is None else f"{role} {index} is"
        raise UsageError(
            f"{subject} there already: another process has this place, or this one joined before and has left. End "
            "that process and try again, or start the job again, with one process for each place"
        )

    def note_finished(self) -> None:
        """Keep other processes out of this place, as its work is done."""
        try:
            make_once(self._finished, b"")
        except FileNotFoundError:  # the job is over, and its folder is cleared
            pass
        except OSError as error:
            place = self._finished.stem
            tell(f"the folder of the job cannot note that {place} has finished, and may come again: {error}")

    def start_heartbeat(self) -> None:
        """Let other machines see from now on that this process lives."""
        self._heartbeat = Heartbeat(self._path)

    def release(self) -> None:
        """Take part no longer; may be repeated."""
        if self._descriptor is None:
            return
        if self._heartbeat is not None:
            self._heartbeat.stop()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that was forked may have the file open still
        os.close(self._descriptor)
        self._descriptor = None


def missing_ranks(run_dir: Path, role: Role, count: int) -> list[int]:
    """Return the ranks of a role that have never come."""
    present = names_in(run_dir)
    return [index for index in range(count) if _name(role, index) not in present]


def indices_in(run_dir: Path, role: Member) -> set[int]:
    """Return the places of a role in which a process has come, whether it takes part still or not."""
    stem = f"{role}-"
    names = [name for name in names_in(run_dir) if name.startswith(stem) and name.endswith(SUFFIX)]
    return {int(name.removeprefix(stem).removesuffix(SUFFIX)) for name in names}


def newest_life(run_dir: Path, role: Member, index: int) -> int:
    """Return the life of the latest process that has come in a place; -1 where none has."""
    first, names = _name(role, index), names_in(run_dir)
    later = (name.removeprefix(f"{first}-") for name in names if name.startswith(f"{first}-"))
    return max(map(int, later), default=0 if first in names else -1)


def _free_places(run_dir: Path, role: Member, places: Iterable[int], silence_s: float) -> Generator[tuple[int, int]]:
    """Yield the places whose process has ended before it had finished, each with the life of the next one there."""
    for index in places if role != "server" else ():
        life = newest_life(run_dir, role, index)
        # In this order: a process says that it has finished before it ends.
        if _has_ended(run_dir, role, index, life, silence_s) and not _finished(run_dir, role, index).exists():
            yield index, life + 1


def _has_ended(run_dir: Path, role: Member, index: int, life: int, silence_s: float) -> bool:
    """Return whether a process takes part no longer; blocks while one on another machine shows nothing of itself."""
    watch, pause = LifeWatch(run_dir, role, index, silence_s, life=life), threading.Event()
    if watch.look() != "there":
        return True
    at, touched_ns = process_info(run_dir, role, index, life).machine, watch.touched_ns()
    if at == this_machine():
        return False
    tell(f"{role} {index} is on {at}, or its machine is gone: that shows within {silence_s:g} s", NEWS)
    while watch.look() == "there":
        if watch.touched_ns() != touched_ns:
            return False
        pause.wait(POLL_INTERVAL_S)
    return True


def _finished(run_dir: Path, role: Member, index: int) -> Path:
    """Return the file that says that a place is not to be taken any more."""
    return run_dir / f"{role}-{index}{FINISHED}"


def process_info(run_dir: Path, role: Member, index: int, life: int = 0) -> ProcessInfo:
    """Return what a process that has come tells of itself; raises UsageError when that cannot be read."""
    path = run_dir / _name(role, index, life)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProcessInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} does not say where {role} {index} runs ({error}): does it run another version of paceline?"
        ) from error


def wait_end(run_dir: Path, role: Role, index: int, life: int = 0) -> None:
    """Block until a process that has come takes part no longer, whether it left or died."""
    try:
        descriptor = os.open(run_dir / _name(role, index, life), os.O_RDWR)
    except FileNotFoundError:  # the job is over, and its folder is cleared
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # which others that wait, or look, do not take for the process
    finally:
        os.close(descriptor)


@final
class LifeWatch:
    """Looks, now and then, whether one that may be on another machine takes part, and shows that it lives."""

    def __init__(self, run_dir: Path, role: Member, index: int, silence_s: float = SILENCE_S, *, life: int = 0) -> None:
        self._run_dir: Final = run_dir
        self._role: Final[Member] = role
        self._index: Final = index
        self._life = life
        self._silence_s = silence_s
        self._timer = SilenceTimer()

    def look(self) -> Presence:
        """Return whether it is there, has ended, or has been silent for too long; call it every few seconds.

        One that is silent holds its lock still: its machine is gone, and the file server has not noticed; or it is
        stopped. One that has never come has ended.
        """
        try:
            descriptor = os.open(self._run_dir / _name(self._role, self._index, self._life), os.O_RDWR)
        except FileNotFoundError:
            return "ended"
        try:
            if not is_held(descriptor):
                return "ended"
            silent_s = self._timer.silent_s(os.fstat(descriptor).st_mtime_ns)
            return "silent" if silent_s >= self._silence_s else "there"
        finally:
            os.close(descriptor)

    def is_taken(self) -> bool:
        """Return whether the latest process of this place is there; call it every few seconds."""
        if self.look() == "there":
            return True
        newest = newest_life(self._run_dir, self._role, self._index)
        if newest <= self._life:
            return False
        self._life = newest
        return self.look() == "there"

    def touched_ns(self) -> int:
        """Return when the process that was looked for has shown itself last, as its file says; 0 without a file."""
        with suppress(FileNotFoundError):
            return (self._run_dir / _name(self._role, self._index, self._life)).stat().st_mtime_ns
        return 0


def wait_end_elsewhere(run_dir: Path, role: Role, index: int, life: int = 0, silence_s: float = SILENCE_S) -> bool:
    """Block as `wait_end` does, for one that may be on another machine; returns False when it is silent."""
    watch, pause = LifeWatch(run_dir, role, index, silence_s, life=life), threading.Event()
    while (presence := _see(watch.look, f"it cannot be seen whether {role} {index} takes part")) == "there":
        pause.wait(POLL_INTERVAL_S)  # to block could take longer: a client of NFS asks for a lock ever less often
    return presence == "ended"


def _see(look: Callable[[], _Seen], problem: str) -> _Seen:
    """Return what a look sees; blocks while it raises OSError, as where a file server is away, which is told."""
    try:
        return look()
    except OSError:
        return next(looks(look, threading.Event(), problem, POLL_INTERVAL_S))


def takes_part(run_dir: Path, role: Member, index: int) -> bool:
    """Return whether the latest process that has come in a place still takes part; does not block."""
    try:
        descriptor = os.open(run_dir / _name(role, index, newest_life(run_dir, role, index)), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return is_held(descriptor)
    finally:
        os.close(descriptor)


def is_held(descriptor: int) -> bool:
    """Return whether another process holds this file locked; does not block."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _name(role: Member, index: int, life: int = 0) -> str:
    return f"{role}-{index}{SUFFIX}-{life}" if life > 0 else f"{role}-{index}{SUFFIX}"


def _link(existing: Path, path: Path) -> bool:
    try:
        os.link(existing, path)
    except FileExistsError:
        return False
    return True


def wait_worker_ended(spec: ClusterSpec, worker: int, life: int = 0) -> bool:
    """Block until a worker takes part no longer; False when nothing was heard of it for so long that it must be so."""
    if spec.encrypted:
        return wait_end_elsewhere(Path(spec.run_dir), "worker", worker, life)
    wait_end(Path(spec.run_dir), "worker", worker, life)
    return True


def wait_all_ended(spec: ClusterSpec) -> None:
    """Block until no worker takes part any longer, those included that come again meanwhile."""
    run_dir, num_ended = Path(spec.run_dir), [0] * spec.num_workers

    def left() -> list[int]:
        return [rank for rank, num in enumerate(num_ended) if newest_life(run_dir, "worker", rank) >= num]

    while ranks := _see(left, "it cannot be seen which workers take part"):
        for rank in ranks:
            wait_worker_ended(spec, rank, num_ended[rank])
            num_ended[rank] += 1


@contextmanager
def announcing_wait(spec: ClusterSpec, worker: int, after_s: float = _TELL_AFTER_S) -> Generator[None]:
    """Say once, if the others go on for a while, why this worker's process stays though its script has ended."""

    def tell_why() -> None:
        others = [rank for rank in range(spec.num_workers) if takes_part(Path(spec.run_dir), "worker", rank)]
        if not others:  # the last has just left
            return
        have = "has" if len(others) == 1 else "have"
        tell(
            f"worker {worker} has ended its script; its process stays until {names(others)} {have} left the job, as "
            "others need its servers or its folder"
        )

    timer = threading.Timer(after_s, tell_why)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
