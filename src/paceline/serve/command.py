"""`paceline serve`: a server of its own, for clients on this machine and others."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.job.folders import require_text
from paceline.job.machines import ANY_ADDRESS, format_host_port, look_up, parse_host_port
from paceline.launch.limits import check_limits
from paceline.observe.export.prometheus import check_free
from paceline.serve.access import server_access
from paceline.serve.lag import check_lag
from paceline.serve.numbers import require_same_views
from paceline.serve.orders import LISTENER, LOCK, ServeOffer, ServeOrders
from paceline.serve.state import StateFolder
from paceline.serve.supervise import ServeProcess, ServeSupervisor, most_regions, take_from
from paceline.snapshots.options import interval_s
from paceline.transport.lasting_memory import MemoryHolder

DEFAULT_ADDRESS: Final = "127.0.0.1:7700"


def serve(
    *,
    state: Path,
    listen: str | None = None,
    keys: Path | None = None,
    snapshot_every: str = "auto",
    allow: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    or_previous: Annotated[bool, Parameter(negative="")] = False,
    take_over: Annotated[bool, Parameter(negative="")] = False,
    alone: Annotated[bool, Parameter(negative="")] = False,
    metrics: str | None = None,
    views: Path | None = None,
    lag: int = 0,
) -> int:
    """Serve jobs that come and go, and keep their state on disk, until Ctrl-C or SIGTERM.

    Clients connect with paceline.connect("paceline://HOST:PORT/NAME"); each NAME is a job of its own.

    Parameters
    ----------
    state
        Folder for snapshots of the namespaces, and without --keys of the token that clients show. Made if missing.
    listen
        HOST:PORT, by default 127.0.0.1:7700; port 0 takes a free one. An address that other machines can reach needs
        --keys.
    keys
        Folder with certificates and a token, as `paceline keys make` writes it.
    snapshot_every
        Time between two snapshots of what has changed, 10m or 90s for example, or auto: a minute, or so long that
        writing takes a tenth of the time at most. A machine that fails loses no more than that.
    allow
        Update rules and functions of your own that clients may name, as package.module:Name; others are not run.
    or_previous
        Go on from the previous snapshot of a namespace whose newest one is damaged.
    take_over
        Replace the running server of this folder, and take over its memory, socket and clients.
    alone
        Start no second process to take over when this one is killed: then a kill loses what was not saved.
    metrics
        Port at which Prometheus scrapes /metrics, on this machine, or HOST:PORT.
    views
        Folder that the servers of several machines see, best on a third one: one of them serves each namespace, and
        another one has a replica, which takes over when that machine is lost. Made if missing.
    lag
        Clocks of each client by which answers may be ahead of the replica, the same for all servers of --views: then
        clients keep what the replica lacks, and no step waits for it. By default answers wait for the replica.
    """
    for folder in (state, *(() if views is None else (views,))):
        require_text(folder)
    _check_allowed(allow)
    check_limits(1 if alone else 2)
    if alone and take_over:
        raise UsageError("--alone keeps nothing that another process could go on with: leave out one of the two")
    folder_keys = None if keys is None else keys.absolute()
    orders = ServeOrders(
        state=str(state.absolute()),
        address="",
        keys=None if folder_keys is None else str(folder_keys),
        snapshot_every_s=interval_s(snapshot_every),
        allow=allow,
        or_previous=or_previous,
        metrics=metrics or "",
        views="" if views is None else str(views.absolute()),
        lag=lag,
    )
    require_same_views(state.absolute(), None if views is None else views.absolute())
    _check_lag(orders)
    if metrics is not None and not take_over:
        check_free(metrics)
    if take_over:
        return _take_over(orders, listen)
    host, port = parse_host_port(listen or DEFAULT_ADDRESS)
    _check_reachable(orders, host)
    with ExitStack() as undo:
        folder = StateFolder(state.absolute())
        undo.callback(folder.close)
        transport = server_access(host, folder.path, folder_keys).transport()
        address, listener = transport.bind(format_host_port(look_up(host)[0], port))
        orders = replace(orders, address=address)
        if alone or sys.platform != "linux":
            from paceline.serve.process import serve_state  # brings torch with it

            return serve_state(orders, folder, listener)
        undo.callback(os.close, listener)
        memory = undo.enter_context(MemoryHolder(most_regions()))
        memory.adopt(LISTENER, listener)
        memory.adopt(LOCK, folder.lock)
        memory.start()
        return undo.enter_context(ServeSupervisor(orders, folder.path, memory)).run()


def _check_allowed(paths: tuple[str, ...]) -> None:
    """Raise UsageError for what is not an import path: clients would be refused, and told of one that is allowed."""
    for path in paths:
        module, _, member = path.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), member)):
            raise UsageError(f"--allow is {path[:60]!r}, expected a rule or function of yours, as package.module:Name")


def _check_lag(orders: ServeOrders) -> None:
    """Raise UsageError where there are no replicas to lag, or the other servers have another number.

    This one does not say its own before it serves: others would have to start with that of one that never did.
    """
    if orders.views:
        check_lag(Path(orders.views), orders.lag)
    elif orders.lag:
        raise UsageError(f"--lag is {orders.lag}: replicas may lag, and there are none. Add --views")


def _check_reachable(orders: ServeOrders, host: str) -> None:
    """Raise UsageError where other servers are to reach this one, and are not told at which address."""
    if orders.views and host in ANY_ADDRESS:
        raise UsageError(
            f"--listen {host} is every address of this machine, and with --views other servers have to reach it: give "
            "the one at which they do"
        )


def _check_metrics(wanted: str, served: str | None) -> None:
    """Raise UsageError where a port is not free, unless it is the one at which the process before is scraped."""
    if wanted and served is not None and wanted.rpartition(":")[2] != served.rpartition(":")[2]:
        check_free(wanted)


def check_offer(orders: ServeOrders, listen: str | None, offer: ServeOffer) -> None:
    """Raise UsageError where a server that is to take another's place could not serve as it is told to."""
    folder, keys = Path(orders.state), None if orders.keys is None else Path(orders.keys)
    where = offer.address.removeprefix("tcp://")
    host, port = parse_host_port(where)
    if listen is not None:
        wanted_host, wanted_port = parse_host_port(listen)
        if wanted_port not in (0, port) or host not in look_up(wanted_host):
            raise UsageError(f"the server of {folder} listens at {where}, and not at {listen}: leave out --listen")
    _check_reachable(orders, host)
    _check_metrics(orders.metrics, offer.metrics)
    server_access(host, folder, keys).transport()


def _take_over(orders: ServeOrders, listen: str | None) -> int:
    """Serve in the place of another process, which ends."""
    folder = Path(orders.state)
    with MemoryHolder(most_regions()) as memory:
        memory.start()
        first = ServeProcess.start()
        try:
            first.wait_ready()
            address = take_from(folder, memory, partial(check_offer, orders, listen))
        except BaseException:
            first.kill()
            raise
        with ServeSupervisor(replace(orders, address=address, checks=False), folder, memory) as supervisor:
            return supervisor.run(first)
