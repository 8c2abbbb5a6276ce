"""Plays a transcript: real cores, joined by queues that deliver when the script says so.

A line that starts with `>` is a command, an indented line is an effect, anything else is prose. Commands:

    cluster CONSISTENCY WORKERS SERVERS   make the cores; all workers have joined
    w0 push | clock | read | cached | exact | leave | join
                                          the user of worker 0 wishes; `cached` reads without asking when it may,
                                          `exact` needs all clocks below the worker's own, whatever the bound
    w0 -> s1 [N | copy | lose | late]     deliver the next N messages (all of them without N), or the next one
                                          while a copy of it stays on its way, or lose it, or let it fall behind
    settle                                deliver everything until nothing is on its way; shows only what matters
    w1 dies | w1 returns                  every server is told of the death; the next incarnation joins
    wait S                                let S seconds pass, and every deadline with them
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from paceline.core.consistency import Consistency
from paceline.core.effects import (
    Advanced,
    Apply,
    Discard,
    Fail,
    Hold,
    Install,
    JoinDone,
    LeaveDone,
    MembershipChanged,
    ReadDone,
    Release,
    Reply,
    Send,
    Serve,
    Tell,
)
from paceline.core.events import (
    Arrived,
    Declared,
    Died,
    Opened,
    Timeout,
    WantClock,
    WantJoin,
    WantLeave,
    WantPush,
    WantRead,
)
from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Delivered,
    Fetched,
    Follow,
    Held,
    Join,
    Joined,
    Leave,
    Left,
    Pull,
    Push,
    PushId,
    PushRefused,
    Sender,
    Taken,
    Ticked,
    WorkerRefused,
)
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore

_WISHES = {
    "push": WantPush("w"),
    "clock": WantClock(),
    "read": WantRead("w"),
    "cached": WantRead("w", refresh=False),
    "exact": WantRead("w", exact=True),
    "leave": WantLeave(),
    "join": WantJoin(),
}
_MATTERS = (Apply, Advanced, MembershipChanged, ReadDone, Fail, JoinDone, LeaveDone, Discard)


@dataclass(slots=True)
class Stage:
    """The cores of one transcript and what is on its way between them."""

    now: float = 0.0
    cores: dict[str, ServerCore | WorkerCore] = field(default_factory=dict[str, ServerCore | WorkerCore])
    lives: dict[str, int] = field(default_factory=dict[str, int])
    queues: dict[tuple[str, str], deque[Any]] = field(default_factory=dict[tuple[str, str], deque[Any]])
    consistency: Consistency = field(default_factory=lambda: Consistency(None))
    lines: list[str] = field(default_factory=list[str])
    terse: bool = False

    def obey(self, command: str) -> list[str]:
        """Carry out one command and return the lines of its effects."""
        self.lines = []
        words = command.split()
        match words:
            case ["cluster", consistency, workers, servers]:
                self._cluster(Consistency.parse(consistency), int(workers), int(servers))
            case ["settle"]:
                self._settle()
            case ["wait", seconds]:
                self._wait(float(seconds))
            case [worker, "dies"]:
                for server in self._servers():
                    self._handle(server, Died(int(worker[1:]), self.lives[worker], "killed"))
            case [worker, "returns"]:
                self._start(worker, self.lives[worker] + 1)
                self._handle(worker, WantJoin())
            case [source, "->", target, *how]:
                self._deliver(source, target, how[0] if how else "all")
            case [worker, wish]:
                self._handle(worker, _WISHES[wish])
            case _:
                raise ValueError(f"no such command: {command}")
        return self.lines

    def _servers(self) -> list[str]:
        return [name for name in self.cores if name.startswith("s")]

    def _cluster(self, consistency: Consistency, num_workers: int, num_servers: int) -> None:
        self.consistency = consistency
        self.terse = True
        for rank in range(num_servers):
            settings = ServerSettings(rank, num_servers, workers=tuple(range(num_workers)))
            self.cores[f"s{rank}"] = ServerCore(settings, started=0.0)
        for rank in range(num_servers):
            self._handle(f"s{rank}", Declared("w", consistency))
        for rank in range(num_workers):
            self._start(f"w{rank}", 0)
            self._handle(f"w{rank}", WantJoin())
        self._settle()
        self.lines = []

    def _start(self, worker: str, incarnation: int) -> None:
        self.lives[worker] = incarnation
        servers = tuple(range(len(self._servers())))
        sender = Sender(1, int(worker[1:]), incarnation)
        self.cores[worker] = WorkerCore(WorkerSettings(sender, len(servers)))
        self._handle(worker, Opened("w", self.consistency, servers))

    def _settle(self) -> None:
        self.terse = True
        while any(self.queues.values()):
            for source, target in sorted(self.queues):
                self._deliver(source, target, "all")
        self.terse = False

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        for name, core in self.cores.items():
            due = core.next_deadline()
            if due is not None and due <= self.now:
                self._handle(name, Timeout())

    def _deliver(self, source: str, target: str, how: str) -> None:
        queue = self.queues.setdefault((source, target), deque())
        if how == "lose":
            queue.popleft()
            return
        if how == "late":
            queue.rotate(-1)
            return
        if how == "copy":
            queue.insert(1, queue[0])
        for _ in range({"all": len(queue), "copy": 1}.get(how) or int(how if how.isdigit() else 0)):
            incarnation, message = queue.popleft()
            if target.startswith("s"):
                self._handle(target, message)
            elif incarnation == self.lives[target]:
                self._handle(target, Arrived(int(source[1:]), message))

    def _handle(self, name: str, event: Any) -> None:
        for effect in self.cores[name].handle(event, self.now):
            self._queue(name, effect)
            if not self.terse or isinstance(effect, _MATTERS):
                self.lines.append(f"    {name}: {_effect(effect)}")

    def _queue(self, source: str, effect: Any) -> None:
        match effect:
            case Send() | Tell():
                key, entry = (source, f"s{effect.server}"), (0, effect.message)
            case Reply() | Serve():
                key, entry = (source, f"w{effect.worker}"), (effect.incarnation, effect.message)
            case _:
                return
        self.queues.setdefault(key, deque()).append(entry)


def play(text: str) -> str:
    """Return the transcript with the effects that its commands have now."""
    stage, out = Stage(), list[str]()
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        out.append(line)
        if line.startswith("> "):
            out += stage.obey(re.sub(r"\s+#.*", "", line[2:]))
    return "\n".join(out) + "\n"


def _effect(effect: Any) -> str:
    match effect:
        case Send():
            return f"-> s{effect.server} {_message(effect.message)}{' without its tensor' if effect.bare else ''}"
        case Tell():
            return f"-> s{effect.server} {_message(effect.message)}"
        case Reply():
            return f"-> w{effect.worker} {_message(effect.message)}"
        case Serve():
            return f"-> w{effect.worker} {_message(effect.message)}, with the values"
        case Hold() | Discard():
            return f"{type(effect).__name__.lower()} {_id(effect.id)}"
        case Apply():
            return f"apply {' + '.join(map(_id, effect.ids))}"
        case Advanced():
            return f"all clocks below {effect.clock} are complete"
        case MembershipChanged():
            return f"w{effect.worker}.{effect.incarnation} {effect.change}{effect.reason and ': ' + effect.reason}"
        case Install():
            return f"take in the values of s{effect.server} ({_own(effect)})"
        case Release():
            return f"s{effect.server} has settled {_id(effect.id)}{effect.refused and ', refused: ' + effect.refused}"
        case JoinDone():
            return f"joined at clock {effect.clock}"
        case ReadDone():
            return f"read done: values of clock {effect.clock}, from a {effect.source}"
        case LeaveDone():
            return "left"
        case Fail():
            return f"fails: {effect.reason}"
        case _:
            raise TypeError(effect)


def _message(message: Any) -> str:
    match message:
        case Push():
            return f"push {_id(message.id)} of clock {message.clock}"
        case Clock():
            return f"tick {message.clock}{''.join(f', without {t} at {c}' for t, c, _ in message.withdrawn)}"
        case Pull():
            return f"pull {message.request} at clock {message.clock}, needs {message.needs}"
        case Join() | Leave() | Left():
            return type(message).__name__.lower()
        case Joined() | Ticked() | Taken():
            return f"{type(message).__name__.lower()} {message.clock}"
        case Held() | Applied():
            return f"{type(message).__name__.lower()} {_id(message.id)}"
        case PushRefused():
            return f"refused {_id(message.id)}: {message.reason}"
        case Fetched() | Delivered():
            name = f"reply {message.request}" if isinstance(message, Fetched) else "delivery"
            return f"{name}: clock {message.clock}, version {message.version} ({_own(message)})"
        case WorkerRefused():
            return f"you are refused: {message.reason}"
        case Follow():
            return f"who completes clock {message.clock}?"
        case Closed():
            contributors = " + ".join(f"w{worker}.{incarnation}" for worker, incarnation in message.contributors)
            return f"clock {message.clock} is complete with {contributors or 'no worker'}"
        case _:
            raise TypeError(message)


def _id(push_id: PushId) -> str:
    return f"w{push_id.worker}.{push_id.incarnation}#{push_id.seq}"


def _own(values: Install | Fetched | Delivered) -> str:
    also = "".join(f", {seq}" for seq in values.includes)
    return f"own: below {values.settled}{also}"
