"""The public `connect`: joins the job of this process, or a namespace of a standalone server."""

from __future__ import annotations

from paceline.api.assembly import SessionConfig, assemble_session, close_with_script
from paceline.api.join import start
from paceline.api.session import Session
from paceline.core.calls import checked_late
from paceline.core.messages import Sender
from paceline.core.settings import MAX_WORKERS, WorkerSettings
from paceline.errors import UsageError
from paceline.job.environment import Place, checks_memory, wait_timeout_s
from paceline.launch.script_exit import leave_after_crash
from paceline.serve.access import ClientCredentials, PathLike, ServeUrl
from paceline.serve.client import enter_namespace
from paceline.serve.namespace import LEASE_S
from paceline.transport.base import Transport
from paceline.update.user_code import require_no_import
from paceline.worker.validation import brief
from paceline.worker.waits import WorkerOptions


@checked_late
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
    """Join the job that this process was started in (without a launcher, embed one server), or a standalone server.

    Blocks until all servers have accepted this worker.

    Args:
        address: of a standalone server (`paceline serve`), "paceline://HOST:PORT/NAMESPACE". Its first worker starts
            the namespace, which is a job of its own. The arguments up to `workers` apply to an address only.
        token: the server's token: the path of its file, or its bytes. Default: the one in `keys`.
        keys: a folder with certificates, as `paceline keys issue` writes it; required from another machine.
        ca: instead of `keys`, the certificate of your own authority, together with `certificate` and `key`.
        certificate: path of this client's certificate.
        key: path of this client's private key.
        rank: which worker this is; an earlier incarnation of it is replaced. Default: the lowest free rank.
        workers: number of workers, the same for all clients; bsp waits for all of them from the start. Default: as many
            as have joined.
        transport: the carrier. Default: the one in the job's spec.
        place: which worker of which job this is. Default: what the launcher set in the environment.
        servers: where servers run under another launcher; see `paceline.init`.
        timeout_s: how long this worker waits for others, in any call; see `paceline.init`.

    Raises:
        UsageError: arguments that do not go together, or a host without an address.
        PacelineError: no server can be reached in time, or they refuse this worker.

    Example:
        >>> import paceline
        >>> with paceline.connect() as ps:
        ...     ps.rank, ps.size
        (0, 1)
    """
    require_no_import()
    for_launched, shown = (transport, place, servers), (token, keys, ca, certificate, key)
    if not isinstance(address, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"connect: the address is {brief(address)}, expected a text: paceline://HOST:PORT/NAME.")
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
    entry = enter_namespace(location, shown.access(location, rank), rank, workers)
    admitted = entry.admitted
    session = assemble_session(
        SessionConfig(
            settings=WorkerSettings(
                Sender(admitted.generation, admitted.rank, admitted.incarnation),
                num_servers=1,
                keeps_pushes=admitted.keeps_pushes,
            ),
            transport=entry.transport,
            addresses=(str(location),),
            options=WorkerOptions(wait_timeout_s(), LEASE_S, checks_memory()),
            size=admitted.size,
            apart=(
                "clients of a server of its own know the server alone. Use tables and strategies of the parameter "
                "server, or start the workers as one job (`paceline run`, torchrun, srun, mpirun)."
            ),
        )
    )
    close_with_script(session)
    leave_after_crash()
    return session


def _check(name: str, number: int | None, least: int) -> None:
    if number is not None and not (isinstance(number, int) and least <= number < MAX_WORKERS):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"connect: {name} is {brief(number)}, expected {least} to {MAX_WORKERS - 1}.")
