"""Where versions are published: the servers of a job, found anew each time a reader connects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, cast

import msgspec

from paceline.core.calls import is_path
from paceline.errors import UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.carriers import make_transport
from paceline.job.credentials.holders import KEYS_NAME, Holder
from paceline.job.spec import ClusterSpec
from paceline.serve.access import SCHEME, ClientCredentials, ServerCredentials, ServeUrl, find_holder
from paceline.serve.client import NamespaceTransport, addresses_of
from paceline.transport.base import Transport
from paceline.worker.node import WorkerNode

ReaderRole = Literal["reader", "relay"]


class PublishingServers(msgspec.Struct, frozen=True):
    """The servers of one life of a job: how to reach them, and as which reader.

    `share_address`: there is one address, which says how many servers it stands for, and to which each connection
    says which of them it is for.
    """

    transport: Transport
    addresses: tuple[str, ...]
    rank: int = 0
    role: ReaderRole = "reader"
    share_address: bool = False

    def address_of(self, server: int) -> str:
        """Return where a server listens."""
        return self.addresses[0 if self.share_address else server]


FindServers = Callable[[], PublishingServers]  # raises UsageError or PeerError where there are none now


class VersionPlaces(msgspec.Struct, frozen=True):
    """Where a subscription reads: the first place that works, and the next one where that is lost.

    Args:
        name: of all of them.
        finders: of their servers.
        compress: whether these compress what has changed between versions.
    """

    name: str
    finders: tuple[FindServers, ...]
    compress: bool = False


def find_places(
    source: object, shown: ClientCredentials, role: ReaderRole = "reader", *, compress: bool = False
) -> VersionPlaces:
    """Return the places of a source, for a reader or a relay.

    `source`: the folder of a job, the address of a server of its own or of a relay, a session of this process; or a
    list of these.

    Raises:
        UsageError: there cannot be such a place, or credentials are missing.
    """
    sources = cast("list[object]", list(source)) if isinstance(source, list | tuple) else [source]
    if not sources:
        raise UsageError("subscribe: the list of places is empty, expected the folder of a job, or an address")
    if shown != ClientCredentials() and not any(map(is_address, sources)):
        raise UsageError("subscribe: token, keys, ca, certificate and key are for an address: leave them out.")
    found = [_find_place(each, shown, role) for each in sources]
    return VersionPlaces(", ".join(name for name, _ in found), tuple(find for _, find in found), compress)


def is_address(source: object) -> bool:
    """Return whether this is the address of a server of its own, or of a relay."""
    return isinstance(source, str) and source.startswith(f"{SCHEME}://")


def _find_place(source: object, shown: ClientCredentials, role: ReaderRole) -> tuple[str, FindServers]:
    """Return the name of one place, and what finds its servers."""
    if isinstance(source, str) and is_address(source):
        location = ServeUrl.parse(source)
        access = shown.access(location, None, role)
        holder = None if shown.keys is None else find_holder(Path(shown.keys), None, role)
        return source, partial(_of_address, location, access, 0 if holder is None else max(0, holder.rank), role)
    if isinstance(source, str | Path) and is_path(source):
        return str(source), partial(_of_folder, Path(source), role)
    node = getattr(source, "node", None)
    if isinstance(node, WorkerNode):
        return "this process", lambda: PublishingServers(node.transport, tuple(node.addresses))
    raise UsageError(
        f"subscribe: {source!r:.80} is no place of versions, expected the folder of a job (--run-dir), "
        f"{SCHEME}://HOST:PORT/NAME, or a list of these"
    )


def _of_folder(folder: Path, role: ReaderRole) -> PublishingServers:
    """Read where the servers of a job are; raises UsageError if it does not run."""
    spec = ClusterSpec.read(folder / CLUSTER_NAME)
    holder = find_holder(Path(spec.run_dir) / KEYS_NAME, None, role) if spec.encrypted else Holder(role, 0)
    transport = make_transport(spec, holder, notice=lambda _: None)
    return PublishingServers(transport, spec.addresses, max(0, holder.rank), role)


def _of_address(location: ServeUrl, access: ServerCredentials, rank: int, role: ReaderRole) -> PublishingServers:
    transport = NamespaceTransport(location, access.transport(), partial(addresses_of, location))
    return PublishingServers(transport, (str(location),), rank, role, share_address=True)
