"""A server of a job that nobody watches over: it ends when all workers have.

`python -m paceline.launch.entering.attendant RUN_DIR RANK HOST` is one beside a worker. It ends with that worker, too:
its standard input is a pipe that the worker holds open.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Final

from paceline.errors import PeerError
from paceline.launch.addresses import SPEC_NAME
from paceline.launch.carriers import tell_user
from paceline.launch.entering.gathering import wait_complete
from paceline.launch.entering.parting import wait_worker_ended
from paceline.launch.notice import ignore_telling
from paceline.launch.server import serve
from paceline.launch.serving import run_program
from paceline.launch.spec import ClusterSpec
from paceline.node.server import ServerNode

EXIT_FAILURE: Final = 1


def attend(spec: ClusterSpec, rank: int, host: str) -> None:
    """Serve one shard of the job; blocks until all workers have left or died.

    By TCP it listens at `host`, an address of this machine.
    Ends the process with an error when not all have come in time.
    """
    ignore_telling()
    serve(spec, rank, lambda node: _follow_workers(spec, rank, node), host)


def _follow_workers(spec: ClusterSpec, rank: int, node: ServerNode) -> None:
    try:
        wait_complete(spec, lambda: None, spec.join_timeout_s)
    except PeerError as error:
        tell_user(f"server {rank}: {error}")
        os._exit(EXIT_FAILURE)
    workers = range(spec.num_workers)
    watches = [threading.Thread(target=_watch, args=(spec, node, worker), daemon=True) for worker in workers]
    for watch in watches:
        watch.start()
    for watch in watches:
        watch.join()
    node.stop()


def _watch(spec: ClusterSpec, node: ServerNode, worker: int) -> None:
    if wait_worker_ended(spec, worker):  # else the server itself will have missed it, or it goes on
        node.report_death(worker, 0, "its process ended")


def _end_with_parent() -> None:
    """Block until standard input ends, and then end this process at once."""
    # Unbuffered: a process whose other threads have failed could not end while this one holds a buffer's lock.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lifeline:
        lifeline.read(1)
    os._exit(EXIT_FAILURE)


def main() -> None:
    """Serve as the command line says."""
    threading.Thread(target=_end_with_parent, name="paceline-lifeline", daemon=True).start()
    run_program(lambda: attend(ClusterSpec.read(Path(sys.argv[1]) / SPEC_NAME), int(sys.argv[2]), sys.argv[3]))


if __name__ == "__main__":
    main()
