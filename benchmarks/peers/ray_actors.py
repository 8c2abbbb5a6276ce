"""A synchronous parameter server of Ray actors: gradients and values travel through the object store.

It is the pattern of Ray's own parameter server example: gradients travel as numpy arrays, values as torch tensors. With
`arrays` values travel as arrays as well, which the object store hands out without a copy: the best that Ray can do.
Run as `python ray_actors.py STAGE WORKERS PARAMETERS [arrays]`.
"""

import multiprocessing
import sys
import tempfile
from typing import Final

import ray
import torch
import work
from turns import leave_session, play
from updating import Updater

TIMEOUT_S: Final = 120.0
STORE_BYTES_EACH: Final = 6  # copies of the parameters, for each worker and the server, that the object store can hold


@ray.remote(num_cpus=0)
class Server:
    """Applies the gradients of all workers at once."""

    def __init__(self, num_workers: int, num_parameters: int, as_arrays: bool) -> None:
        leave_session()
        self._as_arrays = as_arrays
        torch.set_num_threads(multiprocessing.cpu_count())  # workers wait while it computes
        self._updater = Updater(num_workers, num_parameters)

    def update(self, *gradients: work.Vector) -> work.Vector | torch.Tensor:
        """Take one gradient of each worker; return the values after the step."""
        for gradient in gradients:
            self._updater.add(torch.from_numpy(gradient))
        return self._updater.values.numpy() if self._as_arrays else self._updater.values


@ray.remote(num_cpus=0)
class Worker:
    """One worker whose gradients are already where backward puts them."""

    def __init__(self, rank: int, num_parameters: int) -> None:
        leave_session()
        torch.set_num_threads(1)
        self._rank = rank
        self._parameter = torch.from_numpy(work.first_values(num_parameters))
        self._gradients = work.gradients(rank, num_parameters)
        self._index = 0

    def prepare(self, index: int) -> None:
        """Choose the gradient of the next step."""
        self._index = index

    def push(self) -> work.Vector:
        """Return the gradient, which goes to the object store."""
        return self._gradients[self._index]

    def pull(self, values: work.Vector | torch.Tensor) -> None:
        """Set the parameters."""
        self._parameter.copy_(values if isinstance(values, torch.Tensor) else torch.from_numpy(values))

    def write(self, folder: str) -> None:
        """Write the parameters to a file."""
        work.write(self._parameter.numpy(), f"{folder}/{self._rank}")


def main() -> None:
    """Start Ray on this machine alone, and step when asked."""
    stage, num_workers, num_parameters = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    as_arrays = sys.argv[4:] == ["arrays"]
    store_bytes = max(200 * 2**20, STORE_BYTES_EACH * 4 * num_parameters * (num_workers + 1))
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=multiprocessing.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=store_bytes,
            _temp_dir=folder,
        )
        try:
            take_turns(stage, num_workers, num_parameters, as_arrays=as_arrays)
        finally:
            ray.shutdown()


def take_turns(stage: str, num_workers: int, num_parameters: int, *, as_arrays: bool) -> None:
    """Drive the actors: this process only passes references along."""
    server = Server.remote(num_workers, num_parameters, as_arrays)
    workers = [Worker.remote(rank, num_parameters) for rank in range(num_workers)]
    ray.get([worker.prepare.remote(0) for worker in workers], timeout=TIMEOUT_S)

    def prepare(index: int) -> None:
        ray.get([worker.prepare.remote(index) for worker in workers], timeout=TIMEOUT_S)

    def step(_: object) -> None:
        values = server.update.remote(*[worker.push.remote() for worker in workers])
        ray.get([worker.pull.remote(values) for worker in workers], timeout=TIMEOUT_S)

    def write(folder: str) -> None:
        ray.get([worker.write.remote(folder) for worker in workers], timeout=TIMEOUT_S)

    play(stage, 0, {"prepare": prepare, "step": step, "write": write, "threads": lambda _: 1})


if __name__ == "__main__":
    main()
