"""A server of a job over shaped lines: it listens at its host's address, until its standard input ends.

python host_server.py SPEC RANK ADDRESS
"""

import sys
import threading
from functools import cache
from pathlib import Path

from paceline.job.addresses import CLUSTER_NAME
from paceline.job.carriers import make_transport
from paceline.job.credentials.holders import Holder
from paceline.job.spec import ClusterSpec, wait_spec, write_private
from paceline.launch.server import server_settings
from paceline.observe.trace import Trace, trace_path
from paceline.server.node import ServerNode


def main() -> None:
    """Serve the job whose spec is named on the command line."""
    spec, rank, address = ClusterSpec.read(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    run_dir, transport = Path(spec.run_dir), make_transport(spec, Holder("server", rank), print)
    listener = transport.listen(f"tcp://{address}:0")

    @cache
    def addresses() -> tuple[str, ...]:
        return wait_spec(run_dir / CLUSTER_NAME, spec.join_timeout_s).addresses

    trace = Trace(trace_path(run_dir, "server", rank))
    node = ServerNode(server_settings(spec, rank), listener, transport, addresses, trace)

    def stop_with_launcher() -> None:
        sys.stdin.read()
        node.stop()

    threading.Thread(target=stop_with_launcher, daemon=True).start()
    write_private(run_dir / f"server-{rank}.address", listener.address.encode())
    node.run()


if __name__ == "__main__":
    main()
