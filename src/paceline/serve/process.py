"""The process that serves, `python -m paceline.serve.process DESCRIPTOR PARENT`, started ahead by `ServeSupervisor`.

It imports what it needs, says so, and waits to be told what to serve. What it holds lies in memory that the supervisor
keeps, too: when it is killed, the next one goes on. It saves and ends when the supervisor has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from paceline.errors import EXIT_FAILURE, CheckpointError, PacelineError
from paceline.job.credentials.holders import REVOKED_NAME
from paceline.job.credentials.revocation import watching_revoked
from paceline.job.environment import wants_traceback
from paceline.job.machines import ANY_ADDRESS, format_host_port, parse_host_port
from paceline.job.spec import TOKEN_NAME
from paceline.launch.entry import PR_SET_PDEATHSIG
from paceline.launch.limits import explain, is_shortage
from paceline.launch.signals import at_first_signal
from paceline.notices import FAILURE, NEWS, tell
from paceline.observe.export.prometheus import MetricsServer, listen
from paceline.observe.export.run_metrics import RunMetrics
from paceline.serve.access import SCHEME, server_access
from paceline.serve.gateway import Gateway, Namespaces
from paceline.serve.namespace import NamespaceConfig
from paceline.serve.orders import HAND_OVER, LISTENER, LOCK, ORDER_BYTES, SERVES, ServeOrders, ready
from paceline.serve.replicas import Companions
from paceline.serve.state import StateFolder
from paceline.transport.lasting_memory import LastingMemory


def serve_state(
    orders: ServeOrders,
    folder: StateFolder,
    listener: int,
    memory: LastingMemory | None = None,
    begun: Callable[[Gateway], None] = lambda _: None,
) -> int:
    """Serve until told to end by a signal; return the exit code. Call it from the main thread.

    Args:
        orders: what to serve.
        folder: of the state.
        listener: descriptor of a socket that listens at the address, from then on this function's.
        memory: outlives this process; what one before it has left there is gone on with.
        begun: called as soon as clients are accepted.
    """
    keys = None if orders.keys is None else Path(orders.keys)
    with ExitStack() as undo:
        host = parse_host_port(orders.address.removeprefix("tcp://"))[0]
        transport = server_access(host, folder.path, keys).transport()
        accepting = transport.listen_again(orders.address, listener)
        undo.callback(accepting.close)
        for problem in _damaged(folder, or_previous=orders.or_previous) if orders.checks else ():
            tell(problem)
        metrics: dict[str, RunMetrics] | None = {} if orders.metrics else None
        if metrics is not None:
            scraped = MetricsServer(
                listen(orders.metrics), lambda: {(("namespace", name),): one for name, one in dict(metrics).items()}
            )
            undo.callback(scraped.close)
            tell(f"metrics for Prometheus are at {scraped.url}", NEWS)
        hosting = NamespaceConfig(
            tell=tell,
            snapshot_every_s=orders.snapshot_every_s,
            allowed_paths=frozenset(orders.allow),
            or_previous=orders.or_previous,
            memory=memory,
            metrics=metrics,
        )
        companions = None
        if orders.views:
            companions = Companions(Path(orders.views), folder, orders.address, transport, tell, orders.lag)
        namespaces = Namespaces(folder, transport, hosting, companions)
        undo.enter_context(watching_revoked(keys / REVOKED_NAME if keys else None, namespaces.expel))
        gateway = Gateway(accepting, namespaces)
        undo.enter_context(at_first_signal(lambda _: _save_and_end(gateway)))
        namespaces.resume()
        if companions is not None:
            undo.callback(companions.close)
            companions.start(namespaces.fill)
        if orders.ends:
            gateway.stop()
        if orders.greets:
            sys.stdout.write(f"{_greeting(orders.address, folder, keys)}\n")
            sys.stdout.flush()
        begun(gateway)
        unsaved = gateway.run()
    return EXIT_FAILURE if unsaved else 0


def _damaged(folder: StateFolder, *, or_previous: bool) -> list[str]:
    """Read all that was saved; return which namespaces cannot be served and why, so that it is told at the start."""
    problems: list[str] = []
    for name in folder.names():
        try:
            folder.folder(name).newest(or_previous=or_previous)
        except (CheckpointError, OSError) as error:
            problems.append(f"namespace '{name}' is not served, its clients are refused: {error}")
    return problems


def _greeting(address: str, folder: StateFolder, keys: Path | None) -> str:
    where = address.removeprefix("tcp://")
    host, port = parse_host_port(where)
    there = format_host_port(socket.gethostname() if host in ANY_ADDRESS else host, port)
    names = folder.names()
    found = f"with {', '.join(names)} from {folder.path}" if names else f"with nothing in {folder.path} yet"
    shown = f'token="{folder.path / TOKEN_NAME}"' if keys is None else "keys=FOLDER"
    name = names[0] if names else "NAME"
    return f'paceline: serving at {where} {found}: paceline.connect("{SCHEME}://{there}/{name}", {shown})'


def _save_and_end(gateway: Gateway) -> None:
    tell("saving, and ending", NEWS)
    gateway.stop()


def _heed_supervisor(channel: socket.socket, gateway: Gateway) -> None:
    """Make room for the next process when told to; runs in a thread of its own."""
    while channel.recv(ORDER_BYTES) == HAND_OVER:
        gateway.namespaces.end_those_that_are_lost()
        os.kill(os.getpid(), signal.SIGKILL)  # all that is left lies in memory that outlives this process


def _serve_as_told(channel: socket.socket) -> int:
    channel.send(ready())
    message, descriptors, _, _ = socket.recv_fds(channel, ORDER_BYTES, 1)
    if not message:  # it is not needed any more
        return 0
    orders = ServeOrders.decode(message)
    memory = LastingMemory.connect(socket.socket(fileno=descriptors[0]))
    folder = StateFolder(Path(orders.state), memory.descriptor(LOCK))

    def begun(gateway: Gateway) -> None:
        threading.Thread(target=_heed_supervisor, args=(channel, gateway), name="paceline-orders", daemon=True).start()
        channel.send(SERVES)

    try:
        return serve_state(orders, folder, memory.descriptor(LISTENER), memory, begun)
    finally:
        folder.close()


def main() -> None:
    """Serve as the supervisor says, and end as it does."""
    descriptor, parent = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until it serves: a terminal's Ctrl-C is the supervisor's
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = _serve_as_told(socket.socket(fileno=descriptor))
    except (PacelineError, OSError, MemoryError, RuntimeError) as error:
        if wants_traceback() or not (isinstance(error, PacelineError) or is_shortage(error)):
            raise
        tell(str(error) if isinstance(error, PacelineError) else explain(error), FAILURE)
        code = EXIT_FAILURE
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is open any more, and unloading torch would only delay the end


if __name__ == "__main__":
    main()
