"""The entry of a data server: `python -m paceline.launch.data_server SPEC RANK [HOST]`.

It listens, publishes its address, and serves batches until its standard input says `stop`. The end of that input means
that the launcher is gone: then it ends at once. It decides nothing, so that it may also be killed and started again.
"""

import sys
import threading
from pathlib import Path

from paceline.data.service.server import DataServer
from paceline.job.addresses import address_path
from paceline.job.carriers import listen_address, make_transport
from paceline.job.credentials.holders import Holder
from paceline.job.credentials.revocation import revoked_path, watching_revoked
from paceline.job.environment import checks_memory
from paceline.job.machines import LOOPBACK
from paceline.job.spec import ClusterSpec, write_private
from paceline.launch.entry import read_orders, report_unknown_order, run_program
from paceline.notices import tell
from paceline.observe.trace import Trace, trace_path


def serve(spec: ClusterSpec, rank: int, host: str = LOOPBACK) -> None:
    """Serve batches to the workers of the job; blocks until told to stop. By TCP it listens at `host`."""
    transport = make_transport(spec, Holder("data", rank), tell)
    listener = transport.listen(listen_address(spec, rank, host, role="data"))
    run_dir = Path(spec.run_dir)
    trace = Trace(trace_path(run_dir, "data", rank), spec.trace_bytes)
    node = DataServer(
        rank,
        listener,
        transport,
        spec.generation,
        trace=trace,
        checks_memory=checks_memory(),
        num_workers=spec.num_workers,
    )
    threading.Thread(target=_obey, args=(node,), name="paceline-orders", daemon=True).start()
    write_private(address_path(run_dir, "data", rank), listener.address.encode())
    with watching_revoked(revoked_path(spec), node.expel):
        node.run()


def _obey(node: DataServer) -> None:
    for words in read_orders():
        match words:
            case ["stop"]:
                node.stop()
                return
            case _:
                report_unknown_order(words, "data server")


def main() -> None:
    """Serve as the command line says; the launcher stops data servers when the workers have ended."""
    run_program(lambda: serve(ClusterSpec.read(Path(sys.argv[1])), int(sys.argv[2]), *sys.argv[3:]))


if __name__ == "__main__":
    main()
