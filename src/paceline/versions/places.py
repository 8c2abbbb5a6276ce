"""Where versions are published: the servers of a job, found anew each time a reader connects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.errors import UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.carriers import make_transport
from paceline.job.credentials.holders import KEYS_NAME, Holder
from paceline.job.spec import ClusterSpec
from paceline.serve.access import SCHEME, ClientCredentials, ServerCredentials, ServeUrl, find_holder
from paceline.serve.client import NamespaceTransport, addresses_of
from paceline.transport.base import Transport
from paceline.worker.node import WorkerNode


@dataclass(frozen=True, slots=True)
class PublishingServers:
    """The servers of one life of a job: how to reach them, and as which reader."""

    transport: Transport
    addresses: tuple[str, ...]
    rank: int = 0


FindServers = Callable[[], PublishingServers]  # raises UsageError or PeerError where there are none now


def find_place(source: object, shown: ClientCredentials) -> tuple[str, FindServers]:
    """Return the name of a place, and what finds its servers.

    `source`: the folder of a job, the address of a server of its own, or a session of this process.

    Raises:
        UsageError: there cannot be such a place, or credentials are missing.
    """
    if isinstance(source, str) and source.startswith(f"{SCHEME}://"):
        location = ServeUrl.parse(source)
        access = shown.access(location, None, "reader")
        holder = None if shown.keys is None else find_holder(Path(shown.keys), None, "reader")
        return source, partial(_standalone, location, access, 0 if holder is None else max(0, holder.rank))
    if isinstance(source, str | Path):
        if shown != ClientCredentials():
            raise UsageError("subscribe: token, keys, ca, certificate and key are for an address: leave them out.")
        return str(source), partial(_of_folder, Path(source))
    node = getattr(source, "node", None)
    if isinstance(node, WorkerNode):
        return "this process", lambda: PublishingServers(node.transport, tuple(node.addresses))
    raise UsageError(
        f"subscribe: {str(source)[:80]!r} is no place of versions, expected the folder of a job (--run-dir), or "
        f"{SCHEME}://HOST:PORT/NAME"
    )


def _of_folder(folder: Path) -> PublishingServers:
    """Read where the servers of a job are; raises UsageError if it does not run."""
    spec = ClusterSpec.read(folder / CLUSTER_NAME)
    holder = find_holder(Path(spec.run_dir) / KEYS_NAME, None, "reader") if spec.encrypted else Holder("reader", 0)
    transport = make_transport(spec, holder, notice=lambda _: None)
    return PublishingServers(transport, spec.addresses, max(0, holder.rank))


def _standalone(location: ServeUrl, access: ServerCredentials, rank: int) -> PublishingServers:
    transport = NamespaceTransport(location, access.transport(), partial(addresses_of, location))
    return PublishingServers(transport, (str(location),), rank)
