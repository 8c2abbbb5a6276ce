"""A parameter server over torch.distributed.rpc: workers push by a call that returns the values once all have pushed.

It is the pattern of PyTorch's tutorial on asynchronous executions: the last push of a step sums, updates, and ends the
calls of all workers. Run as `python rpc_server.py STAGE WORKERS PARAMETERS`.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final

import torch
import work
from spawning import run_all
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future
from turns import play
from updating import Updater

TIMEOUT_S: Final = 120.0
SERVER: Final = "server"


class Server:
    """The updater, and the calls that wait for the step under way."""

    def __init__(self, num_workers: int, num_parameters: int) -> None:
        self._updater = Updater(num_workers, num_parameters)
        self._done: Future[Tensor] = Future()
        self._lock = threading.Lock()

    def take(self, gradient: Tensor) -> Future[Tensor]:
        """Add a gradient; the future holds the values after the step."""
        with self._lock:
            done = self._done
            complete = self._updater.add(gradient)
            if complete:
                self._done = Future()
        if complete:
            done.set_result(self._updater.values)
        return done


_servers: list[Server] = []  # of this process: what a call by name can find


@rpc.functions.async_execution
def push_pull(gradient: Tensor) -> Future[Tensor]:
    """Push a gradient to the server of the called process, and return its values after the step."""
    return _servers[0].take(gradient)


def process(stage: str, meeting: str, rank: int, num_workers: int, num_parameters: int) -> None:
    """Be the server (the last rank) or one worker."""
    serves = rank == num_workers
    torch.set_num_threads(multiprocessing.cpu_count() if serves else 1)  # workers wait while the server computes
    if serves:
        _servers.append(Server(num_workers, num_parameters))
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{meeting}", rpc_timeout=TIMEOUT_S, num_worker_threads=num_workers + 4
    )
    name = SERVER if serves else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=num_workers + 1, rpc_backend_options=options)
    if not serves:
        take_turns(stage, rank, num_parameters)
    rpc.shutdown()


def take_turns(stage: str, rank: int, num_parameters: int) -> None:
    """Be a worker whose gradients are already where backward puts them."""
    parameter = torch.from_numpy(work.first_values(num_parameters))
    gradient = torch.empty_like(parameter)
    gradients = [torch.from_numpy(each) for each in work.gradients(rank, num_parameters)]

    def prepare(index: int) -> None:
        gradient.copy_(gradients[index])

    def step(_: object) -> None:
        parameter.copy_(rpc.rpc_sync(SERVER, push_pull, args=(gradient,)))

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


def main() -> None:
    """Run the server and all workers."""
    stage, num_workers, num_parameters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        run_all(process, [(stage, meeting, rank, num_workers, num_parameters) for rank in range(num_workers + 1)])


if __name__ == "__main__":
    main()
