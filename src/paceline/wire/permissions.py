"""Permissions: which role may send which message to a server, and that every peer uses its own identity."""

from __future__ import annotations

from typing import Final, Literal

from paceline.core import messages
from paceline.core.messages import PushId, Sender
from paceline.errors import AuthenticationFailed, PeerError
from paceline.transport.base import Connection
from paceline.wire import messages as wire
from paceline.wire import requests
from paceline.wire.messages import Hello

Role = Literal["worker", "server"]

# The role that may send each message to a server; None for messages to workers, and for those of handshakes.
SPEAKERS: Final[dict[type, Role | None]] = {
    Hello: None,
    wire.PushFrame: "worker",
    wire.PullFrame: "worker",
    wire.StepFrame: "worker",
    wire.PushPiece: "worker",
    wire.EarlyValues: None,
    wire.FetchedRest: None,
    wire.RowPushFrame: "worker",
    wire.RowPullFrame: "worker",
    wire.Unsubscribe: "worker",
    wire.RowsUsed: "worker",
    wire.KeysWanted: None,
    messages.Join: "worker",
    messages.Leave: "worker",
    messages.Clock: "worker",
    messages.Taken: "worker",
    messages.Joined: None,
    messages.Left: None,
    messages.Held: None,
    messages.Applied: None,
    messages.PushRefused: None,
    messages.Ticked: None,
    messages.Fetched: None,
    messages.Delivered: None,
    messages.PullRefused: None,
    messages.WorkerRefused: None,
    messages.Follow: "server",
    messages.Closed: "server",
    requests.Declare: "worker",
    requests.DeclareRows: "worker",
    requests.Describe: "worker",
    requests.Initialise: "worker",
    requests.AwaitValues: "worker",
    requests.SaveState: "worker",
    requests.LoadState: "worker",
    requests.Barrier: "worker",
    requests.ClaimWork: "worker",
    requests.ReportWait: "worker",
    requests.CallFunction: "worker",
    requests.CountRows: "worker",
    requests.ReadRows: "worker",
    requests.WriteRows: "worker",
    requests.RequestDone: None,
    requests.RequestFailed: None,
}


_MOST_CLOCKS: Final = 1 << 63


def check_said(hello: Hello, message: object, num_servers: int) -> None:
    """Raise PeerError unless the peer's role may send this message, and the message carries the peer's identity."""
    if SPEAKERS[type(message)] != hello.role:
        raise PeerError(f"a {hello.role} may not say {type(message).__name__}")
    if isinstance(message, wire.StepFrame):
        message.check()
        pushes = (*message.pushes, *message.row_pushes)
        _check_worker(hello, *[part.push.id for part in pushes], *[part.pull.sender for part in message.pulls])
        if message.ends >= _MOST_CLOCKS:
            raise PeerError(f"{hello.role} {hello.rank} ends clock {message.ends}")
    elif isinstance(message, wire.PushFrame | wire.RowPushFrame):
        _check_worker(hello, message.push.id)
    elif isinstance(message, wire.PushPiece):
        _check_worker(hello, message.push.push.id)
    elif isinstance(message, wire.PullFrame | wire.RowPullFrame):
        _check_worker(hello, message.pull.sender)
    elif isinstance(
        message,
        messages.Join | messages.Leave | messages.Clock | messages.Taken | wire.Unsubscribe | wire.RowsUsed,
    ):
        _check_worker(hello, message.sender)
    elif isinstance(message, messages.Follow | messages.Closed):
        _check_server(hello, message, num_servers)


def check_caller(hello: object, connection: Connection) -> Hello:
    """Return the caller's introduction; raises PeerError if it has none, or its certificate is for another process."""
    if not isinstance(hello, Hello):
        raise PeerError("the peer did not introduce itself")
    if not connection.peer_identity.permit(hello.role, hello.rank):
        holder = connection.peer_identity.holder
        raise PeerError(f"it calls itself {hello.role} {hello.rank}, but its certificate is for {holder}")
    return hello


def check_server(connection: Connection, rank: int, role: str = "server") -> None:
    """Raise AuthenticationFailed, and close the connection, if its certificate is not for this (data) server."""
    if not connection.peer_identity.permit(role, rank):
        connection.close()
        name = "data server" if role == "data" else role
        raise AuthenticationFailed(
            f"{connection.peer} was to be {name} {rank}, but its certificate is for {connection.peer_identity.holder}; "
            "do not trust it"
        )


def _check_worker(hello: Hello, *said_by: PushId | Sender) -> None:
    """Raise PeerError for a message with the identity of another worker or incarnation."""
    for said in said_by:
        if (said.worker, said.incarnation) != (hello.rank, hello.incarnation):
            raise PeerError(
                f"{hello.role} {hello.rank} (incarnation {hello.incarnation}) speaks as worker {said.worker} "
                f"(incarnation {said.incarnation})"
            )


def _check_server(hello: Hello, message: messages.Follow | messages.Closed, num_servers: int) -> None:
    follows = isinstance(message, messages.Follow)
    if not 0 <= hello.rank < num_servers or (follows and message.server != hello.rank):
        raise PeerError(f"{message} came from server {hello.rank} of {num_servers}")
