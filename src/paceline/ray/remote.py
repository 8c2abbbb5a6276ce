"""The launcher's end of a process that runs in an actor."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import msgspec

from paceline.launch.child import NUM_LAST_LINES, Launch
from paceline.launch.preemption import ABORT_MARKER_NAME
from paceline.ray.messages import EXIT_NOT_STARTED, ActorReady, News

if TYPE_CHECKING:
    from paceline.launch.output import Console
    from paceline.ray.registry import RayRegistry

LOST: Final = -signal.SIGKILL  # how a process ends whose actor is gone


class Method(Protocol):
    """A method of an actor, to be called from elsewhere."""

    def remote(self, *arguments: object) -> object:
        """Call it; return what stands for its answer."""
        ...

    def options(self, *, concurrency_group: str) -> Method:
        """Return the same method, to be carried out by the threads of this name."""
        ...


class ActorHandle(Protocol):
    """What Ray makes of a `ProcessActor`: its methods, callable from elsewhere."""

    report_ready: Method
    start: Method
    news: Method
    send_line: Method
    signal: Method
    write_file: Method


@final
class RemoteProcess:
    """A process in an actor, seen from the launcher. Nothing here blocks.

    One question to the actor is always open, `question`; its answer goes to `handle_answer`.
    """

    def __init__(
        self,
        launch: Launch,
        actor: ActorHandle,
        registry: RayRegistry,
        console: Console,
        kill: Callable[[ActorHandle], None],
        deadline_s: float,
    ) -> None:
        """Ask the actor where it is; it has until `deadline_s` (monotonic) to say it."""
        self.launch = launch
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._actor = actor
        self._registry = registry
        self._console = console
        self._kill = kill
        self._deadline_s = deadline_s
        self._exit_code: int | None = None
        self._arrived = False
        self.question: Any = actor.report_ready.remote(launch.role, launch.rank, registry.encrypted)

    @property
    def name(self) -> str:
        """What it is called in messages: "worker 0"."""
        return self.launch.name

    @property
    def pid(self) -> int | None:
        """Its number is that of another machine, and not told."""
        return None

    def reap(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._exit_code

    def signal(self, number: int) -> None:
        """Send a signal to the process, after what it has to know of it."""
        for name, content in self._registry.read_file(ABORT_MARKER_NAME).items():
            self.write_file(name, content)
        self._actor.signal.remote(number)

    def send_line(self, line: str) -> None:
        """Write a line to its standard input."""
        self._actor.send_line.remote(line)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file into its folder."""
        self._actor.write_file.remote(name, content)

    def kill(self) -> None:
        """Kill the actor, and with it the process and all that it started."""
        self._kill(self._actor)

    def handle_answer(self, answer: bytes) -> bool:
        """Handle the answer to the open question, and ask the next one; return whether it has an address."""
        listens = False
        if self._arrived:
            listens = self._handle_news(msgspec.msgpack.decode(answer, type=News))
        else:
            order = self._registry.command_for(self.launch, msgspec.msgpack.decode(answer, type=ActorReady))
            self._actor.start.remote(msgspec.msgpack.encode(order))
            self._arrived = True
        self.question = self._actor.news.options(concurrency_group="news").remote()
        return listens

    def is_late(self, now_s: float) -> bool:
        """Return whether the actor has missed its deadline to be ready (`now_s`: monotonic)."""
        return not self._arrived and self._exit_code is None and now_s >= self._deadline_s

    def mark_lost(self, cause: str) -> None:
        """Record that the actor is gone, and kill it in case it only cannot be reached.

        A process that never starts counts as a mistake that would recur, not as a crash.
        """
        self._relay_line(cause, to_stderr=True)
        self._exit_code = LOST if self._arrived or self.launch.incarnation else EXIT_NOT_STARTED
        self.kill()

    def _handle_news(self, news: News) -> bool:
        for to_stderr, line in news.lines:
            self._relay_line(line, to_stderr=to_stderr)
        self._registry.store_news(self.launch, news)
        self._exit_code = news.exit_code
        return bool(news.address)

    def _relay_line(self, line: str, *, to_stderr: bool) -> None:
        if to_stderr:
            self.last_lines.append(line)
        self._console.relay(self.name, self.launch.rank, line, to_stderr=to_stderr)
