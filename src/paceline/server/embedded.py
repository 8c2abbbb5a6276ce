"""A server within the process of its only worker, for a script that runs without a launcher."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from paceline.core.settings import ServerSettings
from paceline.observe.trace import Trace
from paceline.server.node import ServerNode
from paceline.transport.base import Transport


@dataclass(slots=True)
class EmbeddedServer:
    """A server in a thread of this process, for a script that runs without a launcher."""

    node: ServerNode
    thread: threading.Thread
    addresses: tuple[str, ...]

    @staticmethod
    def start(transport: Transport, address: str, *, checks_memory: bool = False) -> EmbeddedServer:
        """Start a server for one worker; see `ServerNode`."""
        listener = transport.listen(address)
        addresses = (listener.address,)
        settings = ServerSettings(0, 1, workers=(0,))
        node = ServerNode(settings, listener, transport, lambda: addresses, Trace(None), checks_memory=checks_memory)
        thread = threading.Thread(target=node.run, name="paceline-server", daemon=True)
        thread.start()
        return EmbeddedServer(node, thread, addresses)

    def close(self, *, politely: bool) -> None:
        """Stop the server and join its thread; `politely` makes no difference, as this process is its only worker."""
        self.node.stop()
        self.thread.join(timeout=10.0)
