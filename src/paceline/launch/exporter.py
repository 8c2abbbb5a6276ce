"""The process that gives what a run reports to trackers and scrapers: `python -m paceline.launch.exporter ...`.

It is told what to do on its standard input, whose end means that the run is over: then it passes on what is left, and
ends, within little more than a minute. It only reads what the processes of the run write down, so that whatever
happens to it, the run goes on.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from paceline.errors import PacelineError
from paceline.job.addresses import SPEC_NAME
from paceline.job.spec import ClusterSpec
from paceline.launch.guard import RECORDS
from paceline.notices import tell
from paceline.observe.export.feed import CLOSE_TIMEOUT_S, RunExport, TrackerFeed
from paceline.observe.export.options import ExportOptions
from paceline.observe.export.prometheus import MetricsServer, listen
from paceline.observe.export.run_metrics import RunMetrics
from paceline.observe.export.trackers import ExportedRun, parse_trackers, unix_offset_s

POLL_S: Final = 0.5
_END_TIMEOUT_S: Final = CLOSE_TIMEOUT_S + 10.0
_EXIT_LATE: Final = 1
_NICENESS: Final = 10  # training goes first where cores are short: a tenth of a core is left for this process


class ExportOrders(msgspec.Struct, frozen=True):
    """What such a process is to do.

    Args:
        run_dir: absolute path of the run's folder.
        log: trackers, as `--log` names them; empty for none.
        listening: descriptor of a socket for scrapes; -1 for none.
    """

    run_dir: str
    log: str
    listening: int


@contextmanager
def exporting(
    asked: ExportOptions, run_dir: Path, announce: Callable[[str], None], *, quiet: bool = False
) -> Generator[None]:
    """Export what the run in this folder reports, in a process that ends once all is sent after the context.

    Unless `quiet`, it announces where metrics are. Raises UsageError, before it begins, for a tracker or address that
    cannot be used.
    """
    if not asked.is_wanted:
        yield
        return
    with ExitStack() as undo:
        if asked.log is not None:
            parse_trackers(asked.log)
        listening = -1
        if asked.metrics is not None:
            scrapes = undo.enter_context(listen(asked.metrics))
            listening = scrapes.fileno()
            if not quiet:
                announce(f"metrics for Prometheus are at http://{_host_port(scrapes)}/metrics")
        orders = msgspec.json.encode(ExportOrders(str(run_dir), asked.log or "", listening))
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.launch.exporter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # libraries of others print there
            pass_fds=() if listening < 0 else (listening,),
            start_new_session=True,  # Ctrl-C is for the run, whose end it passes on
        )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(orders + b"\n")
                process.stdin.flush()
            yield
        finally:
            _end(process, announce)


def _host_port(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _end(process: subprocess.Popen[bytes], announce: Callable[[str], None]) -> None:
    """Have the process end, and kill what it has started and left."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        announce("the last values of the run have not reached its trackers, one of which hangs")
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def export_run(
    run_dir: Path,
    log: str,
    listening: socket.socket | None,
    wait_over: Callable[[float], bool],
    *,
    is_live: bool = True,
) -> bool:
    """Pass on what a run reports until it is over, and return whether all trackers have all of it; blocks.

    Args:
        run_dir: folder of the run.
        log: trackers, as `--log` names them; empty for none.
        listening: socket at which metrics are scraped, or None; it is closed at the end.
        wait_over: blocks for so many seconds at most; returns whether the run is over.
        is_live: whether its records are made now; else their time is that of their files, and slow trackers are waited
            for.

    Raises:
        UsageError: the records cannot be read, or a tracker cannot be used.
    """
    records = run_dir / RECORDS
    metrics = RunMetrics()
    with ExitStack() as undo:
        if listening is not None:
            undo.callback(MetricsServer(listening, lambda: {(): metrics}).close)
        export = RunExport(records, metrics)
        offset_s = unix_offset_s() if is_live else _offset_of(records)
        run = ExportedRun(run_dir.resolve().name, _settings(run_dir), offset_s, metrics)
        choices = parse_trackers(log) if log else ()
        export.feeds += [TrackerFeed(choice, run, waits=not is_live) for choice in choices]
        while not wait_over(POLL_S):
            export.poll()
        return export.close()


def _offset_of(records: Path) -> float:
    """Return what is added to the times of records of a run that has ended to have seconds since 1970."""
    from paceline.observe.runs import TraceFollower

    last_t = max((record.t for record in TraceFollower(records).poll()), default=0.0)
    return max((path.stat().st_mtime for path in records.glob("worker-*.jsonl")), default=0.0) - last_t


def _settings(run_dir: Path) -> dict[str, str]:
    """Return how the run was started, where its folder says so."""
    with suppress(PacelineError):
        spec = ClusterSpec.read(run_dir / SPEC_NAME)
        named = {
            "workers": spec.num_workers,
            "servers": spec.num_servers,
            "transport": spec.transport,
            "consistency": spec.consistency,
            "strategy": spec.strategy,
        }
        return {name: str(value) for name, value in named.items() if value is not None}
    return {}


def _wait_input(timeout_s: float) -> bool:
    """Block for so many seconds at most; return whether standard input has ended."""
    return bool(select.select([sys.stdin], [], [], timeout_s)[0]) and not os.read(sys.stdin.fileno(), 1)


def _end_in_time() -> None:
    """End this process a while after its input has ended, whatever hangs in it."""
    descriptor = os.dup(sys.stdin.fileno())
    poll = select.poll()
    poll.register(descriptor, 0)  # only that it has been hung up
    poll.poll()
    threading.Event().wait(_END_TIMEOUT_S)
    os._exit(_EXIT_LATE)


def main() -> None:
    """Do as standard input says, until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:  # its end is waited for by descriptor
        line = lines.readline()
    if not line:
        return
    orders = msgspec.json.decode(line, type=ExportOrders)
    threading.Thread(target=_end_in_time, name="paceline-deadline", daemon=True).start()
    listening = None if orders.listening < 0 else socket.socket(fileno=orders.listening)
    code = 0
    try:
        export_run(Path(orders.run_dir), orders.log, listening, _wait_input)
    except PacelineError as error:
        tell(f"what the run reports is not passed on any more: {error}. The run goes on")
        code = _EXIT_LATE
    sys.stderr.flush()
    os._exit(code)  # a tracker that hangs keeps a thread, which is not waited for


if __name__ == "__main__":
    main()
