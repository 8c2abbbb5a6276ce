"""Runs a whole job as threads of one process: `python -m paceline.api.threads script.py args...`.

Or `-m module args...`. The workers run the script as separate modules, each with a session of its own; nothing leaves
the process.
"""

from __future__ import annotations

import contextvars
import importlib
import importlib.util
import os
import sys
import threading
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path

from msgspec.structs import replace

from paceline.api.join import join
from paceline.api.script import bind
from paceline.errors import EXIT_FAILURE, EXIT_PREEMPTED, UsageError
from paceline.job.environment import Place, checks_memory, claim_place, find_place
from paceline.job.spec import ClusterSpec, wait_spec
from paceline.launch.entry import die_with_launcher
from paceline.launch.script import OPTION, find_module, source_of
from paceline.launch.script_exit import report_error
from paceline.launch.server import record_file, server_settings
from paceline.launch.signals import ABORT_MARKER_NAME, PreemptionNotice
from paceline.observe.trace import Trace, trace_path
from paceline.server.node import ServerNode
from paceline.server.replica_link import ReplicaLink
from paceline.transport.memory import MemoryTransport

_START_TIMEOUT_S = 30.0


def run_job(spec: ClusterSpec, place: Place, script: ModuleSpec) -> int:
    """Run servers and workers to their end, and return the exit code.

    The first worker that fails ends the process with its traceback. All are told to leave at once, by one notice.
    """
    notice, told = PreemptionNotice(Path(spec.run_dir) / ABORT_MARKER_NAME), list[int]()
    notice.listen()
    transport = MemoryTransport()
    listeners = [transport.listen(f"memory://server-{rank}") for rank in range(spec.num_servers)]
    addresses = tuple(listener.address for listener in listeners)
    spec = replace(spec, addresses=addresses)
    nodes = [
        ServerNode(
            server_settings(spec, rank),
            listener,
            transport,
            lambda: addresses,
            Trace(trace_path(Path(spec.run_dir), "server", rank), spec.trace_bytes),
            full_trace=spec.trace == "full",
            checks_memory=checks_memory(),
            replica=ReplicaLink(record=record_file(spec, rank)),
        )
        for rank, listener in enumerate(listeners)
    ]
    servers = [threading.Thread(target=node.run, name=f"paceline-server-{k}") for k, node in enumerate(nodes)]

    def work(rank: int) -> None:
        if _run_worker(spec, replace(place, rank=rank, local_rank=rank), transport, notice, script) == EXIT_PREEMPTED:
            told.append(rank)

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(spec.num_workers)]
    for thread in servers + workers:
        thread.start()
    for thread in workers:
        thread.join()
    for node in nodes:
        node.stop()
    for thread in servers:
        thread.join(timeout=spec.grace_s)
    return EXIT_PREEMPTED if told else 0


def _run_worker(
    spec: ClusterSpec, place: Place, transport: MemoryTransport, notice: PreemptionNotice, script: ModuleSpec
) -> int:
    """Run the script in a context whose session is this worker's; return 0, or 143 where it was told to leave."""
    context = contextvars.copy_context()
    try:
        context.run(_run_script, spec, place, transport, notice, script)
    except SystemExit as stop:
        if stop.code == EXIT_PREEMPTED:
            return EXIT_PREEMPTED
        if stop.code not in (None, 0):
            os._exit(stop.code if isinstance(stop.code, int) else EXIT_FAILURE)
    except BaseException as error:
        print(f"worker {place.rank} failed:", file=sys.stderr)
        report_error(error, _path_of(script))
        os._exit(EXIT_FAILURE)
    return 0


def _run_script(
    spec: ClusterSpec, place: Place, transport: MemoryTransport, notice: PreemptionNotice, script: ModuleSpec
) -> None:
    joined = join(spec, place, transport, notice=notice)
    bind(joined)
    assert script.loader is not None, "it was told by a file"
    with joined:
        if script.parent:
            importlib.import_module(script.parent)
        module = importlib.util.module_from_spec(script)
        module.__name__ = "__main__"  # as its loader calls it; its spec has the name under which it is found
        script.loader.exec_module(module)


def _path_of(script: ModuleSpec) -> str:
    """Return the script's path as frames of its code have it; its spec has the absolute one."""
    return script.loader.path if isinstance(script.loader, SourceFileLoader) else ""


def main() -> None:
    """Run the job that the launcher described."""
    die_with_launcher()
    claim_place()
    place = find_place()
    if place is None:
        raise UsageError("this program is started by `paceline run --transport memory`")
    del sys.argv[0]
    script = _module_of_command() if sys.argv[0] == OPTION else _script_of_command()
    sys.exit(run_job(wait_spec(place.spec_path, _START_TIMEOUT_S), place, script))


def _module_of_command() -> ModuleSpec:
    name = sys.argv.pop(1)
    sys.argv[0] = str(source_of(name, sys.path))
    return _spec(find_module(name, sys.path).name, sys.argv[0])


def _script_of_command() -> ModuleSpec:
    script = sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    return _spec("__main__", script)


def _spec(name: str, file: str) -> ModuleSpec:
    found = importlib.util.spec_from_file_location(name, file, loader=SourceFileLoader("__main__", file))
    if found is None:
        raise UsageError(f"{file} is not a Python script")
    return found


if __name__ == "__main__":
    main()
