"""The server of the managed benchmark: it listens at the end of the shaped lines, until its standard input ends."""

import sys
import threading
from pathlib import Path

from shaped_network import SERVER_HOST

from paceline.launch.carriers import make_transport
from paceline.launch.server import server_settings
from paceline.launch.spec import ClusterSpec, write_private
from paceline.node.server import ServerNode
from paceline.observe.trace import Trace


def main() -> None:
    """Serve the job whose spec is named on the command line."""
    spec = ClusterSpec.read(Path(sys.argv[1]))
    transport = make_transport(spec, print)
    listener = transport.listen(f"tcp://{SERVER_HOST}:0")
    node = ServerNode(server_settings(spec, 0), listener, transport, lambda: (listener.address,), Trace(None))

    def stop_with_launcher() -> None:
        sys.stdin.read()
        node.stop()

    threading.Thread(target=stop_with_launcher, daemon=True).start()
    write_private(Path(spec.run_dir) / "server-0.address", listener.address.encode())
    node.run()


if __name__ == "__main__":
    main()
