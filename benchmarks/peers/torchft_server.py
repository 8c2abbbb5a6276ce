"""A parameter server on torchft's prototype: a session of two ranks for each worker, over its Gloo process group.

Run as `python torchft_server.py STAGE WORKERS PARAMETERS`.
"""

import multiprocessing
import sys
import threading
from multiprocessing.queues import Queue
from typing import Final, final

import torch
import work
from spawning import run_all
from torchft.parameter_server import ParameterServer
from torchft.process_group import ProcessGroup, ProcessGroupGloo
from turns import IDLE_TIMEOUT_S, play
from updating import Updater

TIMEOUT_S: Final = 120.0
SERVER: Final = 0  # ranks within a session
CLIENT: Final = 1


@final
class Server(ParameterServer):
    """Takes a gradient from every session, updates once, and gives all the values."""

    def __init__(self, num_workers: int, num_parameters: int) -> None:
        self._updater = Updater(num_workers, num_parameters)
        self._num_parameters = num_parameters
        self._lock = threading.Lock()
        self._all_added = threading.Barrier(num_workers, timeout=TIMEOUT_S)
        self._closed = threading.Semaphore(0)
        super().__init__(port=0)

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        """Make the process group of one end of a session."""
        return ProcessGroupGloo()

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one worker until it says that it is done."""
        gradient, goes_on = torch.empty(self._num_parameters), torch.ones(1)
        while True:
            pg.broadcast_one(goes_on, root=CLIENT).wait()
            if not goes_on.item():
                break
            pg.broadcast_one(gradient, root=CLIENT).wait()
            with self._lock:
                self._updater.add(gradient)
            self._all_added.wait()
            pg.broadcast_one(self._updater.values, root=SERVER).wait()
        self._closed.release()

    def wait_closed(self, num_sessions: int) -> None:
        """Block until that many sessions are done."""
        for _ in range(num_sessions):
            if not self._closed.acquire(timeout=IDLE_TIMEOUT_S):
                raise TimeoutError(f"a session was still open after {IDLE_TIMEOUT_S:g} s")


def serve(addresses: "Queue[str]", num_workers: int, num_parameters: int) -> None:
    """Be the server; workers wait while it computes, so it takes all cores."""
    torch.set_num_threads(multiprocessing.cpu_count())
    server = Server(num_workers, num_parameters)
    for _ in range(num_workers):
        addresses.put(server.address())
    server.wait_closed(num_workers)


def work_along(addresses: "Queue[str]", stage: str, rank: int, num_parameters: int) -> None:
    """Be a worker whose gradients are already where backward puts them."""
    torch.set_num_threads(1)
    session = Server.new_session(addresses.get(timeout=TIMEOUT_S))
    parameter = torch.from_numpy(work.first_values(num_parameters))
    gradient = torch.empty_like(parameter)
    gradients = [torch.from_numpy(each) for each in work.gradients(rank, num_parameters)]

    def prepare(index: int) -> None:
        gradient.copy_(gradients[index])

    def step(_: object) -> None:
        session.broadcast_one(torch.ones(1), root=CLIENT).wait()
        session.broadcast_one(gradient, root=CLIENT).wait()
        session.broadcast_one(parameter, root=SERVER).wait()

    play(
        stage,
        rank,
        {
            "prepare": prepare,
            "step": step,
            "write": lambda folder: work.write(parameter.numpy(), f"{folder}/{rank}"),
            "threads": lambda _: torch.get_num_threads(),
        },
    )
    session.broadcast_one(torch.zeros(1), root=CLIENT).wait()


def process(rank: int, addresses: "Queue[str]", stage: str, num_workers: int, num_parameters: int) -> None:
    """Be the server (the last rank) or one worker."""
    if rank == num_workers:
        serve(addresses, num_workers, num_parameters)
    else:
        work_along(addresses, stage, rank, num_parameters)


def main() -> None:
    """Run the server and all workers."""
    stage, num_workers, num_parameters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    addresses: Queue[str] = multiprocessing.get_context("spawn").Queue()
    run_all(process, [(rank, addresses, stage, num_workers, num_parameters) for rank in range(num_workers + 1)])


if __name__ == "__main__":
    main()
