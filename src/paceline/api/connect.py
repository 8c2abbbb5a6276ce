"""How a process becomes a worker: of the job it was started in, of a server of its own elsewhere, or alone."""

from __future__ import annotations

import atexit

from paceline.api.join import start
from paceline.api.session import Session
from paceline.collective.collectives import Collectives
from paceline.collective.group import WorkerSet
from paceline.core.messages import Sender
from paceline.core.settings import WorkerSettings
from paceline.errors import UsageError
from paceline.job.environment import Place, checks_memory, wait_timeout_s
from paceline.launch.script_exit import leave_after_crash, when_script_ends
from paceline.model_parallel.arrangement import Arrangement
from paceline.observe.trace import Trace
from paceline.serve.access import ClientCredentials, PathLike
from paceline.serve.client import enter
from paceline.serve.messages import MAX_WORKERS
from paceline.serve.namespace import LEASE_S
from paceline.serve.url import ServeUrl
from paceline.transport.base import Transport
from paceline.worker.given import brief
from paceline.worker.lock import WorkerOptions
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode


def connect(
    address: str | None = None,
    *,
    token: PathLike | bytes | None = None,
    keys: PathLike | None = None,
    ca: PathLike | None = None,
    certificate: PathLike | None = None,
    key: PathLike | None = None,
    rank: int | None = None,
    workers: int | None = None,
    transport: Transport | None = None,
    place: Place | None = None,
    servers: str | None = None,
    timeout_s: float | None = None,
) -> Session:
    """Join the job that this process was started in, or embed one server when it was started alone; or call a server.

    Blocks until all servers are there and have let this worker take part.

    Args:
        address: of a server of its own (`paceline serve`), "paceline://HOST:PORT/NAMESPACE": join the job of this name
            there, which begins with its first worker. The arguments up to `workers` are for that.
        token: what the server lets nobody in without: the path of its file, or its bytes. By default that in `keys`.
        keys: a folder with certificates, as `paceline keys issue` writes it; needed from another machine.
        ca: instead of `keys`, the certificate of your own authority, and with it `certificate` and `key`.
        certificate: of this client.
        key: of this client.
        rank: which worker this is, a new life of it where there was one before; by default the first that nobody is.
        workers: how many take part, which all must say alike; bsp waits for all of them from the start. By default as
            many as are there.
        transport: the carrier; by default the one the job's spec names.
        place: which worker of which job this is; by default what the launcher left in the environment.
        servers: where servers are under another launcher than ours; see `paceline.init`.
        timeout_s: how long this worker waits for others, in any call; see `paceline.init`.

    Raises:
        UsageError: arguments that make no sense together, or a host that has no address.
        PacelineError: no server can be reached in time, or they refuse this worker.

    Example:
        >>> import paceline
        >>> with paceline.connect() as ps:
        ...     ps.rank, ps.size
        (0, 1)
    """
    for_launched, shown = (transport, place, servers), (token, keys, ca, certificate, key)
    if not isinstance(address, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"connect: the address is {brief(address)}, expected a text such as 'host:7077'.")
    if address is None:
        if any(given is not None for given in (*shown, rank, workers)):
            raise UsageError(
                "connect: token, keys, ca, certificate, key, rank and workers are for an address: give it."
            )
        return _allowing(timeout_s, start(transport=transport, place=place, servers=servers))
    if any(given is not None for given in for_launched):
        raise UsageError("connect: transport, place and servers are for launched jobs, and not for an address.")
    joined = _join_remote(ServeUrl.parse(address), ClientCredentials(token, keys, ca, certificate, key), rank, workers)
    return _allowing(timeout_s, joined)


def _allowing(timeout_s: float | None, session: Session) -> Session:
    session.node.waits.set_timeout(timeout_s)
    return session


def _join_remote(location: ServeUrl, shown: ClientCredentials, rank: int | None, workers: int | None) -> Session:
    _check("rank", rank, 0)
    _check("workers", workers, 1)
    entrance = enter(location, shown.access(location, rank), rank, workers)
    admitted = entrance.admitted
    settings = WorkerSettings(Sender(admitted.generation, admitted.rank, admitted.incarnation), num_servers=1)
    options = WorkerOptions(wait_timeout_s(), LEASE_S, checks_memory())
    node = WorkerNode(settings, entrance.line, (str(location),), options)
    try:
        node.join()
    except BaseException:
        node.close()
        raise
    apart = Collectives(WorkerSet(admitted.rank, admitted.size, node, None, together=False))
    arrangement = Arrangement(admitted.rank, admitted.size)
    meter = StepMetrics(Trace(None), admitted.rank)
    session = Session(admitted.rank, admitted.size, 0, node, meter, None, None, apart, arrangement)
    session.notice.listen()
    atexit.register(session.leave_at_exit)
    when_script_ends(lambda well: session.close(politely=well))
    leave_after_crash()
    return session


def _check(name: str, number: int | None, least: int) -> None:
    if number is not None and not (isinstance(number, int) and least <= number < MAX_WORKERS):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"connect: {name} is {brief(number)}, expected {least} to {MAX_WORKERS - 1}.")
