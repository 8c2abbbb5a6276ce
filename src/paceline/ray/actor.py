"""The actor: runs one process of the job, on the node that Ray has chosen.

It starts the process as its own child, relays what that writes into files and streams, and ends with it. The process
ends with the actor, however that ends: the kernel and the guard see to it, as they do for a launcher on one machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Final, final

import msgspec
from msgspec.structs import replace

from paceline.errors import EXIT_NOT_STARTED
from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME, address_path
from paceline.job.credentials.holders import KEYS_NAME, Holder
from paceline.job.environment import Place, child_environment, with_import_path
from paceline.job.spec import ClusterSpec, write_private
from paceline.job.views import View, Views
from paceline.launch.child import Child, Launch, start_process
from paceline.launch.guard import Guard, clear
from paceline.launch.output import Pump
from paceline.launch.plan import DEFAULT_PROGRAMS
from paceline.launch.rendezvous.liveness_lock import VERSION
from paceline.observe.trace import trace_path
from paceline.ray.engine import load_ray
from paceline.ray.messages import ActorCommand, ActorReady, News, Role

NUM_LINES_MAX: Final = 2000
CHUNK_BYTES: Final = 256 * 1024
TURN_S: Final = 0.1
NEWS_TIMEOUT_S: Final = 1.0
GUARD_TIMEOUT_S: Final = 5.0


@final
class NewsBuffer:
    """Collects news in one thread, and returns them in another.

    Lines that are not fetched block the process, as a full pipe does.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        # Invariant: no exit code before everything else has been put.
        self._lines: deque[tuple[bool, str]] = deque()
        self._address = ""
        self._trace = b""
        self._exit_code: int | None = None
        self._views: list[tuple[int, int, int]] = []

    def relay(self, name: str, colour: int, line: str, *, to_stderr: bool) -> None:
        """Put one line that the process has written; blocks while there are too many."""
        with self._changed:
            # No deadline: the caller is gone only when this process is about to be.
            self._changed.wait_for(lambda: len(self._lines) < NUM_LINES_MAX)
            self._lines.append((to_stderr, line))
            self._changed.notify_all()

    def add(
        self, *, address: str = "", trace: bytes = b"", exit_code: int | None = None, views: Sequence[View] = ()
    ) -> None:
        """Put anything else."""
        with self._changed:
            self._views += [(view.number, view.head, view.replica) for view in views]
            self._address = address or self._address
            self._trace += trace
            self._exit_code = exit_code
            self._changed.notify_all()

    def wait_news(self, timeout_s: float) -> News:
        """Return all that is there; blocks until there is something, or `timeout_s` have passed."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            news = News(list(self._lines), self._address, self._trace, self._exit_code, self._views)
            self._lines.clear()
            self._address, self._trace, self._views = "", b"", []
            self._changed.notify_all()
            return news

    def _has_news(self) -> bool:
        return bool(self._lines or self._address or self._trace or self._views) or self._exit_code is not None


@final
class FileFollower:
    """The files of one process, in a folder that its launcher does not see."""

    def __init__(self, folder: Path, role: Role, rank: int, process: int = 0) -> None:
        self._views = Views(folder, rank) if role == "server" else None
        self._asked: set[View] = set()
        self._address = None if role == "worker" else address_path(folder, role, rank)
        if self._views is not None:
            self._address = self._views.published(process)
        self._trace = trace_path(folder, role, rank)
        self._file: BufferedReader | None = None  # open from its first line on: the folder may go before we do

    def report(self, outbox: NewsBuffer) -> bool:
        """Put what is new into the outbox, a part at most; tell whether there was anything."""
        address, trace, views = self._take_address(), self._take_trace(), self._take_views()
        if address or trace or views:
            outbox.add(address=address, trace=trace, views=views)
        return bool(address or trace or views)

    def finish(self, outbox: NewsBuffer) -> None:
        """Put all that is left into the outbox."""
        while self.report(outbox):
            pass
        if self._file is not None:
            self._file.close()

    def _take_address(self) -> str:
        if self._address is None or not self._address.exists():
            return ""
        address, self._address = self._address.read_text().strip(), None
        return address

    def _take_views(self) -> list[View]:
        asked = [] if self._views is None else self._views.asked(self._asked)
        self._asked.update(asked)
        return asked

    def _take_trace(self) -> bytes:
        if self._file is None:
            if not self._trace.exists():
                return b""
            self._file = self._trace.open("rb")
        chunk = self._file.read(CHUNK_BYTES) or self._begin_next()
        # Whole lines, so that what a killed process has begun is left out; but a line may be longer than a chunk.
        whole = chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == CHUNK_BYTES else b"")
        self._file.seek(len(whole) - len(chunk), os.SEEK_CUR)
        return whole

    def _begin_next(self) -> bytes:
        """Go on with the next file of a bounded trace, if there is one; see `TraceFile`."""
        assert self._file is not None
        try:
            next_file = self._trace.open("rb")
        except FileNotFoundError:
            return b""
        if os.path.sameopenfile(next_file.fileno(), self._file.fileno()):
            next_file.close()
            return b""
        last = self._file.read(CHUNK_BYTES)  # written after we had come to its end
        if last:
            next_file.close()
            return last
        self._file.close()
        self._file = next_file
        return self._file.read(CHUNK_BYTES)


@final
class ProcessActor:
    """One process of the job; an actor's methods, which take and return numbers, words and bytes."""

    def __init__(self) -> None:
        """Make a folder that only this user can enter, and that goes with this actor."""
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self._guard = Guard(self._folder, temporary=True, orphan=True)
        self._job_folder = self._folder
        self._orders: SimpleQueue[Callable[[Child], None]] = SimpleQueue()
        self._outbox = NewsBuffer()
        self._waking, self._wake = os.pipe()
        os.set_blocking(self._waking, False)

    def report_ready(self, role: Role, rank: int, encrypted: bool) -> bytes:
        """Return where this actor runs, and a certificate request where the job is encrypted."""
        request = b""
        if encrypted:
            from paceline.job.credentials.certificates import request as request_certificate

            keys = self._folder / KEYS_NAME
            keys.mkdir(mode=0o700)
            request = request_certificate(keys, Holder(role, rank))
        return msgspec.msgpack.encode(
            ActorReady(load_ray().util.get_node_ip_address(), str(self._folder), VERSION, request)
        )

    def start(self, order: bytes) -> None:
        """Start the process; call it once."""
        told = msgspec.msgpack.decode(order, type=ActorCommand)
        self._job_folder = Path(told.folder)
        # A thread of its own, because the kernel ends a child with the thread that started it.
        threading.Thread(target=self._run_process, args=(told,), name="paceline-process", daemon=True).start()

    def news(self) -> bytes:
        """Return what has happened; blocks for a second at most."""
        return msgspec.msgpack.encode(self._outbox.wait_news(NEWS_TIMEOUT_S))

    def send_line(self, line: str) -> None:
        """Write a line to the standard input of the process."""
        self._enqueue(lambda child: child.send_line(line))

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._enqueue(lambda child: child.signal(number))

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file into the folder of the process, which goes when that has ended."""
        with suppress(FileNotFoundError):
            write_into(self._job_folder, name, content)

    def _enqueue(self, order: Callable[[Child], None]) -> None:
        self._orders.put(order)
        os.write(self._wake, b".")

    def _run_process(self, order: ActorCommand) -> None:
        """Watch over the process from its start to its end."""
        exit_code = EXIT_NOT_STARTED
        try:
            exit_code = self._supervise(order)
        except OSError as error:
            self._outbox.relay(order.name, 0, f"paceline: cannot start {order.name}: {error}", to_stderr=True)
        finally:
            self._guard.dismiss(GUARD_TIMEOUT_S)
            clear(self._folder, temporary=True)
            self._outbox.add(exit_code=exit_code)

    def _supervise(self, order: ActorCommand) -> int:
        if order.cwd is not None:
            os.chdir(order.cwd)
        folder = self._job_folder
        for name, content in order.files.items():
            write_into(folder, name, content)
        follower = FileFollower(folder, order.role, order.rank, order.process) if order.is_followed else None
        child = Child(plan(order, folder), self._outbox, self._guard, start_unmasked)
        pump = Pump(self._waking)
        for pipe in child.pipes:
            pump.add(pipe)
        while (exit_code := child.reap()) is None:
            pump.wait(TURN_S)
            self._follow_orders(child)
            if follower is not None:
                follower.report(self._outbox)
        child.clear()
        for pipe in child.pipes:
            pump.remove(pipe)
        if follower is not None:
            follower.finish(self._outbox)
        return exit_code

    def _follow_orders(self, child: Child) -> None:
        try:
            while True:
                self._orders.get_nowait()(child)
        except Empty:
            return


def plan(order: ActorCommand, folder: Path) -> Launch:
    """Return how the process is started here."""
    script = Path.cwd() / order.script
    environment = child_environment(1, 1, traceback=order.traceback) | order.variables
    if order.role != "worker":
        program = DEFAULT_PROGRAMS.server if order.role == "server" else DEFAULT_PROGRAMS.data_server
        process = (str(order.process),) if order.process else ()
        return Launch(
            role=order.role,
            name=order.name,
            rank=order.rank,
            command=(*program, str(folder / SPEC_NAME), str(order.rank), order.host, *process),
            environment=with_import_path(environment, script.parent),
        )
    return Launch(
        role="worker",
        name=order.name,
        rank=order.rank,
        command=(*DEFAULT_PROGRAMS.worker, str(script), *order.args),
        environment=environment,
        place=Place(folder / CLUSTER_NAME, order.rank, order.local_rank, order.incarnation),
    )


def start_unmasked(launch: Launch) -> subprocess.Popen[bytes]:
    """Start a process that hears all signals: Ray blocks Ctrl-C in its own, and what they start."""
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        return start_process(launch)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def write_into(folder: Path, name: str, content: bytes) -> None:
    """Write a file of the job; what names the launcher's folder names this one instead."""
    if name in (SPEC_NAME, CLUSTER_NAME):
        spec = msgspec.json.decode(content, type=ClusterSpec)
        content = msgspec.json.encode(replace(spec, run_dir=str(folder)))
    write_private(folder / name, content)
