"""Replays the record of a server: the same events, updates and values, without workers and without waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from safetensors.torch import load_file

from paceline.core.messages import Pull, WholeStep
from paceline.errors import PacelineError, UsageError
from paceline.job.addresses import SPEC_NAME
from paceline.job.spec import ClusterSpec
from paceline.launch.server import server_settings, threads_here
from paceline.observe.trace import Trace
from paceline.server.journal import Asked
from paceline.server.node import ServerNode
from paceline.server.record_file import digests, has_ended_early, record_path
from paceline.server.record_follower import RecordFollower
from paceline.transport.memory import MemoryTransport
from paceline.wire.messages import decode

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.server.record_follower import Moment

_CUT_SHORT = "it had reached its bound (--record-gib), or the disk was full, and the run went on"


class ReplayDiffers(PacelineError):
    """A replay has come to other values than the server had at its end."""


class Condition(Protocol):
    """What a replay stops at."""

    def met(self, moment: Moment) -> str:
        """Return what is the case now, in words; empty where the condition is not met."""
        ...


@dataclass(slots=True)
class ValueNotFinite:
    """A value of a table is NaN or infinite. Looks at all values of a table after each of its updates."""

    _versions: dict[str, int] = field(default_factory=dict[str, int])

    def met(self, moment: Moment) -> str:
        """See `Condition.met`."""
        for name, table in moment.tables.items():
            if not table.has_values or self._versions.get(name) == table.version:
                continue
            self._versions[name] = table.version
            for part, tensor in tensors_of(moment, name).items():
                num = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
                if num:
                    return f"{num} of {tensor.numel()} numbers of '{part}' of table '{name}' are NaN or infinite"
        return ""


class StaleRead(msgspec.Struct, frozen=True):
    """A worker was given values that were more than so many clocks behind it."""

    most: int

    def met(self, moment: Moment) -> str:
        """See `Condition.met`."""
        event = moment.written
        pulls = (event,) if isinstance(event, Pull) else event.pulls if isinstance(event, WholeStep) else ()
        waiting = {(pull.sender, pull.request) for pull in moment.parts.core.waiting_pulls()}
        for pull in pulls:
            if pull.table not in moment.tables or (pull.sender, pull.request) in waiting:
                continue
            behind = pull.clock - moment.parts.core.clock_of(pull.table)
            if behind > self.most:
                return f"worker {pull.sender.worker} reads '{pull.table}' at clock {pull.clock}, {behind} clocks behind"
        return ""


class ClockReached(msgspec.Struct, frozen=True):
    """Every clock of a table below this one is complete."""

    clock: int

    def met(self, moment: Moment) -> str:
        """See `Condition.met`."""
        reached = [name for name in moment.tables if moment.parts.core.clock_of(name) >= self.clock]
        return f"table '{reached[0]}' has reached clock {self.clock}" if reached else ""


def parse_condition(text: str) -> Condition:
    """Read a condition; raises UsageError.

    >>> parse_condition("stale:3"), parse_condition("clock:100")
    (StaleRead(most=3), ClockReached(clock=100))
    """
    kind, _, number = text.partition(":")
    if text == "nan":
        return ValueNotFinite()
    if kind in ("stale", "clock") and number.isascii() and number.isdecimal():
        return StaleRead(int(number)) if kind == "stale" else ClockReached(int(number))
    raise UsageError(f"--until is {text[:40]!r}, expected nan, stale:CLOCKS or clock:NUMBER")


def tensors_of(moment: Moment, table: str) -> Mapping[str, Tensor]:
    """Return the values of a table at this moment, and the state of its rule, by name; copies all of it."""
    found = moment.tables.require(table)
    if not found.has_values:
        return {}
    with TemporaryDirectory(prefix="paceline-replay-") as folder:
        found.save(Path(folder) / "table", moment.parts.core.clock_of(table))
        return load_file(Path(folder) / "table")


def describe(moment: Moment) -> str:
    """Return a line on the event."""
    written = moment.written
    told = f"worker {written.worker} asks {decode(written.request)}" if isinstance(written, Asked) else f"{written}"
    return f"{moment.number:>7}  {moment.now:.6f} s  {told}"


@dataclass(slots=True)
class Replayed:
    """What has become of a replay.

    Args:
        server: its rank.
        num_events: that were done again.
        digests: of its tables, as they are at the end.
        clocks: that they have reached.
        is_proved: whether the server has written the same digests at its end.
        stopped: why the replay stopped before the end of the record.
        end: why the record ends before the run.
    """

    server: int
    num_events: int = 0
    digests: dict[str, str] = field(default_factory=dict[str, str])
    clocks: dict[str, int] = field(default_factory=dict[str, int])
    is_proved: bool = False
    stopped: str = ""
    end: str = ""


def recorded_servers(run_dir: Path) -> list[int]:
    """Return the ranks of the servers of a run that have a record; raises UsageError where there is none."""
    spec = ClusterSpec.read(run_dir / SPEC_NAME)
    found = [rank for rank in range(spec.num_servers) if record_path(run_dir, rank).exists()]
    if not found:
        raise UsageError(f"{run_dir} has no record of a server: start a run with --record and --run-dir")
    return found


def replay_server(
    run_dir: Path,
    rank: int,
    watch: Callable[[Moment], str] = lambda _: "",
    look: Callable[[Moment], None] = lambda _: None,
) -> Replayed:
    """Replay all that a server did; blocks.

    Args:
        run_dir: folder of the run.
        rank: of the server.
        watch: called after each event; the replay ends there if it returns why.
        look: called at the end, while the tables are there.

    Raises:
        ReplayDiffers: the values are not those that the server had.
        PacelineError: the record cannot be read, or rules of the run's own cannot be imported.
    """
    spec, replayed = ClusterSpec.read(run_dir / SPEC_NAME), Replayed(rank)

    def is_watched(moment: Moment) -> bool:
        replayed.stopped = watch(moment)
        return bool(replayed.stopped)

    def finish(moment: Moment | None) -> None:
        if moment is None:
            return
        core, tables = moment.parts.core, moment.tables
        replayed.num_events = moment.number
        replayed.clocks = {name: core.clock_of(name) for name in tables}
        replayed.digests = digests(tables, core.clock_of)
        look(moment)

    record = RecordFollower(record_path(run_dir, rank), is_watched, finish)
    transport = MemoryTransport()
    ServerNode(
        server_settings(spec, rank),
        transport.listen(f"memory://replay-{rank}"),
        transport,
        tuple,
        Trace(None),
        num_threads=lambda consistency: spec.server_threads or threads_here(consistency, spec),
        follows=record,
    ).run()
    if record.digests is None and not replayed.stopped:
        replayed.end = record.end or (_CUT_SHORT if has_ended_early(record.path) else "")
    if record.digests is not None and not replayed.stopped:
        replayed.is_proved = record.digests == replayed.digests
        if not replayed.is_proved:
            raise ReplayDiffers(
                f"server {rank} had other values at its end than its replay: digests {record.digests}, replayed "
                f"{replayed.digests}. A function or rule of the run's own may depend on more than it is given"
            )
    return replayed
