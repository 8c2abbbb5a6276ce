"""Asks a server what it has of a namespace, as clients and other servers do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import PeerError
from paceline.serve.messages import EnterFrame, NamespaceStanding, decode_answer, encode
from paceline.wire.messages import check_server

if TYPE_CHECKING:
    from paceline.transport.base import Transport


def ask_standing(transport: Transport, address: str, namespace: str, timeout_s: float) -> NamespaceStanding:
    """Ask the server at an address what it has of a namespace; raises PeerError when it does not answer."""
    connection = transport.connect(address, encode(EnterFrame(namespace, seeks=True)), timeout_s=timeout_s)
    try:
        check_server(connection, 0)
        answer = decode_answer(connection.receive(timeout_s=timeout_s).header)
    finally:
        connection.close()
    if not isinstance(answer, NamespaceStanding):
        raise PeerError(f"{address} answered with a {type(answer).__name__} (do both sides run the same version?)")
    return answer
